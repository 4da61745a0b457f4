"""Translates a model's sizes, activation and vocabulary to Megatron-LM's options, and back.

Megatron-LM takes a tokenizer's own number of tokens, special ones included, and pads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NoReturn

from mistlab.core.values import InputError, refuse, reject
from mistlab.export.found import Found
from mistlab.export.given import Remark, ask_for
from mistlab.export.megatron.launched_ranks import trains_bert
from mistlab.export.megatron.megatron_flags import Options, is_of_epfl
from mistlab.export.megatron.megatron_parts import (
    OPTIONS_OF_PARTS,
    check_hybrid,
    hybrid_parts,
    is_hybrid,
    part_options,
    parts_of,
    sayable_parts,
)
from mistlab.export.megatron.tokenizer_sizes import (
    BY_PATCH_TYPE,
    BY_TYPE,
    WORD_PIECES,
    has_word_pieces,
    may_have_word_pieces,
    size_by_name,
    size_of_word_pieces,
)
from mistlab.export.rules import with_workload
from mistlab.job.job import Job
from mistlab.plan.workload import ROTARY_BASE, VOCAB_MULTIPLE, Family, ModelSpec

# Derives the vocabulary size from the tokenizer on a launch line.


_NULL = ("NullTokenizer", "NullMultimodalTokenizer")
_GPT2 = "GPT2BPETokenizer"
_LLAMA2 = "Llama2Tokenizer"
# File names of the tokenizers of GPT-2 and of Llama; and folder names such as "tokenizer", which
# tell nothing about the tokenizer in them.
_GPT2_FILES, _LLAMA_FILES = ("vocab.json", "encoder.json"), ("tokenizer.model",)
_PLAIN_FOLDERS = frozenset(
    ("", "data", "dataset", "datasets", "tokenizer", "tokenizers", "vocab", "models", "assets")
)
_NAMES = ("--tokenizer-model", "--tokenizer-name-or-path")


def vocab_of(options: Options, draft: Found, given: int | None = None, program: str = "") -> int:
    """Return the vocabulary size of an imported model, padded as Megatron-LM pads it; unpadded if
    plans pad it to the same size. ``given`` is the user's size.
    """
    if given is not None:
        return _padded(options, given)
    if (whole := options.whole("--padded-vocab-size", minimum=0)) is not None and whole > 0:
        return whole
    if (patched := _patched(options)) is not None:
        return patched
    return _padded(options, _tokens(options, draft, program))


def _patched(options: Options) -> int | None:
    """Return the vocabulary size of a tokenizer of Pai-Megatron-Patch, or None for other launch
    lines.
    """
    kind = options.text("--patch-tokenizer-type")
    extra = options.whole("--extra-vocab-size", minimum=0)
    if kind is not None and kind in BY_PATCH_TYPE:
        return BY_PATCH_TYPE[kind] + (extra or 0)
    if extra is not None and extra > 0 and (vocab := options.whole("--vocab-size")) is not None:
        return vocab + extra
    if kind is not None and kind != _GPT2:
        raise _unknown(options, kind)
    return None


def _tokens(options: Options, draft: Found, program: str) -> int:
    """Return the number of tokens of a launch line's tokenizer, special tokens included."""
    stated, kind = options.whole("--vocab-size"), options.text("--tokenizer-type")
    if has_word_pieces(kind) and not may_have_word_pieces(program):
        where = options.where("--tokenizer-type")
        reject(
            f"{where}: {kind} is a tokenizer of encoders, but {program or 'no program'} is not "
            "known to train one: give a launch line of pretrain_bert.py or of a decoder"
        )
    if kind is None and trains_bert(program):
        kind = WORD_PIECES
    if kind in _NULL and stated is not None:
        text = (
            f"{stated + 1} tokens, as {kind} adds one to --vocab-size {stated} in Megatron-core up "
            "to 0.18"
        )
        draft.remark("assumed", "model.vocab", text)
        return stated + 1
    # The path of a vocabulary of word pieces tells less than a size that is given.
    known = None if stated and has_word_pieces(kind) else _known(options, kind)
    if stated is not None:
        if known is not None and _padded(options, known) != _padded(options, stated):
            text = f"--vocab-size {stated}, but the tokenizer has {known} tokens: {known} is used"
            draft.remark("contradicting", "model.vocab", text)
            return known
        return stated
    if known is None:
        raise _unknown(options, kind)
    text = (
        f"{known} tokens, the usual size of {_tokenizer_text(options, kind)}, because --vocab-size "
        "is not given"
    )
    draft.remark("assumed", "model.vocab", text)
    return known


