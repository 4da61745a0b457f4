"""Imports torchtitan 0.1 and 0.2 configurations in TOML; other importers pass it the same sections.

Keys differ between versions, and each version's keys are read. Parallel degrees are under
``training``, ``experimental`` or ``parallelism``. The batch size is ``training.batch_size``, then
``training.local_batch_size``, and since 0.3 a number of tokens. Missing keys have the defaults of
0.2 (torchtitan/config/job_config.py); keys that only 0.3 has, those of 0.3
(torchtitan/config/configs.py).
"""

import re
from collections.abc import Mapping
from typing import Any

from mistlab import catalog
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.found import Found, Section, harmless_names, parse_toml
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import ENGINES, STATES
from mistlab.export.torchtitan_rules import BROUGHT, read_stages
from mistlab.plan.workload import ModelSpec

HARMLESS = harmless_names("torchtitan")
# The catalogue's model for each of torchtitan's models and flavours (sizes).
FLAVOURS: Mapping[tuple[str, str], str] = {
    **{(kind, flavour.lower()): name for name, (kind, flavour) in BROUGHT.items()},
    ("llama3", "1b"): "llama3.2-1b",
    ("llama3", "3b"): "llama3.2-3b",
    ("llama4", "17bx16e"): "llama4-scout",
    ("llama4", "17bx128e"): "llama4-maverick",
    ("qwen3", "0.6b"): "qwen3-0.6b",
    ("qwen3", "1.7b"): "qwen3-1.7b",
    ("qwen3", "4b"): "qwen3-4b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "14b"): "qwen3-14b",
    ("qwen3", "32b"): "qwen3-32b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
}
# The small test model that torchtitan calls ``debugmodel``, which is not in the catalogue.
_DEBUG = ModelSpec.of(
    family="llama", hidden=256, layers=6, heads=16, ffn=768, vocab=2048, rotary_base=500_000.0
)
_KINDS = re.compile(r"llama2|llama3|llama4|qwen3|deepseek_v3|gpt_oss")
# Matches flavour suffixes that change only the attention kernel.
_VARIANT = re.compile(r"_(flex|varlen|irope|flex_attn|varlen_attn)$")
_UNSAID = {
    "enable_async_tensor_parallel": "tensor-parallel communication is predicted without it",
    "expert_parallel_comm_backend": "tokens of experts are predicted as sent by NCCL's all-to-all",
    "enable_fsdp_symm_mem": "collectives are predicted as NCCL's",
    "enable_compiled_autograd": "the backward pass is predicted as not compiled",
}
# The precision of GEMMs that each of torchtitan's model converters leads to.
_NARROW: Mapping[str, Precision] = {"float8": "fp8", "mxfp8": "fp8", "mx": "fp8", "nvfp4": "fp4"}
# The key under which readers of Python configurations tell that the loss is computed in chunks; a
# TOML text has no such key.
CHUNKED_LOSS = "chunked_loss"


def read(text: str, given: Given) -> Imported:
    """Import a torchtitan configuration in TOML as a job."""
    return read_mapping(parse_toml(text), given, Found())


def read_mapping(content: Mapping[str, Any], given: Given, draft: Found) -> Imported:
    """Import the sections of a torchtitan configuration as a job; ``draft`` may already hold the
    number of ranks.
    """
    top = Section(content, "", draft)
    model = _settled_model(top.section("model"), draft, given)
    # Versions of torchtitan have parallel degrees in different sections: the current one comes
    # first.
    homes = [top.section(name) for name in ("parallelism", "training", "experimental")]
    engines = _read_products(top, draft)
    _read_degrees(homes, draft, model)
    _read_batch(top.section("training"), homes, draft, given)
    _read_recomputed(top.section("activation_checkpoint"), draft, model.layers)
    if top.section("training").switch(CHUNKED_LOSS):
        draft.trained["loss"] = "chunked"
    if top.section("training").switch("enable_cpu_offload"):
        draft.values |= dict.fromkeys(STATES, 1.0)
    for section in homes:
        section.unsaid(_UNSAID)
    _read_optimizer(top.section("optimizer"), draft)
    top.tell_of_rest(HARMLESS)
    return draft.job(given, engines)


def _settled_model(section: Section, draft: Found, given: Given) -> ModelSpec:
    """Return the user's model, or else the catalogue's model for the flavour in the file."""
    if given.model is None or section.has("flavor"):
        return draft.settled_model(given, lambda: _model(section))
    section.get("name")
    return given.model


def _model(section: Section) -> ModelSpec:
    """Return the catalogue's model for the flavour that the file names."""
    kind = section.text("name", "llama3")
    flavour = section.text("flavor", "debugmodel")
    known = _KINDS.search(kind.lower())
    if known and known[0] == "llama3" and _VARIANT.sub("", flavour) == "debugmodel":
        return _DEBUG
    size = _VARIANT.sub("", flavour.lower())
    name = FLAVOURS.get((known[0] if known else kind, size), flavour)
    if name not in catalog.model_names():
        reject(
            f"model.flavor: {flavour!r} of {kind} is not a known model: give --model (a name of "
            "the catalogue, or a config.json)"
        )
    return catalog.model(name)


