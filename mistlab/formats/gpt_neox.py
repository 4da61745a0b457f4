"""Imports gpt-neox's YAML configurations: a single file, or several that a launch script passes.

Keys have ``-`` or ``_``. Training runs by DeepSpeed, whose sections stand among gpt-neox's keys;
tensor parallelism is Megatron-LM's. Left-out keys take the defaults of
megatron/neox_arguments/neox_args.py (2025).
"""

from collections.abc import Mapping
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject
from mistlab.export import deepspeed as deepspeed_read
from mistlab.export.deepspeed import read_configuration
from mistlab.export.found import Found, Section, checked_whole, harmless_names
from mistlab.export.given import Given, Imported, ask_for
from mistlab.formats.content import settings_of
from mistlab.formats.launched import Command, command_of, known_text, named_text, take_ranks
from mistlab.plan.model_parts import Window
from mistlab.plan.workload import ROTARY_BASE, ModelSpec
from mistlab.shell.session import LaunchFile

ENGINES = ("deepspeed", "mistlab")
HARMLESS = harmless_names("gpt_neox")
_UNSAID: Mapping[str, str] = {
    "te_columnparallel": "layers are predicted as torch's",
    "te_rowparallel": "layers are predicted as torch's",
    "te_layernorm_mlp": "layers are predicted as torch's",
    "te_mha": "layers are predicted as torch's",
    "te_fp8_mha": "attention is predicted in 16 bits",
    "te_fp8_format": "GEMMs are predicted in 16 bits",
    "gpt_j_tied": "predicted with two norms in a block instead of a shared one",
    "partition_activations": "every rank is predicted to keep whole inputs of recomputed blocks",
    "num_unique_layers": "all blocks are predicted with weights of their own",
    "use_bnb_optimizer": "moments are predicted in 32 bits",
    "use_mup": "training is predicted without it",
    "opt_pos_emb_offset": "positions are predicted without an offset",
    "sparsity_config": "attention is predicted as dense",
}
_NORMS = {
    "layernorm": "layernorm",
    "te_layernorm": "layernorm",
    "non_parametric_layernorm": "layernorm",
    "scalenorm": "rmsnorm",
    "rmsnorm": "rmsnorm",
    "te_rmsnorm": "rmsnorm",
}
_GATED = ("geglu", "reglu", "swiglu", "bilinear", "glu")
_POSITIONS = {"rotary": "rotary", "none": "none", "alibi": "none"}
_PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"}
_OWN = {"num_layers", "hidden_size", "num_attention_heads"}


def recognises(source: LaunchFile) -> bool:
    """Whether a file has gpt-neox's keys, or is a script that starts gpt-neox."""
    if command_of(source) is not None:
        return _files(source) != ()
    settings = _plain(settings_of(source))
    parallel = {"pipe_parallel_size", "model_parallel_size"} & settings.keys()
    batch = {"train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps"}
    if "MODEL_ARGS" in settings or "trainer" in settings:
        return False
    return bool(parallel and (settings.keys() & (batch | _OWN))) or bool(
        settings.keys() >= _OWN and settings.keys() & {"pos_emb", "attention_config", "norm"}
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in settings.items()}