def _known(options: Options, kind: str | None) -> int | None:
    """Return the vocabulary size of a well-known tokenizer, or None if type and name on the launch
    line are unknown.
    """
    names = [name for name in _NAMES if name in options]
    if kind is not None and has_word_pieces(kind):
        return size_of_word_pieces(kind, _name_of(options, "--vocab-file"))
    if kind is None and not names and "--vocab-size" in options:
        return None
    if kind in (None, _GPT2) and not (kind is None and names):
        # Without a tokenizer type, pretrain_gpt.py uses GPT-2's tokenizer.
        return _by_file(options, "--vocab-file", BY_TYPE[_GPT2], _GPT2_FILES)
    sizes = [size_by_name(_name_of(options, name)) for name in (*names, "--model-name")]
    if size := next((size for size in sizes if size is not None), None):
        return size
    if kind == _LLAMA2:
        return _by_file(options, "--tokenizer-model", BY_TYPE[_LLAMA2], _LLAMA_FILES)
    return BY_TYPE.get(kind or "") or _by_file(options, "--vocab-file", None, _LLAMA_FILES)


def _by_file(
    options: Options, option: str, usual: int | None, files: tuple[str, ...]
) -> int | None:
    """Return the vocabulary size of a tokenizer that its file name identifies; ``usual`` if the
    name tells nothing.
    """
    name = _name_of(options, option)
    if (size := size_by_name(name)) is not None:
        return size
    path = PurePath(name)
    folders = [part for part in path.parts[:-1] if part.lower().strip("./") not in _PLAIN_FOLDERS]
    is_plain = path.name in files and (option != "--vocab-file" or not folders)
    is_open = not name or "$" in name or "<" in name
    return usual if is_open or is_plain else None


def _name_of(options: Options, option: str) -> str:
    """Return the name or path of the tokenizer; where its value is unknown, as the script writes
    it.
    """
    options.taken.add(option)
    values = options.words.get(option, ())
    return values[0] if values else ""


