"""Imports Accelerate's YAML configurations, and exports plans to them.

Model, sequences and batches are the training script's. Sharding is that of FSDP version 1 or 2, of
DeepSpeed's ZeRO, in the file or in a JSON that it names, or of Megatron-LM's plugin. Left-out keys
take the defaults of ``accelerate launch`` (accelerate/commands/launch.py of 1.15).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mistlab.core.files import about, format_yaml, parse_yaml
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export import deepspeed as deepspeed_read
from mistlab.export.deepspeed import offload_states, read_configuration
from mistlab.export.found import Found, Section, harmless_names, parse_json
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import (
    ENGINES,
    OFFLOADED,
    STATES,
    canonical,
    notes_on_training,
    offloads,
    sharded,
)
from mistlab.export.rules import (
    EQUAL_NODES,
    INPUTS_OFFLOADED,
    RECOMPUTED,
    among_orders,
    one_stage,
    with_values,
)
from mistlab.export.target import Row, Target
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.shell.session import LaunchFile

HARMLESS = harmless_names("accelerate")
# The GEMM precision that each value of ``mixed_precision`` in an Accelerate file stands for.
PRECISIONS: Mapping[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
KINDS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP", "MULTI_GPU", "NO")
# The ZeRO level that each FSDP sharding strategy of torch corresponds to; a file may also give a
# strategy by its number, counted from 1. The last two strategies shard only inside a node.
STRATEGIES: Mapping[str, int] = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
_COMPILED = ("fsdp-compiled", *ENGINES)


def read(text: str, given: Given) -> Imported:
    """Import the text of an Accelerate configuration as a job; files that the text names are not
    available.
    """
    return read_source(LaunchFile(text=text), given)


def read_source(source: LaunchFile, given: Given) -> Imported:
    """Import an Accelerate configuration file as a job; it holds neither model nor sequence length
    nor batch, so the user gives these.
    """
    draft = Found()
    top = Section(parse_yaml(source.text, "the configuration"), "", draft)
    engines = read_choices(top, draft, source, given)
    top.tell_of_rest(HARMLESS | deepspeed_read.HARMLESS)
    return draft.job(given, engines)


def read_choices(top: Section, draft: Found, source: LaunchFile, given: Given) -> tuple[str, ...]:
    """Read an Accelerate configuration into ``draft``; returns the names of the engines that can
    predict the run it describes.
    """
    kind = top.text("distributed_type", "NO").upper()
    if kind not in KINDS:
        reject(f"distributed_type: {kind!r} is not supported: give one of {', '.join(KINDS)}")
    if top.switch("use_cpu"):
        reject("use_cpu: true trains without GPUs, which is not supported: give use_cpu: false")
    _processes(top, draft, kind)
    draft.precision = _precision(top, draft)
    draft.micro_batches = top.whole("gradient_accumulation_steps") or draft.micro_batches
    top.unsaid({"fp8_config": "GEMMs are predicted in 16 bits"})
    compiles = _is_compiled(top)
    layers = given.model.layers if given.model else 0
    if kind == "DEEPSPEED":
        _read_deepspeed(top.section("deepspeed_config"), draft, source, given)
        _read_degrees(top, draft, shards=False)
        return deepspeed_read.ENGINES
    if kind == "MEGATRON_LM":
        return _read_megatron(top.section("megatron_lm_config"), draft, layers)
    _read_degrees(top, draft, shards=kind == "FSDP")
    if kind == "FSDP":
        _read_fsdp(top.section("fsdp_config"), draft, given, layers)
    return _COMPILED if compiles else ENGINES


def _processes(top: Section, draft: Found, kind: str) -> None:
    """Read the number of processes on all machines; if the file lacks it, the number of GPUs per
    machine stays unknown.
    """
    machines = top.whole("num_machines") or 1
    processes = 1 if kind == "NO" else None
    processes = top.whole("num_processes") or processes
    draft.nodes = machines
    if processes is None:
        return
    if processes % machines:
        reject(
            f"num_processes: {processes} is not a multiple of num_machines {machines}: give the "
            "processes of all machines together, equally many on each"
        )
    draft.gpus_per_node = processes // machines


def _precision(section: Section, draft: Found) -> Precision:
    value = section.get("mixed_precision", "no")
    # YAML parses the unquoted word no as false.
    word = "no" if value is False or value is None else str(value).lower()
    if word not in PRECISIONS:
        reject(f"mixed_precision: {word!r} is unknown: give one of {', '.join(PRECISIONS)}")
    if word == "fp8":
        draft.remark("ignored", "mixed_precision", "fp8: GEMMs are predicted in 16 bits")
    return PRECISIONS[word]


def _is_compiled(top: Section) -> bool:
    section = top.section("dynamo_config")
    backend = section.text("dynamo_backend", "NO").upper()
    section.take_all()
    return backend not in ("NO", "")


def _read_degrees(top: Section, draft: Found, *, shards: bool) -> None:
    """Read the parallel degrees in the section ``parallelism_config``, whose keys may begin with
    that name.
    """
    section = top.section("parallelism_config")
    sizes = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        long = f"parallelism_config_{name}_size"
        key = long if long in section.content else f"{name}_size"
        sizes[name] = section.whole(key) or 1
    if sizes["tp"] > 1:
        draft.values["tensor_parallel"] = sizes["tp"]
    strategy = section.text("parallelism_config_cp_comm_strategy", "allgather")
    if sizes["cp"] > 1:
        exchange = GATHER if strategy == "allgather" else RING
        draft.values |= {"context_parallel": sizes["cp"], "context_exchange": exchange}
    if sizes["sp"] > 1:
        draft.values |= {"context_parallel": sizes["sp"], "context_exchange": HEADS}
    if sizes["dp_replicate"] > 1 and shards:
        draft.values["state_replicas"] = sizes["dp_replicate"]
    _check_degrees(section, draft, sizes)


# The names of parallel degrees in fine-tuning recipes, and the plan dimension that each one means.
_DEGREES: Mapping[str, str] = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "dp_replicate": "state_replicas",
}
# The key that enables sequence parallelism in fine-tuning recipes.
SPLITS_TOKENS = "sequence_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a fine-tuning recipe spreads a model over ranks: its ZeRO level, parallel degrees and
    memory savings.

    ``degrees`` are those of tp, cp, ep and dp_replicate, ``level`` is ZeRO's, ``sequences`` are a
    rank's at a time. Blocks may be recomputed, and their inputs, or all states, be offloaded.
    Ranks of cp divide attention's heads if they ``exchange_heads``.
    """

    level: int
    sequences: int | None
    degrees: Mapping[str, int] = field(default_factory=dict)
    recomputes: bool = False
    splits_tokens: bool = False
    offloads_inputs: bool = False
    offloads_states: bool = False
    exchange_heads: bool = False

    @classmethod
    def of(cls, job: Job) -> Self:
        """Read from a job with a single pipeline stage how its ranks share the model."""
        (stage,) = job.plan.stages
        return cls(
            level=stage.zero,
            sequences=stage.micro_batch,
            degrees={word: stage.degree(name) for word, name in _DEGREES.items()},
            recomputes=stage.checkpointed_layers > 0,
            splits_tokens=stage.sequence_parallel > 0,
            offloads_inputs=stage.offload.activations > 0,
            offloads_states=offloads(job),
        )

    @property
    def shards(self) -> bool:
        """Whether the recipe needs FSDP, because it shards or offloads weights, gradients or
        optimizer states.
        """
        return self.level > 0 or self.offloads_states

    def take(self, draft: Found, model: ModelSpec) -> None:
        """Write a recipe's ZeRO level, parallel degrees and memory savings into ``draft``, the
        choices of the imported file.
        """
        draft.micro_batch = self.sequences
        draft.values |= {_DEGREES[word]: n for word, n in self.degrees.items() if n > 1}
        draft.values["zero"] = self.level
        if self.splits_tokens and self.degrees.get("tp", 1) > 1:
            draft.values["sequence_parallel"] = 1
        if self.exchange_heads and self.degrees.get("cp", 1) > 1:
            draft.values["context_exchange"] = HEADS
        if self.recomputes:
            draft.values["checkpointed_layers"] = model.layers
            draft.values |= {"offload_activations": 1.0} if self.offloads_inputs else {}
        if self.offloads_states:
            draft.values |= dict.fromkeys(STATES, 1.0)


