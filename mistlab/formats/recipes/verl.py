"""Imports supervised fine-tuning by verl, whose scripts override settings in Hydra's way, such as
``data.max_length=2048``; reinforcement learning is refused.

Two programs train: the older ``fsdp_sft_trainer``, and ``sft_trainer``, with or without Ray, whose
engine is FSDP, AutoModel or Megatron-core. Missing settings have the defaults of their YAML in
verl/trainer/config (August 2026).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.accelerate import SPLITS_TOKENS, Sharing
from mistlab.export.found import Found, Section, harmless_names
from mistlab.export.given import Given, Imported, ask_for_variable
from mistlab.export.megatron.megatron_read import read_launch
from mistlab.export.nearest import ENGINES, of_tuners
from mistlab.formats.checkpoints import needed_model
from mistlab.formats.hf_adapters import read_adapters, trained_by_adapters
from mistlab.formats.launched import (
    Command,
    command_of,
    take_ranks,
    valued,
    with_dotted,
    with_files,
)
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

_PROGRAM = re.compile(r"(?:.*[./])?(verl|recipe)[./](?:.*[./])?(\w+?)(?:\.py)?")
_OLD, _NEW = "fsdp_sft_trainer", ("sft_trainer", "sft_trainer_ray", "main_sft")
_BATCH, _LENGTH = 256, 1024
_MICRO_BATCH, _TOKENS = 4, 8192
_HALVES: Mapping[str, Precision] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16"), "fp16"),
}
_RETURNING = "the states return to the GPU for each step: predicted as there all the time"
_HARMLESS = harmless_names("verl")


def recognises(source: LaunchFile) -> bool:
    """Whether a script starts one of verl's programs."""
    command = command_of(source)
    return command is not None and _program(command) is not None


