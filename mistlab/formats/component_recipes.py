"""Imports fine-tuning recipes in which keys name Python classes or functions: those of torchtune
and of NeMo AutoModel.

The last part of such a name is a class, or a function whose own name tells the model, such as
``lora_llama3_1_8b``. Missing keys have the defaults of torchtune's recipes (0.6) and of AutoModel's
(2026).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.accelerate import SPLITS_TOKENS, Sharing
from mistlab.export.found import Found, Section, harmless_names
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import ENGINES, of_tuners
from mistlab.formats.checkpoints import model_named, needed_model
from mistlab.formats.content import settings_of
from mistlab.formats.launched import (
    Command,
    assignments,
    command_of,
    named_text,
    take_ranks,
    with_dotted,
)
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile

_TORCHTUNE, _AUTOMODEL = "_component_", "_target_"
_NETWORKS = ("gate", "up_proj", "down_proj", "mlp", "fc", "w1", "w2", "w3")
_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "output_proj"}
# Losses that compute logits chunk by chunk or never; others that are named after chunks widen
# 16-bit logits chunk by chunk, but keep those of all tokens.
_CHUNKED, _WIDENED = ("linearcrossentropy", "fusedlinear"), ("chunk", "teparallel")


def recognises_torchtune(source: LaunchFile) -> bool:
    """Whether a file is a torchtune recipe: its model (or policy) and optimizer are named as
    torchtune's components.
    """
    command = command_of(source)
    if command is not None:
        return command.launch.launcher == "tune"
    models = ("model", "policy_model")
    return any(_names(source, (name, "optimizer"), _TORCHTUNE) for name in models)


def recognises_automodel(source: LaunchFile) -> bool:
    """Whether a file is a recipe of NeMo AutoModel: it has a step scheduler, and names its model
    under ``_target_``.
    """
    return _names(source, ("model",), _AUTOMODEL) and "step_scheduler" in settings_of(source)


def _names(source: LaunchFile, sections: tuple[str, ...], key: str) -> bool:
    if command_of(source) is not None:
        return False
    settings = settings_of(source)
    inner = [settings.get(name) for name in sections]
    return all(isinstance(one, Mapping) and key in one for one in inner)


def read_torchtune(source: LaunchFile, given: Given) -> Imported:
    """The job that a torchtune recipe describes."""
    draft = Found()
    command = command_of(source)
    settings = settings_of(source) if command is None else _started_recipe(command, source)
    if command is not None:
        take_ranks(command, source, draft, given)
    top = Section(settings, "", draft)
    if top.has("policy_model"):
        reject(
            "policy_model: belongs to reinforcement learning, which is not supported: give a "
            "recipe that trains by next-token prediction"
        )
    model = top.section("model")
    builder = _last(model, _TORCHTUNE)
    if any(word in _other(top) for word in ("dpo", "ppo", "grpo", "kd", "rlhf")):
        reject(
            f"loss._component_: {_last(top.section('loss'), _TORCHTUNE) or 'the recipe'} is for "
            "preferences, reinforcement or distillation, which are not supported: give a recipe "
            "that trains by next-token prediction"
        )
    spec = draft.settled_model(
        given, lambda: needed_model(_checkpoint(builder), "model._component_", source)
    )
    given = replace(given, model=spec)
    if "lora" in builder:
        _adapters(
            draft,
            rank=model.whole("lora_rank"),
            names=model.words("lora_attn_modules"),
            of_networks=model.switch("apply_lora_to_mlp"),
            base="4bit"
            if builder.startswith("qlora") or model.switch("quantize_base")
            else "16bit",
        )
        if (names := set(model.words("lora_attn_modules"))) and (rest := _OF_ATTENTION - names):
            text = f"adapters are predicted on {' '.join(sorted(rest))} too, which take more memory"
            draft.remark("assumed", model.path("lora_attn_modules"), text)
        model.unsaid(
            {
                "lora_dropout": "adapters are predicted without dropout",
                "apply_lora_to_output": "the head is predicted without an adapter",
            }
        )
    top.section("tensor_parallel_plan").take_all()
    top.get("data_parallel_shard_dim")
    tokenizer, data = top.section("tokenizer"), top.section("dataset")
    draft.sequence_length = tokenizer.whole("max_seq_len")
    _tell_of_padding(draft, packs=data.switch("packed"))
    draft.micro_batches = top.whole("gradient_accumulation_steps") or 1
    Sharing(
        level=3 if top.switch("fsdp_reshard_after_forward", default=True) else 2,
        sequences=top.whole("batch_size"),
        degrees={
            "tp": top.whole("tensor_parallel_dim") or 1,
            "cp": top.whole("context_parallel_dim") or 1,
            "dp_replicate": top.whole("data_parallel_replicate_dim") or 1,
        },
        # Its plans divide norms' tokens (torchtune/models/*/_parallelism.py).
        splits_tokens=True,
        recomputes=top.switch("enable_activation_checkpointing"),
        offloads_inputs=top.switch("enable_activation_offloading"),
        offloads_states=top.switch("fsdp_cpu_offload"),
    ).take(draft, spec)
    _precision(draft, top.text("dtype", "bf16"))
    _optimizer(draft, _last(top.section("optimizer"), _TORCHTUNE))
    _loss(draft, _last(top.section("loss"), _TORCHTUNE))
    top.unsaid({"optimizer_in_bwd": "gradients are predicted to be kept until the optimizer step"})
    engines = of_tuners(ENGINES)
    compiles = top.switch("compile")
    top.tell_of_strange(harmless_names("torchtune"))
    return draft.job(given, ("fsdp-compiled", *engines) if compiles else engines)


def _started_recipe(command: Command, source: LaunchFile) -> Mapping[str, Any]:
    """Return the settings of the recipe that ``tune run`` starts, with those of its command."""
    path = command.text("config")
    if path is None:
        reject("tune run: starts a recipe without a configuration: give --config FILE")
    if not path.endswith((".yaml", ".yml")):
        reject(
            f"--config {path}: is a configuration inside torchtune: copy it by tune cp {path} "
            "FILE.yaml, and give that file"
        )
    settings = parse_yaml(named_text(path, command, source, "is the run's recipe"), path)
    return with_dotted(settings, dict(assignments(command)))


def read_automodel(source: LaunchFile, given: Given) -> Imported:
    """The job that a NeMo AutoModel recipe describes."""
    draft = Found()
    top = Section(settings_of(source), "", draft)
    if top.has("teacher_model"):
        reject(
            "teacher_model: trains by distillation from another model, which is not supported: "
            "give a recipe that trains by next-token prediction"
        )
    model, steps = top.section("model"), top.section("step_scheduler")
    key = "pretrained_model_name_or_path"
    path = model.text(key) or model.section("config").text(key)
    spec = draft.settled_model(given, lambda: needed_model(path, f"model.{key}", source))
    given = replace(given, model=spec)
    peft = top.section("peft")
    if peft.content:
        _adapters(
            draft,
            rank=peft.whole("dim"),
            names=_listed(peft, "target_modules"),
            of_networks=peft.switch("match_all_linear"),
            base=_base(top.section("quantization")),
        )
    data = top.section("dataset")
    packed = top.section("packed_sequence").whole("packed_sequence_size", minimum=0) or 0
    lengths = (data.whole(name) for name in ("seq_length", "seq_len", "max_seq_length"))
    draft.sequence_length = packed or next((one for one in lengths if one), None)
    _tell_of_padding(draft, packs=packed > 0)
    draft.global_batch = steps.whole("global_batch_size")
    _nodes(top, draft)
    sharing = _degrees(top, draft, spec, steps.whole("local_batch_size") or 1)
    _precision(draft, model.text("torch_dtype", "bf16"))
    if draft.precision == "fp32":
        draft.precision = _cast_to(top.section("distributed"))
    narrow, backend = top.section("fp8"), model.section("backend")
    is_narrow = narrow.switch("enabled")
    if is_narrow or backend.has("te_fp8"):
        draft.precision = "fp8"
    narrow.take_all()
    by_te = backend.text("linear") == "te"
    backend.take_all()
    if word := model.text("attn_implementation"):
        draft.attention = "math" if word == "eager" else "flash"
    _optimizer(draft, _last(top.section("optimizer"), _AUTOMODEL))
    _loss(draft, _last(top.section("loss_fn"), _AUTOMODEL))
    compiles = top.section("compile").switch("enabled")
    top.tell_of_strange(harmless_names("automodel"))
    is_rowwise = is_narrow and "rowwise" in narrow.text("recipe_name", "tensorwise")
    name = f"fsdp{'-compiled' * compiles}{'-rowwise' * is_rowwise}"
    return draft.job(given, (*sharing, *("fsdp-te",) * by_te, name, *ENGINES))


def _base(section: Section) -> str:
    for bits in ("4bit", "8bit"):
        if section.switch(f"load_in_{bits}"):
            return bits
    return "16bit"


def _cast_to(section: Section) -> Precision:
    """Return the precision of GEMMs in an AutoModel recipe that loads weights in 32 bits. FSDP2
    casts weights to bf16 unless its policy says otherwise; DDP casts them only on request.
    """
    is_fsdp = section.text("strategy", "fsdp2").lower() == "fsdp2"
    word = section.text("autocast_dtype")
    if is_fsdp:
        word = section.section("mp_policy").text("param_dtype", "bfloat16")
    return "bf16" if word.removeprefix("torch.") in ("bf16", "bfloat16") else "fp32"


def _listed(section: Section, key: str) -> list[str]:
    """Return the names of the layers with low-rank adapters from a list of names, or from a suffix
    pattern.
    """
    value = section.get(key)
    names = value if isinstance(value, list) else [value or ""]
    return ["mlp" if str(word).startswith("*") else str(word) for word in names]


# GPUs of a node by the words with which AutoModel's own runs name their clusters.
_IN_NODES = {"gb200": 4}


def _nodes(top: Section, draft: Found) -> None:
    """Read the numbers of nodes, and of GPUs in each, on which AutoModel's own runs start a
    recipe.
    """
    ci = top.section("ci")
    gpus = ci.whole("nproc_per_node") or _IN_NODES.get(ci.text("cluster_tag").lower())
    if gpus:
        draft.gpus_per_node = gpus
        draft.remark("assumed", "gpus_per_node", f"{gpus}, by ci")
    for name, key in (("ci", "nodes"), ("benchmark", "num_nodes")):
        nodes = top.section(name).whole(key)
        if nodes and draft.nodes is None:
            draft.nodes = nodes
            draft.remark("assumed", "nodes", f"{nodes}, by {name}.{key}")
        top.section(name).take_all()


def _degrees(top: Section, draft: Found, model: ModelSpec, sequences: int) -> tuple[str, ...]:
    """Read parallel degrees and sharding of an AutoModel recipe, whose default is FSDP2; returns
    the engine that a strategy has of its own, if any.
    """
    section = top.section("distributed")
    strategy = section.text("strategy", "fsdp2").lower()
    if strategy not in ("fsdp2", "ddp", "megatron_fsdp"):
        reject(
            f"distributed.strategy: {strategy!r} is not supported: give fsdp2, megatron_fsdp or ddp"
        )
    axes = ("tp", "cp", "ep", "dp_replicate")
    level = 3 if section.switch("reshard_after_forward", default=True) else 2
    if strategy == "megatron_fsdp":
        stated = section.whole("zero_dp_strategy", minimum=0)
        level = 3 if stated is None else stated
    draft.num_stages = _degree(section, "pp_size")
    if draft.num_stages > 1:
        sequences = _in_pipeline(top, draft, sequences)
    section.section("pipeline").take_all()
    Sharing(
        level=0 if strategy == "ddp" else level,
        sequences=sequences,
        degrees={word: _degree(section, f"{word}_size") for word in axes},
        recomputes=section.switch("activation_checkpointing"),
        splits_tokens=section.switch(SPLITS_TOKENS),
        offloads_states=section.has("offload_policy"),
    ).take(draft, model)
    return ("megatron-fsdp",) if strategy == "megatron_fsdp" else ()


def _in_pipeline(top: Section, draft: Found, local: int) -> int:
    """Return the sequences of a micro-batch of a pipeline, into which it divides a local batch."""
    older, newer = top.section("autopipeline"), top.section("distributed").section("pipeline")
    section = older if older.content else newer
    size = section.whole("pp_microbatch_size") or 1
    if local % size:
        reject(
            f"{section.path('pp_microbatch_size')}: {size} does not divide local_batch_size "
            f"{local}: give a divisor"
        )
    text = (
        f"a pipeline that empties after every {local} sequences is predicted as one that does not"
    )
    draft.remark("ignored", section.path("pp_microbatch_size"), text)
    schedule = section.text("pp_schedule", "1f1b").lower()
    if schedule != "1f1b":
        text = f"{schedule} is predicted as 1f1b, with consecutive blocks on a stage"
        draft.remark("ignored", section.path("pp_schedule"), text)
    older.take_all()
    return size


def _degree(section: Section, key: str) -> int:
    return 1 if section.text(key).lower() in ("", "none", "null") else section.whole(key) or 1


def _adapters(
    draft: Found, *, rank: int | None, names: list[str], of_networks: bool, base: str
) -> None:
    """Read the rank of a recipe's low-rank adapters, and whether feed-forward layers have adapters
    as well as attention.
    """
    is_wide = of_networks or any(part in name for name in names for part in _NETWORKS)
    draft.trained |= {"train": "adapters", "adapter_rank": rank or 8, "base": base}
    draft.trained["adapter_targets"] = "all" if is_wide else "attention"
    if rank is None:
        draft.remark("assumed", "adapter_rank", "8, the default, because the file gives none")


def _precision(draft: Found, word: str) -> None:
    """Set the precision of a torchtune run, in which weights, gradients and Adam's moments share
    one data type.
    """
    known = word.lower().removeprefix("torch.")
    if known in ("bf16", "bfloat16"):
        draft.precision, draft.trained["states"] = "bf16", "16bit"
    elif known in ("fp32", "float32"):
        draft.precision = "fp32"
    else:
        reject(f"dtype: {word!r} is not supported: give bf16 or fp32")


def _optimizer(draft: Found, name: str) -> None:
    lower = name.lower()
    if "8bit" in lower:
        draft.optimizer = "adamw-8bit"
    elif lower and "adam" not in lower:
        draft.remark("ignored", "optimizer", f"{name} is predicted as AdamW")


def _loss(draft: Found, name: str) -> None:
    word = name.lower().replace("_", "")
    if any(part in word for part in _CHUNKED):
        draft.trained["loss"] = "chunked"
    elif any(part in word for part in _WIDENED):
        text = f"whole, because {name} keeps the logits of all tokens"
        if "chunk" in word:
            # Each chunk's log-probabilities stay until the backward pass (torchtune's
            # ``CEWithChunkedOutputLoss``): 4 of about 14 bytes a logit, beside 2 of the logits.
            text += (
                "; 32-bit copies and gradients are of a chunk, and take half of what is predicted "
                "for logits"
            )
        draft.remark("assumed", "loss", text)


def _tell_of_padding(draft: Found, *, packs: bool) -> None:
    if not packs:
        text = "all are predicted at full length, though without packing shorter ones are padded"
        draft.remark("assumed", "sequences", text)


def _other(top: Section) -> str:
    """Join the words in a recipe that may show that it does not train by next-token prediction."""
    objectives = (_last(top.section("loss"), _TORCHTUNE), _last(top.section("dataset"), _TORCHTUNE))
    more = ("rlhf" if top.has("ppo_epochs") or top.has("reward_and_value_model") else "",)
    keys = ("ppo" if top.has("ppo_batch_size") else "", "kd" if top.has("teacher_model") else "")
    return " ".join((*objectives, *more, *keys)).lower()


def _last(section: Section, key: str) -> str:
    """Return the last name of a setting that holds a dotted path such as
    ``package.module.name``.
    """
    return section.text(key).rpartition(".")[2]


# Matches the name of a torchtune function that builds a model: family, numbers of version and size,
# and what follows the size.
_BUILDER = re.compile(r"([a-z_]+?)_?((?:\d+_)*\d+)b(_.*)?")


def _checkpoint(builder: str) -> str:
    """Return the name of the checkpoint that belongs to a torchtune function that builds a model.
    The last number is the size, or the last two are where that names a known model.

    >>> _checkpoint("qlora_llama3_1_8b"), _checkpoint("mistral_7b"), _checkpoint("qwen2_0_5b")
    ('llama-3.1-8b', 'mistral-7b', 'qwen-2-0.5b')
    """
    name = re.sub(r"^q?lora_", "", builder)
    match = _BUILDER.fullmatch(name)
    if match is None:
        return name.replace("_", "-")
    numbers = match[2].split("_")
    names = []
    for count in (1, 2):
        version, size = ".".join(numbers[:-count]), ".".join(numbers[-count:])
        parts = (match[1], version, f"{size}b", (match[3] or "").strip("_"))
        names.append("-".join(part for part in parts if part).replace("_", "-"))
    return next((name for name in names if model_named(name) is not None), names[0])