def offload_inputs(draft: Found) -> bool:
    """Note in ``draft`` that the saved inputs of recomputed blocks are offloaded; returns whether
    any block is recomputed.
    """
    recomputes = bool(draft.values.get("checkpointed_layers"))
    if recomputes:
        draft.values["offload_activations"] = 1.0
    return recomputes


def _check_degrees(section: Section, draft: Found, sizes: Mapping[str, int]) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if product > 1 and draft.nodes and draft.gpus_per_node:
        processes = draft.nodes * draft.gpus_per_node
        if product != processes:
            named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            text = (
                f"{named} {'make' if ' x ' in named else 'makes'} {product} processes, but "
                f"num_processes is {processes}: num_processes is used, and data parallelism "
                "follows from it"
            )
            draft.remark("contradicting", section.name, text)


def _read_fsdp(section: Section, draft: Found, given: Given, layers: int) -> None:
    version = section.whole("fsdp_version") or 1
    if version == 1:
        _read_version_1(section, draft, given)
    else:
        text = section.get("fsdp_sharding_strategy")
        if text is not None:
            text_of_remark = f"{text}: fsdp_version 2 ignores it; fsdp_reshard_after_forward counts"
            draft.remark("contradicting", section.path("fsdp_sharding_strategy"), text_of_remark)
        reshards = section.switch("fsdp_reshard_after_forward", default=True)
        draft.values["zero"] = 3 if reshards else 2
    if section.switch("fsdp_offload_params") or section.switch("fsdp_cpu_offload"):
        draft.values |= dict.fromkeys(STATES, 1.0)
    keeps = section.switch("fsdp_activation_cpu_offload")
    if section.switch("fsdp_activation_checkpointing"):
        draft.values["checkpointed_layers"] = layers
        if section.switch("fsdp_activation_checkpointing_offload") or keeps:
            draft.values["offload_activations"] = 1.0


