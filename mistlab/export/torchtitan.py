"""Plans as the TOML configuration of torchtitan up to 0.2.2.

Any division of blocks can be said, by module names. States are sharded by FSDP2. Recomputed are
all blocks of a stage, or every n-th, or every second product of all. Models are chosen by a
flavour; one that torchtitan does not bring has to be added to its table under the plan's name.
"""

import tomllib
from collections.abc import Iterator, Mapping

from mistlab import catalog
from mistlab.export.found import Found
from mistlab.export.fsdp import (
    ENGINES,
    STATES,
    fewest_replicas,
    offloads,
)
from mistlab.export.given import Given, Imported
from mistlab.export.rules import among_orders, dropped, equal_meshes, equal_nodes
from mistlab.export.sections import Section
from mistlab.export.target import Row, Target
from mistlab.export.torchtitan_models import (
    BROUGHT,
    divided_experts,
    without_pipeline,
    words_of,
)
from mistlab.export.torchtitan_pipeline import SCHEDULES, pipeline_settings, read_stages
from mistlab.export.torchtitan_rules import (
    blocks_apart,
    offloaded_states,
    recomputed,
    recomputes_products,
    sayable_workload,
    sharded_states,
    with_sequences_split,
)
from mistlab.export.words import names_in
from mistlab.values.errors import InputError
from mistlab.values.job import Job
from mistlab.values.model import ModelSpec

HARMLESS = names_in(
    """
    job profiling metrics optimizer lr_scheduler checkpoint comm memory_estimation
    fault_tolerance experimental validation debug dataset dataset_path steps max_norm gc_freq
    gc_debug dataloader hf_assets_path tokenizer_path print_after_conversion
    disable_loss_parallel early_stop preserve_rng_state determinism_check
    per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto
    context_parallel_load_balancer context_parallel_rotate_method mixed_precision_reduce
    pipeline_parallel_expert_parallel_overlap memory_budget
    """
)


ROWS = (
    Row(
        choices=("attention", "precision"),
        nearest=sayable_workload,
        because="trains in bf16 or fp32, with fused attention",
    ),
    Row(
        choices=("data_parallel", "tensor_parallel", "micro_batch", "context_parallel"),
        nearest=equal_meshes,
        because="gives all stages the same degrees",
    ),
    Row(
        choices=(),
        nearest=without_pipeline,
        because="has no pipeline for this model",
    ),
    Row(
        choices=("expert_parallel", "expert_tensor_parallel"),
        nearest=divided_experts,
        because="divides experts alike on all stages, each whole or in as many parts as layers",
    ),
    Row(choices=(), nearest=equal_nodes, because="starts equally many processes on every node"),
    Row(
        choices=("order",),
        nearest=among_orders(SCHEDULES),
        because="runs 1F1B, GPipe, ZBVZeroBubble and DualPipeV",
    ),
    Row(
        choices=("sequence_parallel",),
        nearest=with_sequences_split,
        because="splits sequences wherever it splits layers",
    ),
    Row(
        choices=("zero",),
        nearest=sharded_states,
        because="shards by FSDP2, ZeRO-2 or 3, alike on all stages, and always along sequences or "
        "where experts lie on several replicas",
    ),
    Row(
        choices=("state_replicas",),
        nearest=fewest_replicas,
        because="cuts all stages into as many replicas, where it shards",
    ),
    Row(
        choices=("layers", "checkpointed_layers", "products_recomputed_layers"),
        nearest=recomputed,
        because="recomputes all blocks, or every n-th, or every second product of all",
    ),
    Row(
        choices=STATES,
        nearest=offloaded_states,
        because="offloads all states where FSDP2 shards them, or none",
    ),
    Row(
        choices=("offload_activations",),
        nearest=dropped("offload_activations"),
        because="keeps activations on the GPU",
    ),
)

_VERSION = "# For torchtitan up to 0.2.2 (later: --to torchtitan), on {} nodes of {} processes.\n"


def write(job: Job) -> str:
    """The configuration as TOML."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    name, flavour = words_of(workload.model)
    dtype = "float32" if workload.precision == "fp32" else "bfloat16"
    batches = plan.micro_batches if plan.num_stages > 1 else 1
    every = blocks_apart(job)
    option = "op" if recomputes_products(job) else str(every) if every > 1 else ""
    sections: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavour},
        "training": {
            "local_batch_size": stage.micro_batch * batches,
            "global_batch_size": workload.global_batch,
            "seq_len": workload.sequence_length,
            "mixed_precision_param": dtype,
            "enable_cpu_offload": offloads(job),
        },
        "parallelism": {**_degrees(job), **_expert_degrees(job), **pipeline_settings(job)},
        "activation_checkpoint": {
            "mode": "selective" if option else "full" if every else "none",
            **({"selective_ac_option": option} if option else {}),
        },
    }
    cluster = job.cluster
    return _VERSION.format(cluster.nodes, cluster.gpus_per_node) + toml_of(sections)


def toml_of(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections of settings as TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def _degrees(job: Job) -> dict[str, object]:
    stage = job.plan.stages[0]
    replicas = stage.state_replicas if stage.zero else stage.data_parallel
    return {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": stage.data_parallel // replicas,
        "fsdp_reshard_after_forward": "always" if stage.zero == 3 else "never",
        "tensor_parallel_degree": stage.tensor_parallel,
        "pipeline_parallel_degree": job.plan.num_stages,
        "context_parallel_degree": stage.context_parallel,
    }


def _expert_degrees(job: Job) -> dict[str, object]:
    """The degrees of experts where they are divided; otherwise torchtitan reads none."""
    stage = job.plan.stages[0]
    if stage.expert_parallel == 1:
        return {}
    return {
        "expert_parallel_degree": stage.expert_parallel,
        "expert_tensor_parallel_degree": stage.expert_tensor_parallel,
    }


def _toml(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def read(text: str, given: Given) -> Imported:
    """The job of a configuration."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = f"{error}: correct the TOML"
        raise InputError(message) from None
    found = Found()
    top = Section(content, "", found)
    found.model = _model(top.section("model"), given)
    training, parallelism = top.section("training"), top.section("parallelism")
    _read_degrees(parallelism, found, found.model)
    _read_batch(training, parallelism, found)
    _read_recomputed(top.section("activation_checkpoint"), found, found.model.layers)
    if training.switch("enable_cpu_offload"):
        found.values |= dict.fromkeys(STATES, 1.0)
    top.tell_of_rest(HARMLESS)
    return found.job(given, ENGINES)


