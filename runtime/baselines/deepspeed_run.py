"""Trains a job in DeepSpeed: this package's torch model under DeepSpeed's engine.

DeepSpeed's configuration is what the job exports. Recomputed blocks use torch's checkpointing.
"""

import json
import os
from typing import Any

import torch
from torch import nn

from mistlab.core.values import reject
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from runtime.baselines.baseline import BaselineSettings, Configuration, FirstWeights, sequences_of
from runtime.comm.processes import world_of_launcher
from runtime.data import batches_of
from runtime.models.families import Recomputed, model_of


class DeepSpeedRun:
    """One rank's part of a training run in DeepSpeed."""

    def __init__(self, job: Job, settings: BaselineSettings, *, compiles: bool = False) -> None:
        if job.plan.num_stages > 1 or job.plan.stages[0].tensor_parallel > 1:
            reject(
                "plan.stages: this command trains with DeepSpeed only without pipeline and tensor "
                "parallelism: give one stage with tensor_parallel: 1"
            )
        # DeepSpeed reads this variable on import.
        os.environ["DS_ACCELERATOR"] = settings.device
        import deepspeed  # noqa: PLC0415 (its package)

        self._job, self._settings, self._compiles = job, settings, compiles
        self._world = world_of_launcher()
        self._sequences = sequences_of(job, settings.seed)
        deepspeed.init_distributed("nccl" if settings.device == "cuda" else "gloo")
        model = self._model()
        on_host = bool(job.plan.stages[0].offload.optimizer) and not compiles
        adam = adam_of(settings, list(model.parameters()), on_host=on_host)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=self._config())
        if compiles:
            self._engine.compile()

    def step(self, number: int) -> float:
        """Train one step; returns the mean loss over the whole batch."""
        device, losses = self._engine.device, []
        batches = batches_of(self._sequences, self._job, step=number, replica=self._world.rank)
        for tokens, targets in batches:
            loss = self._engine(tokens.to(device), targets.to(device))
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach().float())
        mean = torch.stack(losses).mean()
        if self._world.size > 1:
            torch.distributed.all_reduce(mean)
            mean /= self._world.size
        return float(mean)

    def configuration(self) -> Configuration:
        """The configuration of this run, from DeepSpeed's engine."""
        import deepspeed  # noqa: PLC0415 (its package)

        _, summed = self._engine.get_data_types()
        system = f"DeepSpeed {deepspeed.__version__}" + (", DeepCompile" if self._compiles else "")
        return Configuration.of_torch(
            self._job, system, f"{8 * summed.itemsize} bits", self._engine.basic_optimizer
        )

    def close(self) -> None:
        """Disconnect from the other ranks of the DeepSpeed run."""
        torch.distributed.destroy_process_group()

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(TARGETS["deepspeed"].write(self._job))
        if self._compiles:
            compile_steps(config)
        config["zero_force_ds_cpu_optimizer"] = self._settings.device == "cuda"
        config["zero_allow_untested_optimizer"] = True
        return config

    def _model(self) -> nn.Module:
        workload, stage = self._job.workload, self._job.plan.stages[0]
        model = model_of(workload)
        model.load_state_dict(FirstWeights(workload, self._settings.seed).all())
        for number in range(stage.checkpointed_layers):
            model.blocks[number] = Recomputed(model.blocks[number])
        return model


def adam_of(settings: BaselineSettings, parameters: list[nn.Parameter], *, on_host: bool) -> Any:
    """DeepSpeed's AdamW for GPUs, or for states offloaded to the host; on CPUs torch's AdamW."""
    if settings.device != "cuda":
        return torch.optim.AdamW(parameters, **settings.of_adam)
    # DeepSpeed compiles an optimizer when it is first made, so only the one needed is made.
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # noqa: PLC0415 (its package)

    if on_host:
        return DeepSpeedCPUAdam(parameters, **settings.of_adam, adamw_mode=True)
    return FusedAdam(parameters, **settings.of_adam, adam_w_mode=True)


def compiled_run(job: Job, settings: BaselineSettings) -> DeepSpeedRun:
    """A run with DeepSpeed's DeepCompile, which compiles the model and schedules all-gathers and
    offloading in the compiled graphs.
    """
    return DeepSpeedRun(job, settings, compiles=True)


def compile_steps(config: dict[str, Any]) -> None:
    """Change a configuration with ZeRO-Offload so that DeepCompile offloads the optimizer states;
    it moves them back to the GPU for the step.
    """
    zero = config["zero_optimization"]
    offloads = zero.pop("offload_optimizer", None) is not None
    zero.pop("offload_param", None)
    config["compile"] = {"deepcompile": True, "offload_opt_states": offloads}