def _read_version_1(section: Section, draft: Found, given: Given) -> None:
    key = "fsdp_sharding_strategy"
    if key not in section.content and not isinstance(
        section.content.get("fsdp_reshard_after_forward", True), bool
    ):
        key = "fsdp_reshard_after_forward"
    section.get("fsdp_reshard_after_forward")
    name = strategy_of(section.text(key, "FULL_SHARD"), section.path(key))
    draft.values["zero"] = STRATEGIES[name]
    nodes = given.nodes or draft.nodes or 1
    if name.startswith("HYBRID") and nodes > 1:
        # Torch shards a model inside each node, and keeps a replica of its sharded states on every
        # node.
        draft.values["state_replicas"] = nodes


def strategy_of(text: str, where: str) -> str:
    """Return the name of the FSDP sharding strategy that a file gives by name or by number."""
    names = tuple(STRATEGIES)
    word = text.upper().removeprefix("SHARDINGSTRATEGY.").lstrip("_")
    if re.fullmatch(r"[1-5]", word):
        return names[int(word) - 1]
    if word not in STRATEGIES:
        reject(f"{where}: {text!r} is unknown: give one of {', '.join(names)}, or 1 to 5")
    return word


def _read_deepspeed(section: Section, draft: Found, source: LaunchFile, given: Given) -> None:
    path = section.text("deepspeed_config_file")
    if path:
        content = deepspeed_file(path, source, section.path("deepspeed_config_file"))
        inner = Section(with_precision(content, draft.precision), path, draft)
        machine = (draft.nodes, draft.gpus_per_node)
        read_configuration(inner, draft, given, given.model)
        draft.nodes, draft.gpus_per_node = machine
        inner.tell_of_rest(deepspeed_read.HARMLESS)
        return
    level = section.whole("zero_stage", minimum=0)
    level = 2 if level is None else level
    if level > 3:
        reject(f"{section.path('zero_stage')}: {level} is unknown: give 0, 1, 2 or 3")
    draft.values["zero"] = level
    draft.overlaps = level == 3
    draft.micro_batches = section.whole("gradient_accumulation_steps") or draft.micro_batches
    devices = {
        name: section.text(f"offload_{key}_device", "none").lower() in ("cpu", "nvme")
        for name, key in (("optimizer", "optimizer"), ("weights", "param"))
    }
    offload_states(section, level, **devices)


def deepspeed_file(path: str, source: LaunchFile, where: str) -> Mapping[str, Any]:
    """Return the sections of the DeepSpeed configuration file that another configuration names."""
    text = source.beside(path)
    if text is None:
        reject(
            f"{where}: {path} is not in the folder of the imported file: put it there, or import "
            f"{path} itself"
        )
    with about(f"{where}: {path}"):
        return parse_json(text)


def with_precision(content: Mapping[str, Any], precision: str | None) -> Mapping[str, Any]:
    """Return a DeepSpeed configuration in which the precision of the run replaces the value
    "auto".
    """
    filled = dict(content)
    for name in deepspeed_read.HALVES:
        inner = filled.get(name)
        if isinstance(inner, Mapping) and inner.get("enabled") == "auto":
            filled[name] = {**inner, "enabled": precision == name}
    return filled