def _program(command: Command) -> str | None:
    """Return the last name of the program of verl that a command starts, or None."""
    match = _PROGRAM.fullmatch(command.launch.program)
    if match is None or not (match[1] == "verl" or match[2].startswith("main_")):
        return None
    return match[2]


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a script that fine-tunes by verl as a job."""
    command = command_of(source)
    assert command is not None
    name = _program(command)
    if name not in (_OLD, *_NEW):
        reject(
            f"{command.launch.program}: generates text between training steps (reinforcement "
            "learning) or trains nothing, which is not supported: give a script of "
            "verl.trainer.sft_trainer; whether the actor trains within its memory tells mistlab "
            "will_it_fit, given its model, length, batch and engine"
        )
    groups, settings = _settings(command)
    draft = Found(keys={"sequence_length": "data.max_length"})
    take_ranks(command, source, draft, given)
    top = Section(settings, "", draft)
    if name == "sft_trainer_ray":
        trainer = top.section("trainer")
        draft.nodes = draft.nodes or trainer.whole("nnodes")
        draft.gpus_per_node = draft.gpus_per_node or trainer.whole("n_gpus_per_node") or 1
    model = top.section("model")
    key = "partial_pretrain" if name == _OLD else "path"
    files = with_files(source, command)
    path = model.text(key)
    spec = draft.settled_model(given, lambda: needed_model(path, f"model.{key}", files))
    given = replace(given, model=spec)
    draft.sequence_length = top.section("data").whole("max_length") or _LENGTH
    draft.global_batch = top.section("data").whole("train_batch_size") or _BATCH
    draft.precision, draft.attention = "bf16", "flash"
    if name == _OLD:
        _old(top, draft, spec, given)
    elif groups.get("engine") == "megatron":
        return _by_megatron(top, draft, command, source, given)
    else:
        _new(top, draft, spec, given, groups.get("engine", "fsdp"))
    _adapters(model, draft)
    packs = top.switch("use_remove_padding", default=name != _OLD)
    if not model.switch("use_remove_padding", default=packs):
        text = "all are predicted at full length, though shorter ones are padded"
        draft.remark("assumed", "sequences", text)
    if model.switch("use_fused_kernels"):
        draft.trained["loss"] = "chunked"
    model.unsaid({"use_liger": "the model's own kernels are predicted, and a loss of all logits"})
    _tell_of_rest(top)
    return draft.job(given, of_tuners(ENGINES))


def _tell_of_rest(top: Section) -> None:
    for key in ("trainer", "optim"):
        top.section(key)
    top.tell_of_rest(_HARMLESS)


def _settings(command: Command) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """Return the groups of settings that a command chooses, such as ``engine=megatron``, and its
    own settings. Refuses an unknown value of a setting that affects cost.
    """
    groups, settings = dict[str, str](), dict[str, Any]()
    for word in command.others:
        name, equals, value = word.text.partition("=")
        name = name.lstrip("+").partition("@")[0]
        if not equals or not re.fullmatch(r"[\w.]+", name):
            continue
        if word.unknown is not None and name.rpartition(".")[2] not in _HARMLESS:
            value = _end_of(word, name, value)
        if "." in name or name in ("ulysses_sequence_parallel_size", "use_remove_padding"):
            settings[name] = valued(value)
        else:
            groups[name] = value
    return groups, with_dotted({}, settings)


def _end_of(word: Word, name: str, value: str) -> str:
    """Return the last part of a checkpoint's path if only folders above it are unknown; refuses any
    other unknown value.
    """
    end = PurePath(value).name
    if word.unknown is None or not name.startswith("model.") or "/" not in value or "$" in end:
        assert word.unknown is not None
        ask_for_variable(name, word.unknown)
    return end


def _old(top: Section, draft: Found, model: ModelSpec, given: Given) -> None:
    """Read the settings of ``fsdp_sft_trainer``, which shards as ZeRO-3 and computes in bf16."""
    data, section = top.section("data"), top.section("model")
    fsdp = section.section("fsdp_config")
    ranks = top.whole("ulysses_sequence_parallel_size") or 1
    offloads = fsdp.switch("cpu_offload") and fsdp.switch("offload_params")
    stated = data.whole("micro_batch_size_per_gpu") or data.whole("micro_batch_size")
    Sharing(
        level=3,
        sequences=_fitted(stated or _MICRO_BATCH, draft, given, ranks),
        degrees={"cp": ranks},
        exchange_heads=True,
        recomputes=section.switch("enable_gradient_checkpointing", default=True),
        offloads_states=offloads,
    ).take(draft, model)
    _states(draft, fsdp, section)


def _new(top: Section, draft: Found, model: ModelSpec, given: Given, kind: str) -> None:
    """Read the settings of ``sft_trainer`` with the engine of FSDP or of AutoModel."""
    if kind not in ("fsdp", "automodel"):
        reject(f"engine: {kind} is not supported: give engine=fsdp, automodel or megatron")
    section, engine = top.section("model"), top.section("engine")
    is_fsdp = kind == "fsdp"
    degrees = {word: engine.whole(f"{word}_size") or 1 for word in ("tp", "cp", "ep")}
    degrees["dp_replicate"] = engine.whole("dp_replicate_size") or 1
    if is_fsdp:
        degrees["cp"] = engine.whole("ulysses_sequence_parallel_size") or 1
        degrees["dp_replicate"] = _replicas(engine, _ranks(draft, given))
    draft.num_stages = engine.whole("pp_size") or 1
    recomputes = section.switch("enable_gradient_checkpointing", default=True)
    shards = engine.text("distributed_strategy", "fsdp2") != "ddp"
    sequences, tokens = _sequences(top.section("data"), draft, degrees["cp"])
    replica = degrees["cp"] * degrees["tp"] * draft.num_stages
    Sharing(
        level=(3 if engine.switch("reshard_after_forward", default=True) else 2) * shards,
        sequences=_fitted(sequences, draft, given, replica, tokens),
        degrees=degrees,
        exchange_heads=is_fsdp,
        recomputes=recomputes if is_fsdp else engine.switch("activation_checkpointing"),
        splits_tokens=engine.switch(SPLITS_TOKENS),
        offloads_inputs=section.switch("enable_activation_offload"),
        offloads_states=engine.switch("offload_policy"),
    ).take(draft, model)
    _half(engine, draft)
    _states(draft, engine, section)
    engine.unsaid(dict.fromkeys(("param_offload", "optimizer_offload"), _RETURNING))
    if "8bit" in top.section("optim").text("optimizer").lower():
        draft.optimizer = "adamw-8bit"


def _half(engine: Section, draft: Found) -> None:
    word = engine.text("dtype", "bfloat16")
    if word not in _HALVES:
        reject(f"engine.dtype: {word!r} is unknown: give bfloat16 or float16")
    draft.precision = _HALVES[word]


def _replicas(engine: Section, ranks: int) -> int:
    """Return how many replicas of the states there are, where FSDP shards over fewer ranks."""
    size = engine.get("fsdp_size", -1)
    is_part = isinstance(size, int) and 0 < size < ranks and ranks % size == 0
    return ranks // size if is_part else 1


def _ranks(draft: Found, given: Given) -> int:
    nodes = given.nodes or draft.nodes or 1
    return nodes * (given.gpus_per_node or draft.gpus_per_node or 0)


def _sequences(data: Section, draft: Found, ranks: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the tokens up to which it is filled by default, 0
    if it is not.
    """
    stated = data.whole("micro_batch_size_per_gpu") or _MICRO_BATCH
    most = data.whole("max_token_len_per_gpu") or _TOKENS
    if not data.switch("use_dynamic_bsz", default=True):
        return stated, 0
    tokens = most * ranks
    return max(tokens // (draft.sequence_length or tokens), 1), tokens


def _fitted(
    sequences: int, draft: Found, given: Given, ranks_of_replica: int, tokens: int = 0
) -> int:
    """Return the largest micro-batch up to ``sequences`` that divides a replica's share of the
    batch; a remark says if it is filled up to a number of tokens.
    """
    replicas = _ranks(draft, given) // ranks_of_replica
    batch = given.global_batch or draft.global_batch or 0
    if replicas and batch % replicas == 0:
        share = batch // replicas
        most = min(sequences, share)
        sequences = next(n for n in range(most, 0, -1) if share % n == 0)
    if tokens:
        text = (
            f"micro-batches are filled with up to {tokens} tokens: predicted with {sequences} "
            "sequences of full length"
        )
        draft.remark("assumed", "data.use_dynamic_bsz", text)
    return sequences


def _states(draft: Found, section: Section, model: Section) -> None:
    """Read the data type in which weights, and so all states, are kept."""
    word = section.text("model_dtype", "fp32").removeprefix("torch.")
    is_half = word in _HALVES
    if is_half:
        draft.trained["states"] = "16bit"
    elif (model.whole("lora_rank", minimum=0) or 0) > 0:
        text = f"{word} keeps frozen weights in 32 bits: predicted in 16"
        draft.remark("ignored", section.path("model_dtype"), text)


def _adapters(model: Section, draft: Found) -> None:
    if (model.whole("lora_rank", minimum=0) or 0) > 0:
        read_adapters(model, draft)
    model.get("target_modules")


# Options of Megatron-LM that settings of verl's Megatron engine stand for.
_OPTIONS: Mapping[str, str] = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
_OF_TRANSFORMERS: Mapping[str, str] = {
    "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
}


def _by_megatron(
    top: Section, draft: Found, command: Command, source: LaunchFile, given: Given
) -> Imported:
    """Import a run by verl's Megatron engine, as a launch line of Megatron-LM."""
    engine, data = top.section("engine"), top.section("data")
    _half(engine, draft)
    tensor = engine.whole("tensor_model_parallel_size") or 1
    context = engine.whole("context_parallel_size") or 1
    stages = engine.whole("pipeline_model_parallel_size") or 1
    sequences, tokens = _sequences(data, draft, context)
    sequences = _fitted(sequences, draft, given, tensor * context * stages, tokens)
    words = ["--micro-batch-size", str(sequences), *_megatron_options(engine, draft)]
    words += _of_optimizer(top.section("optim"))
    if given.model is not None and given.model.experts is not None:
        words += _OF_EXPERTS
    arguments = tuple(Word(text=word) for word in words)
    launch = replace(command.launch, program="", arguments=arguments)
    if given.engine is None:
        by_fsdp = engine.switch("use_megatron_fsdp")
        given = replace(given, engine="megatron-fsdp" if by_fsdp else "megatron-core")
    names = ("param_offload", "optimizer_offload", "grad_offload")
    engine.unsaid(dict.fromkeys(names, _RETURNING))
    adapters = top.section("model").section("lora")
    rank = adapters.whole("rank", minimum=0)
    targets = [str(name) for name in adapters.get("target_modules") or []]
    top.section("model").switch("use_remove_padding")
    tokens_ahead = top.section("model").section("mtp")
    tokens_ahead.unsaid({"enable": "predicted without blocks for further tokens"})
    tokens_ahead.take_all()
    _tell_of_rest(top)
    imported = read_launch(launch, source, given)
    imported = replace(imported, remarks=(*draft.remarks, *imported.remarks))
    if not rank:
        return imported
    return trained_by_adapters(
        imported,
        rank=rank,
        where="model.lora.rank",
        usual=rank,
        title="",
        are_wide=not targets or any("fc" in name for name in targets),
    )


def _megatron_options(engine: Section, draft: Found) -> Iterator[str]:
    yield from ("--global-batch-size", str(draft.global_batch))
    yield from ("--seq-length", str(draft.sequence_length))
    yield f"--{draft.precision}"
    inner = engine.section("override_transformer_config")
    for section, options in ((engine, _OPTIONS), (inner, _OF_TRANSFORMERS)):
        for key, option in options.items():
            if section.has(key) and str(section.get(key)).lower() != "null":
                yield from (option, str(section.get(key)))
    modules = inner.get("recompute_modules")
    if isinstance(modules, list) and inner.text("recompute_granularity") == "selective":
        yield from ("--recompute-modules", *(str(word) for word in modules))
    if engine.switch(SPLITS_TOKENS, default=True):
        yield "--sequence-parallel"
    if engine.switch("use_distributed_optimizer", default=True):
        yield "--use-distributed-optimizer"
    if engine.switch("use_megatron_fsdp"):
        yield from ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
        yield "optim_grads_params"
    inner.get("attention_backend")
    yield from ("--attention-backend", "flash")


# What Megatron-Bridge, by which verl makes its models, does with experts unless it is told
# otherwise.
_OF_EXPERTS = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")


def _of_optimizer(section: Section) -> Iterator[str]:
    inner = section.section("override_optimizer_config")
    for key in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if inner.switch(key):
            yield f"--{key.replace('_', '-')}"
    if inner.has("optimizer_offload_fraction"):
        yield from ("--optimizer-offload-fraction", inner.text("optimizer_offload_fraction"))
