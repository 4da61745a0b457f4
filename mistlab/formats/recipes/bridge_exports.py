"""Exports plans as overrides of a Megatron-Bridge recipe: degrees, batch, precision, memory
savings, and LoRA.

The recipe, a Python function, has the model; its configuration's sections have Megatron-core's
fields. Names are those of Megatron-Bridge 0.7 (``ConfigContainer``) over Megatron-core 0.16.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mistlab.core.files import format_yaml
from mistlab.core.values import refuse
from mistlab.engines.engine import SINGLE
from mistlab.export.accelerate import SPLITS_TOKENS
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_read import ENGINES, ENGINES_OF_TODAY
from mistlab.export.megatron.megatron_write import MEGATRON, engine_comment, run_options
from mistlab.export.nearest import TRAINS_ALL
from mistlab.export.target import OFFLOADED_STEP, Row, Target
from mistlab.formats.flags import RENAMED
from mistlab.formats.recipes.bridge_imports import (
    OF_ATTENTION,
    OF_NETWORKS,
    PRECISION_NAMES,
    read_bridge,
)
from mistlab.formats.recipes.recipe_rules import RANK, header, workload_row
from mistlab.job.job import Job
from mistlab.shell.session import LaunchFile

# The fields of a Megatron-Bridge configuration that a plan decides, by section.
DECIDED: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", SPLITS_TOKENS),
        *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
        *("cp_comm_type", "seq_length", "recompute_granularity", "recompute_method"),
        *("recompute_num_layers", "recompute_modules", "cpu_offloading_num_layers"),
        *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_grouped_gemm"),
        *("moe_token_dispatcher_type", "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
    ),
    "train": ("micro_batch_size", "global_batch_size"),
    "ddp": (
        *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        *("use_megatron_fsdp", "data_parallel_sharding_strategy"),
    ),
    "optimizer": (
        *("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"),
    ),
}
_PLACES: Mapping[str, tuple[str, str]] = {
    RENAMED.get(name, f"--{name.replace('_', '-')}"): (section, name)
    for section, names in DECIDED.items()
    for name in names
}
_SHARING = "use_distributed_optimizer"
_LISTS = ("recompute_modules",)
# Megatron-LM's options that select a precision; Megatron-Bridge has one setting for all of them.
_OF_PRECISION = ("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe")


def _options(job: Job) -> dict[str, str | bool]:
    """Return Megatron-LM's options for what a plan decides, each with its value, or True for a
    switch.
    """
    words = shlex.split(" ".join(run_options(job)))
    options: dict[str, str | bool] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            options[word] = True if following.startswith("--") else following
    return options


def write(job: Job) -> str:
    """Write a job as overrides of a Megatron-Bridge recipe."""
    content: dict[str, dict[str, Any]] = {section: {} for section in DECIDED}
    options = _options(job)
    for option, value in options.items():
        if option not in _PLACES:
            continue
        section, name = _PLACES[option]
        plain = value if value is True or name.endswith("_layout") else yaml.safe_load(str(value))
        content[section][name] = [value] if name in _LISTS else plain
    if "use_megatron_fsdp" not in content["ddp"]:
        # Recipes have these on.
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            content["ddp"].setdefault(name, False)
        if not content["ddp"][_SHARING]:
            # Megatron-Bridge shards the optimizer if either section says so.
            content["optimizer"][_SHARING] = False
    if "cpu_offloading_num_layers" in content["model"]:
        content["model"]["cpu_offloading"] = True
    others: dict[str, Any] = {"dataset": {"seq_length": job.workload.sequence_length}}
    of_precision = frozenset((name, options[name]) for name in _OF_PRECISION if name in options)
    others["mixed_precision"] = PRECISION_NAMES[of_precision]
    workload = job.workload
    if workload.train == "adapters":
        networks = OF_NETWORKS if workload.adapter_targets == "all" else ()
        others["peft"] = {
            "dim": workload.rank,
            "alpha": 2 * workload.rank,
            "target_modules": [*OF_ATTENTION, *networks],
        }
    kind = "its LoRA recipe" if workload.train == "adapters" else "its recipe"
    name = workload.model.checkpoint or workload.model.name or "the model"
    cluster = job.cluster
    start = (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} SCRIPT "
        "--config-file FILE"
    )
    head = header((f"{name} by {kind} of megatron.bridge", "data", "a tokenizer"), start)
    sections = {section: values for section, values in content.items() if values}
    return head + format_yaml({**sections, **others}) + engine_comment(job)


def _without_pattern(job: Job) -> Job:
    if job.workload.model.pattern:
        refuse(
            "workload.model",
            f"{job.workload.model.name or 'the mapping'} is a hybrid model, whose block pattern "
            "this export cannot write: export to megatron, or set hybrid_layer_pattern in the "
            "recipe yourself",
        )
    return job


def _bits_of_base(job: Job) -> Job:
    if job.workload.base != "16bit":
        refuse(
            "workload.base",
            f"{job.workload.base}, but Megatron-Bridge's LoRA keeps frozen weights in 16 bits: "
            "give base: 16bit, or export to trl",
        )
    return job


def _in_fewer_bits(job: Job) -> Job:
    if job.workload.precision in SINGLE:
        refuse(
            "workload.precision",
            f"{job.workload.precision}, but Megatron-Bridge's recipes train in 16 bits or fewer, "
            "even without mixed_precision: give precision: bf16, or export to megatron",
        )
    return job


def _notes(job: Job) -> Iterator[str]:
    yield "the recipe builds the model: choose the recipe of this model, and add data"
    options = _options(job)
    if "--use-megatron-fsdp" in options:
        yield "Megatron-FSDP needs checkpoint.ckpt_format: fsdp_dtensor"
    if "--optimizer-cpu-offload" in options:
        yield OFFLOADED_STEP


def _read(text: str, given: Given) -> Imported:
    return read_bridge(LaunchFile(text=text), given)


BRIDGE = Target(
    name="megatron-bridge",
    title="Megatron-Bridge",
    package="megatron-bridge==0.7.0",
    engines=ENGINES,
    rows=(
        Row(choices=("pattern",), nearest=_without_pattern, because="has no hybrid models here"),
        Row(choices=("base",), nearest=_bits_of_base, because="keeps frozen weights in 16 bits"),
        Row(choices=("precision",), nearest=_in_fewer_bits, because="trains in 16 bits or fewer"),
        workload_row("loss", "whole", "computes the loss without chunks: give loss: whole"),
        workload_row("states", "mixed", "keeps 32-bit states: give states: mixed"),
        *(row for row in MEGATRON.rows if row not in TRAINS_ALL and row.choices != ("model",)),
        RANK,
    ),
    write=write,
    read=_read,
    notes=_notes,
    own_engines={
        name: name if name.startswith("megatron-bridge") else engine
        for name, engine in MEGATRON.own_engines.items()
    },
    engines_of_today=ENGINES_OF_TODAY,
    precisions=tuple(name for name in MEGATRON.precisions if name not in SINGLE),
    optimizers=("adamw",),
    drops_tokens=True,
    beside=("model", "nodes", "gpus_per_node", "attention"),
)