def _read_megatron(section: Section, draft: Found, layers: int) -> tuple[str, ...]:
    """Read the section for Megatron-LM in an Accelerate configuration: parallel degrees and memory
    savings.
    """
    prefix = "megatron_lm_"
    draft.values["tensor_parallel"] = section.whole(f"{prefix}tp_degree") or 1
    draft.values["sequence_parallel"] = int(section.switch(f"{prefix}sequence_parallelism"))
    draft.values["context_parallel"] = section.whole(f"{prefix}context_parallel_size") or 1
    draft.values["expert_parallel"] = section.whole(f"{prefix}expert_model_parallel_size") or 1
    draft.num_stages = section.whole(f"{prefix}pp_degree") or 1
    draft.micro_batches = section.whole(f"{prefix}num_micro_batches") or draft.micro_batches
    draft.values["zero"] = int(section.switch(f"{prefix}use_distributed_optimizer"))
    draft.overlaps = False
    if section.switch(f"{prefix}optimizer_cpu_offload"):
        draft.values["offload_optimizer"] = 1.0
    granularity = section.text(f"{prefix}recompute_granularity")
    if section.switch(f"{prefix}recompute_activations") or granularity == "selective":
        draft.values["core_recomputed_layers"] = layers
    elif granularity == "full":
        count = section.whole(f"{prefix}recompute_num_layers") or layers
        blocks = section.text(f"{prefix}recompute_method") == "block"
        draft.values["checkpointed_layers"] = count if blocks else layers
    section.unsaid({f"{prefix}use_custom_fsdp": "states are predicted as sharded by Megatron-LM"})
    return ("megatron", "mistlab")


# Exports plans to the YAML configuration of Hugging Face Accelerate 1.15, which trains with FSDP2
# or DDP.
#
# There are no pipelines. Batch sizes belong to the training script, so the file has them as
# comments only. FSDP2 recomputes all blocks or none, and can offload the inputs that recomputed
# blocks keep.


def _zero(job: Job) -> Job:
    """Return the job with a ZeRO level that Accelerate supports. FSDP2 is required also where
    blocks are recomputed, or where tensor-parallel ranks share layers.
    """
    job = sharded(job)
    first = job.plan.stages[0]
    needs = first.checkpointed_layers > 0 or first.tensor_parallel > 1
    job = with_values(job, {"zero": 2}) if needs and first.zero == 0 else job
    return canonical(job, shares_experts=False)


ROWS = (
    Row(choices=("order",), nearest=among_orders((DEFAULT_ORDER,)), because="has no pipelines"),
    Row(
        choices=("layers", "data_parallel", "tensor_parallel", "micro_batch"),
        nearest=one_stage,
        because="has no pipelines",
    ),
    EQUAL_NODES,
    RECOMPUTED,
    Row(
        choices=("zero",),
        nearest=_zero,
        because="shards by FSDP2, as ZeRO-2 or 3 does, and needs it for offloading, recomputation "
        "and tensor parallelism",
    ),
    OFFLOADED,
    INPUTS_OFFLOADED,
)


def write(job: Job) -> str:
    """Write the Accelerate configuration of a job as YAML; settings of the training script appear
    as comments.
    """
    cluster, stage, workload = job.cluster, job.plan.stages[0], job.workload
    recomputes = stage.checkpointed_layers > 0
    uses_fsdp = stage.zero > 0 or recomputes or offloads(job) or stage.tensor_parallel > 1
    kind = "FSDP" if uses_fsdp else "MULTI_GPU" if job.plan.num_gpus > 1 else "NO"
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no" if workload.precision == "fp32" else workload.precision,
        "num_machines": cluster.nodes,
        "num_processes": job.plan.num_gpus,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if uses_fsdp:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage.zero == 3,
            "fsdp_offload_params": offloads(job),
            "fsdp_activation_checkpointing": recomputes,
            "fsdp_activation_checkpointing_offload": stage.offload.activations > 0,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": stage.data_parallel,
            "parallelism_config_tp_size": stage.tensor_parallel,
            "parallelism_config_cp_size": 1,
        }
    return (
        f"# In the training script: {stage.micro_batch} sequences of "
        f"{workload.sequence_length} tokens a batch,\n"
        f"# Accelerator(gradient_accumulation_steps={job.plan.micro_batches})\n"
        f"{format_yaml(content)}"
    )


def _notes(job: Job) -> Iterator[str]:
    yield (
        "the training script has to choose the model, its sequence length, batch size and gradient "
        "accumulation"
    )
    yield from notes_on_training(job)
    if job.plan.stages[0].tensor_parallel > 1:
        yield "tensor parallelism needs a model of transformers with a tp_plan"


ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    package="accelerate==1.15.0",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "sequence_length", "attention", "global_batch", "micro_batch"),
    always_overlaps=True,
)