def _files(source: LaunchFile) -> tuple[str, ...]:
    """List the YAML files that a script passes to gpt-neox, none if it starts another program."""
    command = command_of(source)
    if command is None:
        return ()
    words = [word.text for word in command.launch.arguments]
    program = command.launch.program
    is_neox = program.endswith("deepy.py") or "deepy.py" in [w.text for w in command.launch.started]
    folder = command.options.get("conf_dir") or command.options.get("d")
    names = [name for name in words if name.endswith((".yml", ".yaml"))]
    if folder is not None:
        names = [f"{folder.text}/{name}" for name in names]
    return tuple(names) if is_neox else ()


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a gpt-neox configuration, or all those that a script passes, as a job."""
    draft = Found()
    command = command_of(source)
    settings = _plain(settings_of(source))
    if command is not None:
        settings = _merged(source, command)
        take_ranks(command, source, draft, given)
    top = Section(settings, "", draft)
    _refuse(top)
    model = draft.settled_model(given, lambda: _model(top, draft))
    _runners(top, draft)
    read_configuration(top, draft, given, model)
    _precision(top, draft)
    _choices(top, draft, model)
    top.unsaid(_UNSAID)
    top.tell_of_rest(HARMLESS | deepspeed_read.HARMLESS)
    return draft.job(given, ENGINES)


def _merged(source: LaunchFile, command: Command) -> dict[str, Any]:
    """Merge all configurations that a script passes; refuses a key with different values in two of
    them, as gpt-neox does.
    """
    merged: dict[str, Any] = {}
    for word in command.launch.arguments:
        if word.text in {path.rpartition("/")[2] for path in _files(source)} | set(_files(source)):
            known_text(word, "configuration")
    for path in _files(source):
        text = named_text(path, command, source, "configures gpt-neox's run")
        for key, value in _plain(parse_yaml(text, path)).items():
            if key in merged and merged[key] != value:
                reject(f"{key}: {path} and a file before it give different values: keep one")
            merged[key] = value
    return merged


def _refuse(top: Section) -> None:
    kinds = _attention_kinds(top)
    if strange := [kind for kind in kinds if kind not in ("global", "flash")]:
        reject(f"attention_config: {strange[0]} is not supported: give global or flash")
    if top.text("train_impl", "normal") != "normal":
        reject(f"train_impl: {top.get('train_impl')} is not supported: give train_impl: normal")
    for key in ("soft_prompt_tuning", "curriculum_learning"):
        inner = top.get(key)
        if isinstance(inner, Mapping) and inner.get("enabled"):
            reject(f"{key}: enabled: true is not supported: give a configuration without it")
    if (top.whole("moe_num_experts", minimum=0) or 1) > 1:
        number = top.get("moe_num_experts")
        reject(f"moe_num_experts: {number} experts are not supported: give a dense model")
    for key in ("moe_expert_interval", "moe_top_k", "moe_router_type", "moe_lbl_in_fp32"):
        top.get(key)


def _attention_kinds(top: Section) -> list[str]:
    """List the kind of attention of each block."""
    stated = top.get("attention_config")
    if stated is None:
        return ["global"]
    kinds: list[str] = []
    for entry in stated if isinstance(stated, list) else [stated]:
        first = entry[0] if isinstance(entry, list) and entry else entry
        kinds += [str(kind) for kind in (first if isinstance(first, list) else [first])]
    return kinds


def _model(top: Section, draft: Found) -> ModelSpec:
    hidden, layers = _needed(top, "hidden_size"), _needed(top, "num_layers")
    heads = _needed(top, "num_attention_heads")
    activation = top.text("activation", "gelu").lower()
    older = top.text("mlp_type", "regular") == "llama"
    gated = activation in _GATED or older
    norm = top.text("norm", "layernorm").lower()
    position = _POSITIONS.get(top.text("pos_emb", "learned"), "absolute")
    if norm not in _NORMS:
        reject(f"norm: {norm!r} is unknown: give one of {', '.join(_NORMS)}")
    _tell_of_kinds(top, draft, activation, gated=gated)
    fields: dict[str, Any] = {}
    if position == "rotary":
        fields["rotary_fraction"] = top.number("rotary_pct", 1.0)
        fields["rotary_base"] = top.number("rotary_emb_base", ROTARY_BASE, maximum=1e12)
    window = top.whole("sliding_window_width")
    sequence = top.whole("seq_length") or 0
    if window and window < sequence:
        fields["window"] = Window(size=window)
        text = f"{window}: every second block is predicted with full attention"
        draft.remark("ignored", "sliding_window_width", text)
    return ModelSpec.of(
        family="llama" if gated and position == "rotary" else "gpt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=top.whole("num_kv_heads") or heads,
        ffn=_width(top, draft, hidden, gated=gated, older=older),
        mlp_type="gated_mlp" if gated else "mlp",
        activation="silu" if gated else "gelu_tanh",
        norm=_NORMS[norm],
        position_embedding=position,
        parallel_block=top.switch("gpt_j_residual"),
        tied_embeddings=not top.switch("no_weight_tying"),
        biases=_biases(top, older=older),
        qk_norm=top.switch("use_qk_layernorm"),
        **_dropout(top),
        vocab=_vocab(top, draft),
        **fields,
    )


def _dropout(top: Section) -> dict[str, float]:
    """Return the dropout rate of hidden states, and that of attention probabilities if it
    differs.
    """
    attention, hidden = top.number("attention_dropout", 0.0), top.number("hidden_dropout", 0.0)
    differs = hidden and attention != hidden
    return {"dropout": hidden, **({"attention_dropout": attention} if differs else {})}


def _needed(top: Section, key: str) -> int:
    number = top.whole(key)
    if number is None:
        ask_for(
            "model",
            f"{key}: is missing: gpt-neox merges several files, so give the one with the model, "
            "the script that names all of them, or --model",
        )
    return number


def _tell_of_kinds(top: Section, draft: Found, activation: str, *, gated: bool) -> None:
    if gated and activation not in ("swiglu", "gelu"):
        draft.remark("ignored", "activation", f"{activation} is predicted as swiglu")
    elif not gated and activation != "gelu":
        draft.remark("ignored", "activation", f"{activation} is predicted as gelu")
    kind = top.text("pos_emb", "learned")
    if kind in ("alibi", "rpe", "sinusoidal"):
        instead = "no position embedding" if kind == "alibi" else "learned positions"
        draft.remark("ignored", "pos_emb", f"{kind} is predicted as {instead}")
    attention, hidden = top.number("attention_dropout", 0.0), top.number("hidden_dropout", 0.0)
    if attention and not hidden:
        text = f"{attention:g} with hidden_dropout 0 is not supported: predicted as 0"
        draft.remark("ignored", "attention_dropout", text)


def _width(top: Section, draft: Found, hidden: int, *, gated: bool, older: bool) -> int:
    """Return the feed-forward width; with a gate it is smaller than the stated width, since
    gpt-neox keeps the number of parameters of an ungated network.
    """
    stated = top.whole("intermediate_size")
    factor = top.get("expansion_factor")
    if older:
        width, multiple = stated or int(8 * hidden / 3), 256
    else:
        width = stated or (int(float(factor) * hidden) if factor else 4 * hidden)
        multiple = top.whole("mlp_multiple_of") or 1
        if gated:
            width = int(width * 2 / 3) // 2
    width = -(-width // multiple) * multiple
    if gated and stated and not older:
        text = f"{stated} gives a width of {width}: gpt-neox divides it by 3 in gated networks"
        draft.remark("assumed", "intermediate_size", text)
    return width


def _biases(top: Section, *, older: bool) -> bool:
    switches = [
        top.switch(f"use_bias_in_{part}", default=not older) for part in ("mlp", "attn_linear")
    ]
    return all(switches)


def _vocab(top: Section, draft: Found) -> int:
    """Return the padded vocabulary size, by default that of the tokenizer with which gpt-neox's own
    models were trained.
    """
    padded = top.whole("padded_vocab_size")
    if padded:
        return padded
    kind = top.text("tokenizer_type", "GPT2BPETokenizer")
    size = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "CharLevelTokenizer": 512}.get(
        kind, 50277
    )
    divisor = (top.whole("make_vocab_size_divisible_by") or 128) * (
        top.whole("model_parallel_size") or 1
    )
    padded = -(-size // divisor) * divisor
    if kind not in ("GPT2BPETokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer"):
        text = (
            f"{padded} tokens, as gpt-neox-20b has, because the size of {kind} is unknown: --model "
            "gives another"
        )
        draft.remark("assumed", "model.vocab", text)
    return padded


def _runners(top: Section, draft: Found) -> None:
    """Read how many ranks gpt-neox's launcher starts."""
    nodes, gpus = top.get("num_nodes"), top.get("num_gpus")
    if nodes not in (None, -1):
        draft.nodes = checked_whole("num_nodes", nodes)
    if gpus is not None:
        draft.gpus_per_node = checked_whole("num_gpus", gpus)