def _degree(homes: list[Section], *names: str, minimum: int = 1) -> int | None:
    """Return a whole number that versions of torchtitan have under different names and in different
    sections.
    """
    numbers = [section.whole(name, minimum=minimum) for name in names for section in homes]
    return next((number for number in numbers if number is not None), None)


def _read_degrees(homes: list[Section], draft: Found, model: ModelSpec) -> None:
    section = homes[0]
    tensor = _degree(homes, "tensor_parallel_degree") or 1
    draft.values["tensor_parallel"] = tensor
    divides = section.switch("enable_sequence_parallel", default=True)
    draft.values["sequence_parallel"] = int(tensor > 1 and divides)
    draft.num_stages = _degree(homes, "pipeline_parallel_degree") or 1
    draft.values["context_parallel"] = _degree(homes, "context_parallel_degree") or 1
    replicas = _degree(homes, "data_parallel_replicate_degree") or 1
    shards = _degree(homes, "data_parallel_shard_degree", "data_parallel_degree", minimum=-1)
    shards = -1 if shards is None else shards
    if shards > 0:
        draft.data_parallel = replicas * shards
    keeps = section.text("fsdp_reshard_after_forward", "default")
    if keeps not in ("default", "always", "never"):
        reject(
            f"parallelism.fsdp_reshard_after_forward: {keeps!r} is unknown: give default, always "
            "or never"
        )
    reshards = keeps == "always" or (keeps == "default" and draft.num_stages == 1)
    whole = shards == 1 and draft.values["context_parallel"] == 1
    draft.values["zero"] = 0 if whole else 3 if reshards else 2
    if replicas > 1 and not whole:
        draft.values["state_replicas"] = replicas
    _read_experts(section, draft, model)
    draft.check_stages(model)
    read_stages(section if draft.num_stages == 1 else _with_pipeline(homes), draft, model.layers)


def _with_pipeline(homes: list[Section]) -> Section:
    """Return the section that holds the pipeline settings, which depends on torchtitan's
    version.
    """
    names = ("pipeline_parallel_schedule", "pipeline_parallel_degree")
    return next(
        (section for section in homes if any(name in section.content for name in names)), homes[0]
    )


def _read_experts(section: Section, draft: Found, model: ModelSpec) -> None:
    ranks = section.whole("expert_parallel_degree") or 1
    parts = section.whole("expert_tensor_parallel_degree") or 1
    if model.experts is None:
        return
    draft.values["expert_parallel"] = ranks
    tensor = draft.values["tensor_parallel"]
    draft.values["expert_tensor_parallel"] = parts if ranks > 1 else tensor


def _read_batch(training: Section, homes: list[Section], draft: Found, given: Given) -> None:
    if "num_tokens_per_microbatch_per_dp_rank" in training.content:
        _read_tokens(training, homes[0], draft)
        _read_precision(training, draft)
        return
    draft.sequence_length = training.whole("seq_len") or 2048
    local = training.whole("local_batch_size") or training.whole("batch_size") or 8
    total = training.whole("global_batch_size", minimum=-1)
    steps = training.whole("gradient_accumulation_steps") or 1
    if draft.num_stages > 1:
        size = _size_in_pipeline(homes, local, draft)
        draft.micro_batch, draft.micro_batches = size, local // size
        _tell_of_drained(draft, given, local, total)
    else:
        draft.micro_batch, draft.micro_batches = local, steps
    draft.global_batch = total if total and total > 0 else None
    _read_precision(training, draft)


def _size_in_pipeline(homes: list[Section], local: int, draft: Found) -> int:
    """Return the micro-batch size in a pipeline; torchtitan 0.1 states the number of micro-batches
    instead.
    """
    size = homes[0].whole("pipeline_parallel_microbatch_size")
    count = _degree(homes, "pipeline_parallel_microbatches")
    is_old = "pipeline_parallel_degree" in homes[2].content
    if size is None and (count or is_old):
        size, rest = divmod(local, count or draft.num_stages)
        where = "experimental.pipeline_parallel_microbatches"
    else:
        size, where = size or 1, "pipeline_parallel_microbatch_size"
        rest = local % size
    if rest or not size:
        reject(
            f"training.local_batch_size: {local} is not a multiple of {where} "
            f"{count or size}: give a multiple of it"
        )
    return size


def _tell_of_drained(draft: Found, given: Given, local: int, total: int | None) -> None:
    data = draft.data_parallel
    if data is None and given.nodes and given.gpus_per_node:
        data = given.nodes * given.gpus_per_node // draft.ranks_of_replica
    if data and total and total > local * data:
        text = (
            f"all {total // data} sequences of a rank are predicted to pass the pipeline at once, "
            f"where torchtitan fills it anew for every {local} (training.local_batch_size)"
        )
        draft.remark("assumed", "micro_batches", text)


