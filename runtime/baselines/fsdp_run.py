"""Trains a job in PyTorch's FSDP2: this package's torch model, each block sharded separately.

ZeRO-3 gathers weights again for the backward pass; ZeRO-2 keeps them. Offloading moves all states
to the host. If states have several replicas, the ranks form a mesh of replicas by shards.
Recomputed blocks use torch's checkpointing.
"""

import os
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from mistlab.core.values import reject
from mistlab.graph.treatments import PLAIN, TREATMENTS, treatments_of
from mistlab.job.job import Job
from mistlab.plan.plan import StagePlan
from runtime.baselines.baseline import BaselineSettings, Configuration, FirstWeights, sequences_of
from runtime.comm.processes import world_of_launcher
from runtime.data import batches_of
from runtime.models.config import TYPE_OF_PRECISION
from runtime.models.families import Recomputed, model_of

MESH = ("replicate", "shard")


class FsdpRun:
    """One rank's part of a training run in FSDP2."""

    def __init__(self, job: Job, settings: BaselineSettings) -> None:
        stage = job.plan.stages[0]
        if job.plan.num_stages > 1 or stage.tensor_parallel > 1:
            reject(
                "plan.stages: this command trains with FSDP2 only without pipeline and tensor "
                "parallelism: give one stage with tensor_parallel: 1"
            )
        _check_savings(stage)
        self._job, self._world = job, world_of_launcher()
        self._sequences = sequences_of(job, settings.seed)
        is_cpu = settings.device == "cpu"
        self._device = torch.device("cpu" if is_cpu else f"cuda:{self._world.local_rank}")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29512")
        torch.distributed.init_process_group(
            "gloo" if is_cpu else "nccl", rank=self._world.rank, world_size=self._world.size
        )
        self._model: Any = self._sharded(settings)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), **settings.of_adam, fused=not is_cpu
        )

    def step(self, number: int) -> float:
        """Train one step; returns the mean loss over the whole batch."""
        batches = batches_of(self._sequences, self._job, step=number, replica=self._world.rank)
        total = torch.zeros((), device=self._device)
        for index, (tokens, targets) in enumerate(batches):
            self._exchange_after(is_last=index == len(batches) - 1)
            loss = self._model(tokens.to(self._device), targets.to(self._device)) / len(batches)
            loss.backward()
            total += loss.detach().float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._world.size > 1:
            torch.distributed.all_reduce(total)
            total /= self._world.size
        return float(total)

    def configuration(self) -> Configuration:
        """The configuration of this FSDP2 run."""
        return Configuration.of_torch(
            self._job, f"FSDP2 of torch {torch.__version__}", "32 bits", self._optimizer
        )

    def close(self) -> None:
        """Disconnect from the other ranks of the FSDP2 run."""
        torch.distributed.destroy_process_group()

    def _exchange_after(self, *, is_last: bool) -> None:
        """Reduce gradients only after the last micro-batch: until then whole gradients accumulate,
        and gathered weights are kept. Under ZeRO-3, which has memory for shards only, reduce after
        each micro-batch.
        """
        if self._job.plan.stages[0].zero < 3:
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)

    def _sharded(self, settings: BaselineSettings) -> nn.Module:
        workload, stage = self._job.workload, self._job.plan.stages[0]
        # Master weights have 32 bits, as in the other systems; passes use copies in the run's
        # precision.
        model = model_of(workload).float()
        model.load_state_dict(FirstWeights(workload, settings.seed).all())
        model.to(self._device)
        dtype = TYPE_OF_PRECISION[workload.precision]
        how: dict[str, Any] = {
            "reshard_after_forward": stage.zero == 3,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        if stage.state_replicas > 1:
            shape = stage.state_replicas, stage.data_parallel // stage.state_replicas
            how["mesh"] = init_device_mesh(self._device.type, shape, mesh_dim_names=MESH)
        if stage.offload.optimizer:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        for number, block in enumerate(model.blocks):
            if number < stage.checkpointed_layers:
                model.blocks[number] = Recomputed(block)
            fully_shard(model.blocks[number], **how)
        fully_shard(model, **how)
        _prefetch(list(model.blocks))
        return model


def _check_savings(stage: StagePlan) -> None:
    """Raise an error for ways to save memory that FSDP2 would silently ignore."""
    if stage.offload.activations:
        reject(
            f"plan.stages[0].offload.activations: {stage.offload.activations:g}, but this command "
            "trains with FSDP2 only with all activations on the GPU: give 0"
        )
    for name in treatments_of(stage.value):
        if name not in (PLAIN, "recomputed"):
            reject(
                f"plan.stages[0].{TREATMENTS[name].dimension}: this command trains with FSDP2 only "
                "blocks that are plain or recomputed in full: give 0"
            )


def _prefetch(blocks: list[Any]) -> None:
    """Let the pass of each block gather the weights of the next block in advance."""
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])
