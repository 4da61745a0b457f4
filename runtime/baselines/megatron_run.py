"""Trains a job in Megatron-core: its GPT model, schedules, data parallelism and optimizer.

The configurations are those that the job exports, with the fusions that Megatron-LM has by default.
Layers are Transformer Engine's if it is installed, as for most users. Otherwise they are
Megatron-core's own (local), which store attention's scores; then the name of the run says so. On
CPUs, CUDA devices that Megatron-core names are replaced by the CPU, and nothing is compiled.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.functional import gelu

from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from runtime.baselines.baseline import (
    ENGINE_NORMS,
    LOCAL_NORMS,
    BaselineSettings,
    Configuration,
    FirstWeights,
    class_name,
    decay_of,
    megatron_weights,
    sequences_of,
)
from runtime.baselines.builds import FUSED_GRADIENTS, TRANSFORMER_ENGINE, has_package
from runtime.baselines.megatron_configs import MegatronConfigs, configs_of
from runtime.baselines.on_cpu import on_cpu
from runtime.comm.processes import world_of_launcher
from runtime.data import batches_of
from runtime.engine.training import FP16_LOSS_SCALE

Batch = tuple[Tensor, Tensor]


# The fusions of Megatron-core for dense models, as fields of its configuration.
FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
)


class MegatronRun:
    """One rank's part of a training run in Megatron-core."""

    def __init__(self, job: Job, settings: BaselineSettings) -> None:
        self._job, self._settings = job, settings
        self._sequences = sequences_of(job, settings.seed)
        world = world_of_launcher()
        is_cpu = settings.device == "cpu"
        self._has_engine = has_package(TRANSFORMER_ENGINE)
        self._place: Any = on_cpu if is_cpu else nullcontext
        self._device = torch.device("cpu" if is_cpu else f"cuda:{world.local_rank}")
        if not is_cpu:
            torch.cuda.set_device(self._device)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        torch.distributed.init_process_group(
            "gloo" if is_cpu else "nccl", rank=world.rank, world_size=world.size
        )
        with self._placed():
            self._start(configs_of(TARGETS["megatron"].write(job), **self._overrides()))

    def step(self, number: int) -> float:
        """Train one step; returns the mean loss over the whole batch."""
        with self._placed():
            return self._step(number)

    def configuration(self) -> Configuration:
        """The configuration of this run, from Megatron-core's own configurations."""
        made, adam = self._made.transformer, self._optimizer
        while hasattr(adam, "chained_optimizers"):
            adam = adam.chained_optimizers[0]
        while hasattr(adam, "optimizer"):
            adam = adam.optimizer
        engine = "Transformer Engine" if self._has_engine else "local"
        stores = "scores stored" if not self._has_engine else made.attention_backend.name
        wide = self._made.data_parallel.grad_reduce_in_fp32 or made.params_dtype == torch.float32
        return Configuration(
            system=f"Megatron-core {megatron_version}"
            + ("" if self._has_engine else ", local layers"),
            layers=f"{engine} layers of Megatron-core",
            attention=f"{engine}, {stores}",
            fusions=", ".join(name for name in FUSIONS if getattr(made, name)) or "none",
            sums="32 bits" if wide else "16 bits",
            optimizer=class_name(adam),
            decay=decay_of(adam),
        )

    def close(self) -> None:
        """Disconnect from the other ranks of the Megatron-LM run."""
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    def _placed(self) -> AbstractContextManager[None]:
        placed: AbstractContextManager[None] = self._place()
        return placed

    def _overrides(self) -> dict[str, Any]:
        model = self._job.workload.model
        on_gpu, engine = self._settings.device != "cpu", self._has_engine
        overrides: dict[str, Any] = {
            "use_cpu_initialization": not on_gpu,
            "perform_initialization": False,
            "transformer_impl": TRANSFORMER_ENGINE if engine else "local",
            # For gated networks Megatron-core fuses the gate with its bias; without biases it fuses
            # the gate alone.
            "bias_activation_fusion": model.mlp_type == "gated_mlp",
            "bias_dropout_fusion": True,
            "masked_softmax_fusion": on_gpu and not engine,
            "apply_rope_fusion": engine and model.position_embedding == "rotary",
            # Megatron-core's own loss kernel rounds gradients of logits to bf16 in any precision,
            # so without Transformer Engine it is used only with bf16.
            "cross_entropy_loss_fusion": engine or self._job.workload.precision == "bf16",
            "cross_entropy_fusion_impl": "te" if engine else "native",
            "gradient_accumulation_fusion": on_gpu and has_package(FUSED_GRADIENTS),
        }
        if self._job.workload.attention != "math":
            overrides["attention_backend"] = AttnBackend.auto
        if model.activation == "gelu_tanh":
            overrides["activation_func"] = partial(gelu, approximate="tanh")
        return overrides

    def _start(self, configs: MegatronConfigs) -> None:
        made, others, workload = configs.transformer, configs.others, self._job.workload
        self._made = configs
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=made.tensor_model_parallel_size,
            pipeline_model_parallel_size=made.pipeline_model_parallel_size,
        )
        model_parallel_cuda_manual_seed(self._settings.seed)
        stage = self._job.plan.stages[0]
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            None,
            workload.global_batch,
            stage.micro_batch,
            stage.data_parallel,
        )
        layers = (
            get_gpt_layer_with_transformer_engine_spec()
            if self._has_engine
            else get_gpt_layer_local_spec(normalization=made.normalization)
        )
        model = GPTModel(
            config=made,
            transformer_layer_spec=layers,
            vocab_size=others["vocab"],
            max_sequence_length=workload.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=others["tied_embeddings"],
            position_embedding_type=others["position_embedding"],
            rotary_percent=others["rotary_percent"],
            rotary_base=others["rotary_base"],
        )
        self._load(model)
        model.to(device=self._device, dtype=made.params_dtype)
        self._model = DistributedDataParallel(
            config=made, ddp_config=configs.data_parallel, module=model
        )
        self._model.broadcast_params()
        optimizer, training = configs.optimizer, self._settings.training
        optimizer.lr, optimizer.adam_eps = training.learning_rate, training.epsilon
        optimizer.adam_beta1, optimizer.adam_beta2 = training.beta1, training.beta2
        optimizer.weight_decay, optimizer.clip_grad = training.weight_decay, 0.0
        optimizer.initial_loss_scale = FP16_LOSS_SCALE
        self._optimizer = get_megatron_optimizer(optimizer, [self._model], config_overrides={})
        made.finalize_model_grads_func = finalize_model_grads
        made.grad_scale_func = self._optimizer.scale_loss
        made.no_sync_func = self._model.no_sync

    def _load(self, model: GPTModel) -> None:
        workload = self._job.workload
        parameters = dict(model.named_parameters())
        stages = [stage.layers for stage in self._job.plan.stages]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        first = sum(stages[:stage])
        weights = megatron_weights(
            FirstWeights(workload, self._settings.seed),
            workload.model,
            blocks=range(first, first + stages[stage]),
            rank=parallel_state.get_tensor_model_parallel_rank(),
            ranks=parallel_state.get_tensor_model_parallel_world_size(),
            norms=ENGINE_NORMS if self._has_engine else LOCAL_NORMS,
        )
        for name, tensor in weights:
            if name in parameters:
                parameters.pop(name).data.copy_(tensor)
        assert not parameters, f"no first weights for {', '.join(parameters)}"

    def _step(self, number: int) -> float:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        replica = parallel_state.get_data_parallel_rank()
        batches = batches_of(self._sequences, self._job, step=number, replica=replica)
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=self._job.plan.micro_batches,
            seq_length=self._job.workload.sequence_length,
            micro_batch_size=self._job.plan.stages[0].micro_batch,
            forward_only=False,
        )
        self._optimizer.step()
        return self._mean([found["loss"] for found in losses])

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        tokens, targets = (part.to(self._device) for part in next(batches))
        places = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
        output = model(tokens, places, None, labels=targets)

        def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean loss over all replicas, on every rank; only the last stage computes losses."""
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)
        last = self._job.plan.stages[-1]
        # Each rank of the last stage adds the mean loss of its replica.
        torch.distributed.all_reduce(total)
        return float(total) / (last.data_parallel * last.tensor_parallel)