def _read_tokens(training: Section, parallelism: Section, draft: Found) -> None:
    """Read the batch sizes of torchtitan 0.3, which counts tokens instead of sequences."""
    length = training.whole("max_context_length") or 2048
    tokens = training.whole("num_tokens_per_microbatch_per_dp_rank") or 16384
    draft.sequence_length = length
    draft.micro_batch, rest = divmod(tokens, length)
    if rest or not draft.micro_batch:
        reject(
            f"training.num_tokens_per_microbatch_per_dp_rank: {tokens} is not a multiple of "
            f"max_context_length {length}: give a multiple of it"
        )
    draft.micro_batches = 1
    if draft.num_stages > 1:
        draft.micro_batches = parallelism.whole("num_pp_microbatches") or 1
    step = training.whole("num_tokens_per_train_step", minimum=-1)
    if step and step > 0:
        draft.global_batch = step // length


def _read_precision(training: Section, draft: Found) -> None:
    kind = training.text("mixed_precision_param", "bfloat16")
    if draft.precision is None:
        draft.precision = "fp32" if kind == "float32" else "bf16"
    if training.text("mixed_precision_reduce", "float32") != "float32":
        draft.gradients = "16bit"
    if training.text("dtype", "float32") != "float32":
        text = "training.dtype bfloat16 keeps states in 16 bits: predicted with 32-bit states"
        draft.remark("assumed", "precision", text)


def _read_products(top: Section, draft: Found) -> tuple[str, ...]:
    """Read whether blocks are compiled and GEMMs have low precision; returns the engines that can
    predict both.
    """
    converters = [word.lower() for word in top.section("model").words("converters")]
    if any("lora" in word for word in converters):
        reject(
            "model.converters: lora trains adapters only, which is not supported: give a file "
            "that trains all weights"
        )
    quantized = top.section("quantize").section("linear")
    older = top.section("float8")
    if older.switch("enable_float8_linear"):
        converters.append("float8")
    narrow = [_NARROW[key] for word in converters for key in _NARROW if key in word.split(".")]
    recipes = [older.text("recipe_name"), quantized.section("float8").text("recipe_name")]
    mx = quantized.section("mx").text("recipe_name", "mxfp8")
    if narrow:
        draft.precision = "fp4" if "mx" in converters and "fp4" in mx else narrow[0]
    _tell_of_scales(converters, draft)
    return _engines(top, is_rowwise=bool(narrow) and "rowwise" in recipes)


def _tell_of_scales(converters: list[str], draft: Found) -> None:
    for word in converters:
        if "mx" in word:
            draft.remark("assumed", "precision", f"{word} is predicted as scaled per tensor")
        elif "grouped" in word:
            draft.remark("ignored", word, "experts' GEMMs are predicted in the others' precision")
        elif not any(key in word for key in _NARROW):
            draft.remark("ignored", f"model.converters {word}", "the model is predicted without it")


def _engines(top: Section, *, is_rowwise: bool) -> tuple[str, ...]:
    section, older = top.section("compile"), top.section("training")
    components = section.words("components") or ["model", "loss"]
    is_told = "enable" in section.content or "compile" in older.content
    compiles = section.switch("enable") or older.switch("compile")
    ending = "-rowwise" if is_rowwise else ""
    if not is_told:
        return (f"fsdp{ending}", *ENGINES)
    if not compiles or "model" not in components:
        return (f"fsdp-eager{ending}", *ENGINES)
    blocks = "" if "loss" in components else "-blocks"
    return (f"fsdp-compiled{blocks}{ending}", *ENGINES)


def _read_recomputed(section: Section, draft: Found, layers: int) -> None:
    mode = section.text("mode", "selective")
    option = section.text("selective_ac_option", "2")
    if mode == "full":
        draft.values["checkpointed_layers"] = layers
    elif mode == "selective" and option.isdigit() and int(option):
        draft.recomputed_every = int(option)
    elif mode == "selective" and option == "op":
        draft.values["products_recomputed_layers"] = layers
    elif mode == "memory_budget":
        budget = section.text("memory_budget", "0.5")
        text = f"memory_budget {budget} is not supported: predicted without recomputation"
        draft.remark("ignored", "checkpointed_layers", text)
    elif mode != "none":
        text = f"{mode} {option if mode == 'selective' else ''}".strip()
        draft.remark("ignored", "checkpointed_layers", f"{text}: predicted without recomputation")
    section.get("memory_budget")


def _read_optimizer(section: Section, draft: Found) -> None:
    name = section.text("name", "AdamW")
    if name.lower() not in ("adam", "adamw"):
        draft.remark("ignored", "optimizer.name", f"{name} is predicted as AdamW")
    section.unsaid({"early_step_in_backward": "the optimizer is predicted to step afterwards"})


def toml_of(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Write sections of settings as a TOML text."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def _toml(value: object) -> str:
    """Write a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