def _padded(options: Options, vocab: int) -> int:
    tensor = options.whole("--tensor-model-parallel-size") or 1
    divisor = options.whole("--make-vocab-size-divisible-by") or VOCAB_MULTIPLE
    padded = -(-vocab // (divisor * tensor)) * divisor * tensor
    by_plans = vocab
    if vocab % tensor:
        multiple = VOCAB_MULTIPLE * tensor
        by_plans = -(-vocab // multiple) * multiple
    return vocab if padded == by_plans else padded


def _tokenizer_text(options: Options, kind: str | None) -> str:
    """Describe the tokenizer of a launch line for messages."""
    given = [f"--tokenizer-type {kind}"] if kind else []
    for name in (*_NAMES, "--vocab-file"):
        given += [f"{name} {word}" for word in options.words.get(name, ())[:1]]
    return " ".join(given) or _GPT2


def _unknown(options: Options, kind: str | None) -> InputError:
    line = options.given["--tokenizer-type"].line if "--tokenizer-type" in options else 0
    where = f" (line {line})" if line else ""
    return InputError(
        f"--vocab-size: is missing, and the vocabulary of {_tokenizer_text(options, kind)}{where} "
        "is unknown: give this command --vocab-size N, or add --vocab-size or --padded-vocab-size "
        "to the launch line"
    )


# Exports and imports a model's sizes as Megatron-LM's options.
#
# Megatron-LM's options set norm, activation and position embedding of all blocks alike; optional
# parts of models are in ``megatron_parts``. It pads vocabularies to a multiple, and has a dropout
# of 0.1 by default.


DROPOUT = 0.1

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "absolute", "rope": "rotary", "none": "none"}
# The position embedding that each value in older versions and forks of Megatron-LM stands for.
_READ_POSITIONS = {
    **_POSITIONS,
    "absolute": "absolute",
    "rotary": "rotary",
    "yarn": "rotary",
    "mrope": "rotary",
    "alibi": "none",
}
_KINDS = ("norm", "mlp_type", "activation", "position_embedding", "parallel_block")
_WITHOUT_SOME_BIASES = ("--disable-bias-linear-fc", "--disable-bias-attn-fc")
_FAMILIES: tuple[Family, ...] = ("llama", "nemotron", "falcon", "gpt")
_STRUCTURES: Mapping[Family, Mapping[str, Any]] = {
    model.family: {kind: getattr(model, kind) for kind in _KINDS}
    for model in (ModelSpec.of(family=name, hidden=64, layers=1, heads=1) for name in _FAMILIES)
}


def sayable_model(job: Job) -> Job:
    """Change the model of a job to the nearest one that Megatron-LM can build; refuses a model
    without a near one.
    """
    model = job.workload.model
    if model.graph_file is not None:
        refuse(
            "workload.model",
            "is a traced model, which no option of Megatron-LM can build: export a plan whose "
            "model is a name of the catalogue or a mapping",
        )
    if model.is_encoder:
        refuse(
            "workload.model",
            "is an encoder, which pretrain_gpt.py does not train: export a decoder's plan",
        )
    if model.post_norms:
        refuse(
            "workload.model.post_norms",
            "true, which no option of Megatron-LM can express: give --to deepspeed or accelerate, "
            "where the training script defines the model",
        )
    check_hybrid(model)
    model = sayable_parts(model)
    if not model.rotary_base.is_integer():
        model = replace(model, name="", rotary_base=float(round(model.rotary_base)))
    if model.parallel_block:
        model = replace(model, name="", family="gpt", parallel_block=False)
    if model.mlp_type == "mlp" and model.activation not in ("gelu_tanh", "relu2"):
        model = replace(model, name="", activation="gelu_tanh")
    return with_workload(job, model=model)


def model_options(model: ModelSpec, tensor_parallel: int) -> Iterator[str]:
    """List the options that build a model in Megatron-LM, except for those of its sequence
    length.
    """
    yield f"--num-layers {model.layers}"
    yield f"--hidden-size {model.hidden}"
    yield f"--ffn-hidden-size {model.ffn}"
    yield f"--num-attention-heads {model.heads}"
    if model.kv_heads != model.heads:
        yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    is_divided = model.hidden % model.heads == 0
    if model.head_dim * model.heads != model.hidden and not (model.latent and is_divided):
        yield f"--kv-channels {model.head_dim}"
    yield from _kinds(model)
    yield from part_options(model)
    if not model.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if not model.biases:
        yield "--disable-bias-linear"
    yield f"--attention-dropout {model.dropped_shares!r} --hidden-dropout {model.dropout!r}"
    divisor = 1 if model.vocab % tensor_parallel == 0 else VOCAB_MULTIPLE
    yield f"--vocab-size {model.vocab} --make-vocab-size-divisible-by {divisor}"


def _kinds(model: ModelSpec) -> Iterator[str]:
    """List the options for norm, activation and position embedding."""
    if model.norm == "rmsnorm":
        yield "--normalization RMSNorm"
    if model.mlp_type == "gated_mlp":
        yield "--swiglu"
    elif model.activation == "relu2":
        yield "--squared-relu"
    option_words = {position: word for word, position in _POSITIONS.items()}
    yield f"--position-embedding-type {option_words[model.position_embedding]}"
    if model.position_embedding == "rotary":
        if model.rotary_fraction != 1 and model.latent is None:
            yield f"--rotary-percent {model.rotary_fraction!r}"
        if model.rotary_base != ROTARY_BASE:
            yield f"--rotary-base {int(model.rotary_base)}"


def model_of(
    options: Options, draft: Found, vocab: int | None = None, program: str = ""
) -> ModelSpec:
    """Return the model that a launch line's options describe; ``vocab`` is the user's vocabulary
    size, if given.
    """
    hidden, heads = _sizes_of(options, program)
    layers, hybrid = _layers_of(options, hidden, program)
    gated = _is_gated(options, draft)
    ffn = options.whole("--ffn-hidden-size") or _default_ffn(options, hidden)
    position = _position(options, draft)
    channels = options.whole("--kv-channels")
    percent = options.number("--rotary-percent", 1.0, maximum=1)
    base = options.number("--rotary-base", ROTARY_BASE)
    is_rotary = position == "rotary"
    fields: dict[str, Any] = {
        "mlp_type": "gated_mlp" if gated else "mlp",
        "activation": _activation(options, gated=gated),
        "norm": _norm(options),
        "position_embedding": position,
        "parallel_block": options.has("--parallel-attn"),
    }
    fields |= {} if channels is None else {"head_dim": channels}
    fields |= {"rotary_fraction": percent if is_rotary else 0.0}
    parts = parts_of(options, draft, layers, ffn)
    if hybrid:
        _check_hybrid(parts)
    fields |= parts | hybrid
    if encodes := trains_bert(program):
        _tell_of_encoder(options, draft, hidden)
    model = ModelSpec.of(
        family="bert" if encodes else _family(fields),
        hidden=hidden,
        layers=fields.pop("layers", layers),
        heads=heads,
        kv_heads=_groups(options, draft, heads),
        ffn=ffn,
        rotary_base=base if is_rotary else ROTARY_BASE,
        tied_embeddings=not options.has("--untie-embeddings-and-output-weights"),
        biases=_has_biases(options, draft),
        **_dropout(options, draft),
        vocab=vocab_of(options, draft, vocab, program),
        **fields,
    )
    return with_key_heads(options, draft, model)


def _tell_of_encoder(options: Options, draft: Found, hidden: int) -> None:
    """Add remarks on what plans have otherwise than Megatron-LM's BERT."""
    text = (
        "bert, whose norms follow the residual sums: Megatron-LM's are as many, before attention "
        "and networks and behind the last block"
    )
    draft.remark("assumed", "model.family", text)
    if not options.has("--bert-no-binary-head"):
        # Two embeddings of segments, the pooler, and two logits.
        left_out = 2 * hidden + hidden * (hidden + 1) + 2 * (hidden + 1)
        text = (
            f"is not given: segments, pooler and next-sentence head ({left_out:,} parameters) are "
            "left out"
        )
        draft.remark("ignored", "--bert-no-binary-head", text)


def _sizes_of(options: Options, program: str) -> tuple[int, int]:
    """Return the hidden size and the number of heads; refuses options that lack one of these or the
    number of blocks, and names all that are missing.
    """
    hidden, heads = options.whole("--hidden-size"), options.whole("--num-attention-heads")
    has_layers = any(map(options.whole, _LAYERS)) or is_hybrid(options, program)
    if hidden is None or heads is None or not has_layers:
        known = {"--hidden-size": hidden, "--num-attention-heads": heads, _LAYERS[0]: has_layers}
        _ask_for_sizes(options, [name for name, value in known.items() if not value])
    return hidden, heads


def _ask_for_sizes(options: Options, missing: Sequence[str]) -> NoReturn:
    if options.strays:
        reject(
            f"{missing[0]}: is missing, or in a part of the line whose value is unknown: "
            f"{options.strays[0].unknown}"
        )
    are, them = ("are", "them") if len(missing) > 1 else ("is", "it")
    names = ", ".join(missing)
    text = f"{names}: {are} missing: add {them} to the line, or give the model by --model"
    ask_for("model", text)


_LAYERS = ("--num-layers", "--encoder-num-layers")


def _layers_of(options: Options, hidden: int, program: str) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks and, for a hybrid model, the fields that describe its pattern of
    blocks.
    """
    layers = next(filter(None, map(options.whole, _LAYERS)), None)
    if is_hybrid(options, program):
        fields = hybrid_parts(options, layers, hidden)
        return fields["layers"], fields
    assert layers is not None
    return layers, {}


def _check_hybrid(parts: dict[str, Any]) -> None:
    for name, option in {**OPTIONS_OF_PARTS, "attention_gate": "--attention-output-gate"}.items():
        if parts.get(name):
            reject(
                f"{option}: is not supported in hybrid models: give a model of the catalogue by "
                "--model"
            )


def _family(fields: Mapping[str, Any]) -> Family:
    """Return the model family that the options describe, or ``gpt`` if they fit no other family."""
    for family, structure in _STRUCTURES.items():
        if all(fields[name] == value for name, value in structure.items()):
            return family
    return "gpt"


def _is_gated(options: Options, draft: Found) -> bool:
    """Whether the options give the feed-forward network a gate; a remark says if the gate is not
    SwiGLU.
    """
    word = options.choice("--glu-activation", ("swiglu", "geglu", "reglu", "liglu"))
    if options.has("--swiglu") or word == "swiglu":
        return True
    kinds = [name for name in ("--geglu", "--quick-geglu") if options.has(name)]
    if word is not None:
        kinds.append(f"--glu-activation {word}")
    for kind in kinds:
        text = "is predicted as SwiGLU, which costs as much"
        draft.remark("assumed", kind, text)
    return bool(kinds)


def _activation(options: Options, *, gated: bool) -> str:
    if options.has("--squared-relu") and not gated:
        return "relu2"
    return "silu" if gated else "gelu_tanh"


def _norm(options: Options) -> str:
    known = (*_NORMS, "layernorm1p")
    stated = options.choice("--normalization", known) or "LayerNorm"
    return "rmsnorm" if options.has("--use-rmsnorm") else _NORMS.get(stated, "layernorm")


def with_key_heads(options: Options, draft: Found, model: ModelSpec) -> ModelSpec:
    """Return a model with at least one key and value head, which Megatron-LM calls query group, for
    each tensor-parallel rank; a remark says what the run does otherwise.
    """
    count, ranks = model.kv_heads, options.whole("--tensor-model-parallel-size") or 1
    if ranks <= count or ranks % count or model.heads % ranks:
        return model
    text = f"{count} for {ranks} tensor-parallel ranks: predicted as {ranks}, one for each rank, "
    if "--attention-head-type" in options:
        text += "which keep copies, without the communication that keeps copies equal"
    else:
        more = 2 * (ranks - count) * model.head_dim * model.hidden
        text += (
            f"with {more:,} more parameters in a block; Megatron-core gathers queries, keys and "
            "values of all ranks in each block instead, which is not counted"
        )
    remark = Remark(kind="assumed", choice="model.kv_heads", text=text)
    if remark not in draft.remarks:
        draft.remarks.append(remark)
    return replace(model, name="", kv_heads=ranks)


def _groups(options: Options, draft: Found, heads: int) -> int:
    """Return the number of query groups that the options give."""
    of_relatives = options.whole("--num-key-heads")
    if of_relatives is not None:
        return of_relatives
    if options.choice("--attention-head-type", ("multihead", "multiquery")) == "multiquery":
        return 1
    groups, grouped = options.whole("--num-query-groups"), options.has("--group-query-attention")
    if grouped:
        # Megatron-LM's default is a single query group.
        return groups or 1
    if groups is not None and groups != heads:
        text = (
            f"--num-query-groups {groups} has no effect without --group-query-attention: every "
            "head has keys and values of its own"
        )
        draft.remark("contradicting", "model.kv_heads", text)
    return heads


def _has_biases(options: Options, draft: Found) -> bool:
    """Whether the options give the model's GEMMs biases."""
    without = [name for name in _WITHOUT_SOME_BIASES if options.has(name)]
    if without and not options.has("--disable-bias-linear"):
        # Pai-Megatron-Patch's switches turn off all biases but those of queries, keys and values.
        all_but_those = len(without) == len(_WITHOUT_SOME_BIASES)
        predicted = "no linear layer" if all_but_those else "all linear layers"
        text = f"biases are predicted in {predicted}, though only some layers have them"
        draft.remark("assumed", " ".join(without), text)
        return not all_but_those
    if is_of_epfl(options):
        return options.has("--use-bias")
    if "--add-bias-linear" in options:
        return options.has("--add-bias-linear")
    return not options.has("--disable-bias-linear")


def _default_ffn(options: Options, hidden: int) -> int:
    """Return Megatron-LM's default feed-forward width: 4 times the hidden size, or two thirds of
    that with SwiGLU.

    FlagScale multiplies two thirds by a number, and rounds them up to a multiple.
    """
    multiple = options.whole("--multiple-of")
    factor = options.number("--hidden-dim-multiplier", 1.0)
    if not options.has("--swiglu"):
        return 4 * hidden
    if multiple is not None:
        return -(-int(8 * hidden // 3 * factor) // multiple) * multiple
    return 8 * hidden // 3 // 64 * 64


def _position(options: Options, draft: Found) -> str:
    stated = options.choice("--position-embedding-type", tuple(_READ_POSITIONS))
    if options.has("--use-rotary-position-embeddings"):
        return "rotary"
    if stated is None:
        return "none" if options.has("--no-position-embedding") else "absolute"
    if stated == "mrope":
        reject(
            f"{options.where('--position-embedding-type')}: mrope is for models of images and "
            "text, which are not supported: give a launch line that trains a text decoder"
        )
    if stated == "alibi":
        text = "alibi: attention is predicted without position biases"
        draft.remark("ignored", "--position-embedding-type", text)
    return _READ_POSITIONS[stated]


def _dropout(options: Options, draft: Found) -> dict[str, float]:
    """Return the dropout rate of hidden states, and that of attention probabilities if it
    differs.
    """
    names = ("--attention-dropout", "--hidden-dropout")
    silent = [name for name in names if name not in options.words]
    attention, hidden = (options.number(name, DROPOUT, maximum=1) for name in names)
    if silent:
        are = "is" if len(silent) == 1 else "are"
        text = f"{DROPOUT}, Megatron-LM's default: {' and '.join(silent)} {are} not given"
        draft.remark("assumed", "model.dropout", text)
    if attention and not hidden:
        text = f"{attention:g} with --hidden-dropout 0 is not supported: predicted as 0"
        draft.remark("ignored", "--attention-dropout", text)
    differs = hidden and attention != hidden
    return {"dropout": hidden, **({"attention_dropout": attention} if differs else {})}