def _model(section: Section, given: Given) -> ModelSpec:
    """The given model, else the one of the section's flavour."""
    kind = str(section.get("name", "llama3"))
    flavour = str(section.get("flavor", "debugmodel"))
    if given.model is not None:
        return given.model
    name = {words: name for name, words in BROUGHT.items()}.get((kind, flavour), flavour)
    if name not in catalog.model_names():
        message = f"model.flavor: {flavour!r} is no model of the catalogue: give --model"
        raise InputError(message)
    return catalog.model(name)


def _read_degrees(section: Section, found: Found, model: ModelSpec) -> None:
    found.values["tensor_parallel"] = section.whole("tensor_parallel_degree") or 1
    found.values["sequence_parallel"] = int(found.values["tensor_parallel"] > 1)
    found.num_stages = section.whole("pipeline_parallel_degree") or 1
    found.values["context_parallel"] = section.whole("context_parallel_degree") or 1
    replicas = section.whole("data_parallel_replicate_degree") or 1
    shards = section.whole("data_parallel_shard_degree", minimum=-1)
    shards = -1 if shards is None else shards
    if shards > 0:
        found.data_parallel = replicas * shards
    keeps = section.get("fsdp_reshard_after_forward", "default")
    if keeps not in ("default", "always", "never"):
        message = (
            f"parallelism.fsdp_reshard_after_forward: {keeps!r} is unknown: give default, always "
            "or never"
        )
        raise InputError(message)
    reshards = keeps == "always" or (keeps == "default" and found.num_stages == 1)
    whole = shards == 1 and found.values["context_parallel"] == 1
    found.values["zero"] = 0 if whole else 3 if reshards else 2
    if replicas > 1 and not whole:
        found.values["state_replicas"] = replicas
    _read_experts(section, found, model)
    read_stages(section, found, model.layers)


def _read_experts(section: Section, found: Found, model: ModelSpec) -> None:
    ranks = section.whole("expert_parallel_degree") or 1
    parts = section.whole("expert_tensor_parallel_degree") or 1
    if model.experts is None:
        return
    found.values["expert_parallel"] = ranks
    tensor = found.values["tensor_parallel"]
    found.values["expert_tensor_parallel"] = parts if ranks > 1 else tensor


def _read_batch(training: Section, parallelism: Section, found: Found) -> None:
    found.sequence_length = training.whole("seq_len") or 2048
    local = training.whole("local_batch_size") or 8
    total = training.whole("global_batch_size", minimum=-1)
    size = parallelism.whole("pipeline_parallel_microbatch_size") or 1
    in_pipeline = found.num_stages > 1
    found.micro_batch = size if in_pipeline else local
    found.micro_batches = local // size if in_pipeline else 1
    if in_pipeline and local % size:
        message = (
            f"training.local_batch_size: {local} is no multiple of "
            f"pipeline_parallel_microbatch_size {size}: correct one of them"
        )
        raise InputError(message)
    found.global_batch = total if total and total > 0 else None
    if in_pipeline and total and found.data_parallel and total > local * found.data_parallel:
        text = "the pipeline is taken as filled once a step, not once a local batch"
        found.remark("assumed", "micro_batches", text)
    kind = training.get("mixed_precision_param", "bfloat16")
    found.precision = "fp32" if kind == "float32" else "bf16"
    if training.get("dtype", "float32") != "float32":
        text = "training.dtype bfloat16 keeps states in 16 bits: taken with 32-bit states"
        found.remark("assumed", "precision", text)


def _read_recomputed(section: Section, found: Found, layers: int) -> None:
    mode = section.get("mode", "selective")
    option = str(section.get("selective_ac_option", "2"))
    if mode == "full":
        found.values["checkpointed_layers"] = layers
    elif mode == "selective" and option.isdigit() and int(option):
        found.recomputed_every = int(option)
    elif mode == "selective" and option == "op":
        found.values["products_recomputed_layers"] = layers
    elif mode != "none":
        text = f"{mode} {option if mode == 'selective' else ''}".strip()
        found.remark("ignored", "checkpointed_layers", f"{text}: taken as nothing recomputed")


def _notes(job: Job) -> Iterator[str]:
    model = job.workload.model
    if model.name in BROUGHT:
        return
    yield (
        f"add the flavour {model.name or 'mine'!r} to the models: dim={model.hidden}, "
        f"n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads}, "
        f"vocab_size={model.vocab}, feed-forward width {model.ffn}"
    )
    if model.family != "llama" or not model.has_plain_blocks:
        kind = f"a {model.family} model" if model.family != "llama" else "this one"
        yield f"its models are Llama's; {kind} needs a specification of its own"


TORCHTITAN_TOML = Target(
    name="torchtitan-toml",
    title="torchtitan",
    package="torchtitan==0.2.2",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "nodes", "gpus_per_node"),
    always_overlaps=True,
)
