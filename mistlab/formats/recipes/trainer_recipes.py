"""Exports plans to recipes of axolotl, LLaMA-Factory and TRL: full training, or adapters on frozen
weights of 16, 8 or 4 bits.

Every rank is a replica of the model: FSDP2 shards the states over the ranks, or each rank has all
of them. The number of ranks is given to the launcher, not in the recipe. Keys are those of axolotl
0.18 (src/axolotl/utils/schemas), LLaMA-Factory 0.9.6 (src/llamafactory/hparams) and TRL 1.10
(ModelConfig, SFTConfig), with transformers' ``TrainingArguments``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mistlab.core.files import format_yaml
from mistlab.engines.engine import SINGLE
from mistlab.export.accelerate import Sharing
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import ENGINES, of_tuners
from mistlab.export.rules import with_workload
from mistlab.export.target import Target
from mistlab.formats import hf_trainer
from mistlab.formats.checkpoints import repository_of
from mistlab.formats.hf_tuners import read_axolotl, read_llama_factory
from mistlab.formats.recipes.recipe_rules import (
    ORDER_AND_NODES,
    RANK,
    SAVINGS,
    attention_layers,
    bits_of_base,
    fused_kernel,
    header,
    of_switches,
    one_mesh,
    unsharded_bases,
    workload_row,
)
from mistlab.job.job import Job
from mistlab.plan.workload import Workload
from mistlab.shell.session import LaunchFile

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """How a tool's recipe differs from arguments of Hugging Face's Trainer: names of keys, values
    for attention, keys that the user adds (``missing``), and the command that starts it
    (``start``, on a single GPU ``start_alone``).
    """

    names: Mapping[str, str] = field(default_factory=dict)
    attention: tuple[str, str, str] = ("attn_implementation", "eager", "flash_attention_2")
    missing: tuple[str, ...]
    start: str
    start_alone: str

    def write(self, job: Job, *of_tool: Settings) -> str:
        """Write the recipe of a job; ``of_tool`` are settings that only this tool has."""
        sharing, workload = Sharing.of(job), job.workload
        key, written_out, fused = self.attention
        is_pure = workload.states == "16bit"
        content: dict[str, Any] = {
            "model_name_or_path": repository_of(workload.model) or "MODEL",
            "per_device_train_batch_size": sharing.sequences,
            "gradient_accumulation_steps": job.plan.micro_batches,
            "max_length": workload.sequence_length,
            "packing": True,
            "bf16": workload.precision == "bf16" and not is_pure,
            "fp16": workload.precision == "fp16",
            **of_switches({"tf32": workload.precision == "tf32"}),
            "optim": _optimizer(workload, sharing),
            key: written_out if workload.attention == "math" else fused_kernel(job, fused),
        }
        for settings in of_tool:
            content |= settings
        named = {self.names.get(name, name): value for name, value in content.items()}
        start = self.start if job.plan.num_gpus > 1 else self.start_alone
        return header(self.missing, start) + format_yaml(named)


_OF_AXOLOTL = _Words(
    names={
        "model_name_or_path": "base_model",
        "per_device_train_batch_size": "micro_batch_size",
        "max_length": "sequence_len",
        "packing": "sample_packing",
        "optim": "optimizer",
    },
    missing=("datasets", "learning_rate"),
    start="axolotl train FILE, on all GPUs",
    start_alone="axolotl train FILE",
)
_OF_LLAMA_FACTORY = _Words(
    names={"max_length": "cutoff_len"},
    attention=("flash_attn", "disabled", "fa2"),
    missing=("dataset", "template", "output_dir"),
    start="FORCE_TORCHRUN=1 llamafactory-cli train FILE",
    start_alone="llamafactory-cli train FILE",
)
_OF_TRL = _Words(
    missing=("dataset_name", "output_dir"),
    start="accelerate launch --multi_gpu trl/scripts/sft.py --config FILE",
    start_alone="trl sft --config FILE",
)


def _optimizer(workload: Workload, sharing: Sharing) -> str:
    """Return the Trainer's name of the optimizer: torchao's 8-bit AdamW where FSDP2 shards weights,
    since bitsandbytes' cannot update sharded weights.
    """
    if workload.optimizer != "adamw-8bit":
        return "adamw_torch_fused"
    return "adamw_torch_8bit" if sharing.shards else "adamw_bnb_8bit"


def _write_axolotl(job: Job) -> str:
    workload, sharing = job.workload, Sharing.of(job)
    adapters: dict[str, Any] = {}
    if workload.train == "adapters":
        adapters = {"adapter": "qlora" if workload.base == "4bit" else "lora"}
        adapters |= {
            **bits_of_base(workload),
            "lora_r": workload.rank,
            "lora_alpha": 2 * workload.rank,
        }
        if workload.adapter_targets == "all":
            adapters["lora_target_linear"] = True
        else:
            adapters["lora_target_modules"] = attention_layers(job)
    fused = {}
    if workload.loss == "chunked":
        fused = {
            "plugins": ["axolotl.integrations.liger.LigerPlugin"],
            "liger_fused_linear_cross_entropy": True,
        }
    savings: dict[str, Any] = {"gradient_checkpointing": sharing.recomputes}
    if sharing.offloads_inputs:
        savings["activation_offloading"] = "hidden_states"
    ranks: dict[str, Any] = {}
    if sharing.shards:
        ranks = {
            "fsdp_version": 2,
            "fsdp_config": {
                "reshard_after_forward": sharing.level != 2,
                "offload_params": sharing.offloads_states,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        }
    pure = of_switches({"bfloat16": workload.states == "16bit"})
    return _OF_AXOLOTL.write(job, pure, adapters, fused, savings, ranks)


def _write_llama_factory(job: Job) -> str:
    workload, sharing = job.workload, Sharing.of(job)
    adapters: dict[str, Any] = {"stage": "sft", "finetuning_type": "full"}
    if workload.train == "adapters":
        targets = "all" if workload.adapter_targets == "all" else ",".join(attention_layers(job))
        adapters |= {"finetuning_type": "lora", "lora_rank": workload.rank, "lora_target": targets}
        if workload.base != "16bit":
            adapters["quantization_bit"] = int(workload.base[0])
    others = of_switches(
        {
            "pure_bf16": workload.states == "16bit",
            "enable_liger_kernel": workload.loss == "chunked",
            "use_unsloth_gc": sharing.offloads_inputs,
        }
    )
    savings = {"disable_gradient_checkpointing": not sharing.recomputes}
    return _OF_LLAMA_FACTORY.write(job, adapters, others, savings, _by_trainer(sharing))


def _write_trl(job: Job) -> str:
    workload, sharing = job.workload, Sharing.of(job)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(workload.precision, "float32")
    adapts, is_pure = workload.train == "adapters", workload.states == "16bit"
    settings: dict[str, Any] = {"dtype": dtype if adapts or is_pure else "float32"}
    if adapts:
        is_all = workload.adapter_targets == "all"
        targets = ["all-linear"] if is_all else attention_layers(job)
        settings |= {"use_peft": True, "lora_r": workload.rank, "lora_target_modules": targets}
        settings |= bits_of_base(workload)
        if workload.base == "4bit":
            # Quantise the scales of 4-bit weights too, and store the weights in a data type that
            # FSDP2 can shard.
            settings |= {"use_bnb_nested_quant": True, "bnb_4bit_quant_storage": dtype}
    # Packing "bfd" gives FlashAttention the lengths of documents; "wrapped" gives none, as other
    # kernels take no lengths.
    has_lengths = workload.attention == "flash" and fused_kernel(job, "flash") == "flash"
    packing = "bfd" if has_lengths else "wrapped"
    settings |= {
        "packing_strategy": packing,
        "loss_type": "chunked_nll" if workload.loss == "chunked" else "nll",
        "gradient_checkpointing": sharing.recomputes,
        **of_switches({"activation_offloading": sharing.offloads_inputs}),
    }
    return _OF_TRL.write(job, settings, _by_trainer(sharing))


def _by_trainer(sharing: Sharing) -> Settings:
    """Return the Trainer's arguments for how ranks share weights, gradients and optimizer
    states.
    """
    if not sharing.shards:
        return {}
    reshards = sharing.level != 2
    words = "full_shard auto_wrap" if reshards else "shard_grad_op auto_wrap"
    return {
        "fsdp": words + (" offload" if sharing.offloads_states else ""),
        "fsdp_config": {"version": 2, "reshard_after_forward": reshards},
    }


def _pure_in_bf16(job: Job) -> Job:
    is_pure = job.workload.states == "16bit" and job.workload.precision != "bf16"
    return with_workload(job, states="mixed") if is_pure else job


_PURE = workload_row("states", "mixed", "keeps 16-bit states with bf16 only", where=_pure_in_bf16)


def _notes(job: Job, *, liger: bool) -> Iterator[str]:
    what = (
        "data and learning rate"
        if repository_of(job.workload.model)
        else "MODEL, data, learning rate"
    )
    yield f"fill in {what}; the launcher decides how many processes run"
    if liger and job.workload.loss == "chunked":
        yield "the fused loss needs the package liger-kernel"
    is_known = job.workload.model.family in ("llama", "falcon")
    if job.workload.adapter_targets == "attention" and not is_known:
        yield "give the names of the linear layers with adapters as in the model's own module"


_Write = Callable[[Job], str]
_Read = Callable[[LaunchFile, Given], Imported]


def _target(name: str, title: str, package: str, write: _Write, read: _Read) -> Target:
    return Target(
        name=name,
        title=title,
        package=package,
        engines=of_tuners(ENGINES),
        rows=(
            *(one_mesh(title), *ORDER_AND_NODES, unsharded_bases(title, ("8bit",))),
            *(*SAVINGS, _PURE, RANK),
        ),
        write=write,
        read=lambda text, given: read(LaunchFile(text=text), given),
        notes=partial(_notes, liger=name != "trl"),
        precisions=("fp16", "bf16", *SINGLE),
        optimizers=("adamw", "adamw-8bit"),
        beside=("model", "nodes", "gpus_per_node"),
        always_overlaps=True,
    )


AXOLOTL = _target("axolotl", "axolotl", "axolotl==0.18.0", _write_axolotl, read_axolotl)
LLAMA_FACTORY = _target(
    *("llama-factory", "LLaMA-Factory", "llamafactory==0.9.6"),
    write=_write_llama_factory,
    read=read_llama_factory,
)
TRL = _target("trl", "TRL", "trl==1.10.0", _write_trl, hf_trainer.read)