def _precision(top: Section, draft: Found) -> None:
    word = top.text("precision")
    if word:
        if word not in _PRECISIONS:
            reject(f"precision: {word!r} is unknown: give one of {', '.join(_PRECISIONS)}")
        draft.precision = _PRECISIONS[word]  # type: ignore[assignment]
    inner = top.section("fp16")
    inner.get("fp16")
    if inner.text("type") == "bfloat16":
        draft.precision = "bf16"


def _choices(top: Section, draft: Found, model: ModelSpec) -> None:
    draft.sequence_length = top.whole("seq_length")
    draft.values["tensor_parallel"] = top.whole("model_parallel_size", minimum=0) or 1
    draft.values["sequence_parallel"] = int(top.switch("sequence_parallel"))
    draft.num_stages = top.whole("pipe_parallel_size", minimum=0) or 1
    draft.micro_batches = draft.micro_batches or top.whole("gas") or 1
    draft.attention = "flash" if "flash" in _attention_kinds(top) else "math"
    level = top.get("zero_optimization")
    if isinstance(level, Mapping) and "overlap_comm" not in level:
        draft.overlaps = False
    if top.switch("checkpoint_activations"):
        every = top.whole("checkpoint_num_layers") or 1
        draft.values["checkpointed_layers"] = model.layers
        if every > 1:
            text = f"checkpoint_num_layers {every} is predicted as blocks recomputed one by one"
            draft.remark("assumed", "checkpointed_layers", text)
        if top.switch("checkpoint_in_cpu"):
            draft.values["offload_activations"] = 1.0
    else:
        top.get("checkpoint_num_layers")
        top.get("checkpoint_in_cpu")
