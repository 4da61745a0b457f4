"""A model's shape as Megatron-LM's options, and back.

Megatron-LM's options choose norm, activation and position embedding of all blocks alike; parts that
only some models have are those of ``megatron_parts``. It pads vocabularies to a multiple, and takes
a dropout of a tenth unless it is told otherwise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.values import InputError, refuse
from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options, is_of_epfl
from mistlab.export.megatron_hybrid_read import hybrid_parts, is_hybrid
from mistlab.export.megatron_hybrid_write import check_hybrid
from mistlab.export.megatron_parts import part_options, parts_of, sayable_parts
from mistlab.export.megatron_vocab import vocab_of
from mistlab.export.with_parts import with_workload
from mistlab.job.job import Job
from mistlab.plan.workload import ROTARY_BASE, VOCAB_MULTIPLE, Family, ModelSpec

DROPOUT = 0.1

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "absolute", "rope": "rotary", "none": "none"}
# Other words of older versions and relatives.
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
    """The job with the nearest model that Megatron-LM builds."""
    model = job.workload.model
    if model.graph_file is not None:
        problem = (
            "is traced from code of its own, which no option builds: export a plan of a model of "
            "the catalogue, or of a mapping"
        )
        refuse("workload.model", problem)
    if model.post_norms:
        refuse("workload.model.post_norms", "has no row in this export: leave it out")
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
    """The options of a model that ``sayable_model`` gave, without its sequence length."""
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
    yield f"--attention-dropout {model.dropout!r} --hidden-dropout {model.dropout!r}"
    divisor = 1 if model.vocab % tensor_parallel == 0 else VOCAB_MULTIPLE
    yield f"--vocab-size {model.vocab} --make-vocab-size-divisible-by {divisor}"


def _kinds(model: ModelSpec) -> Iterator[str]:
    """The options for kinds of norms, activations and positions."""
    if model.norm == "rmsnorm":
        yield "--normalization RMSNorm"
    if model.mlp_type == "gated_mlp":
        yield "--swiglu"
    elif model.activation == "relu2":
        yield "--squared-relu"
    words = {position: word for word, position in _POSITIONS.items()}
    yield f"--position-embedding-type {words[model.position_embedding]}"
    if model.position_embedding == "rotary":
        if model.rotary_fraction != 1 and model.latent is None:
            yield f"--rotary-percent {model.rotary_fraction!r}"
        if model.rotary_base != ROTARY_BASE:
            yield f"--rotary-base {int(model.rotary_base)}"


def model_of(
    options: Options, found: Found, vocab: int | None = None, program: str = ""
) -> ModelSpec:
    """The model that options describe; ``vocab`` is a vocabulary that is given beside them."""
    hidden, heads = _needed(options, "--hidden-size"), _needed(options, "--num-attention-heads")
    layers, hybrid = _layers_of(options, hidden, program)
    gated = _is_gated(options, found)
    ffn = options.whole("--ffn-hidden-size") or _default_ffn(options, hidden)
    position = _position(options, found)
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
    parts = parts_of(options, found, layers, ffn)
    if hybrid:
        _check_hybrid(parts)
    fields |= parts | hybrid
    return ModelSpec.of(
        family=_family(fields),
        hidden=hidden,
        layers=fields.pop("layers", layers),
        heads=heads,
        kv_heads=_key_heads(options, found, heads),
        ffn=ffn,
        rotary_base=base if is_rotary else ROTARY_BASE,
        tied_embeddings=not options.has("--untie-embeddings-and-output-weights"),
        biases=_has_biases(options, found),
        dropout=_dropout(options, found),
        vocab=vocab_of(options, found, vocab),
        **fields,
    )


def _layers_of(options: Options, hidden: int, program: str) -> tuple[int, dict[str, Any]]:
    """The number of blocks, and the fields of a hybrid model; none for any other."""
    layers = options.whole("--num-layers") or options.whole("--encoder-num-layers")
    if is_hybrid(options, program):
        fields = hybrid_parts(options, layers, hidden)
        return fields["layers"], fields
    return layers or _needed(options, "--num-layers"), {}


def _check_hybrid(parts: dict[str, Any]) -> None:
    for name in ("latent", "window", "sinks", "further_tokens", "attention_gate"):
        if parts.get(name):
            message = f"model.{name}: no hybrid model here has it: give a model by --model"
            raise InputError(message)


def _family(fields: Mapping[str, Any]) -> Family:
    """The family whose structure a model has; ``gpt`` for a structure that no family has."""
    for family, structure in _STRUCTURES.items():
        if all(fields[name] == value for name, value in structure.items()):
            return family
    return "gpt"


def _is_gated(options: Options, found: Found) -> bool:
    """Whether the network has a gate; a gate of another kind than SwiGLU's is told."""
    word = options.choice("--glu-activation", ("swiglu", "geglu", "reglu", "liglu"))
    if options.has("--swiglu") or word == "swiglu":
        return True
    kinds = [name for name in ("--geglu", "--quick-geglu") if options.has(name)]
    if word is not None:
        kinds.append(f"--glu-activation {word}")
    for kind in kinds:
        text = "the gate is taken as SwiGLU's, which costs as much"
        found.remark("assumed", kind, text)
    return bool(kinds)


def _activation(options: Options, *, gated: bool) -> str:
    if options.has("--squared-relu") and not gated:
        return "relu2"
    return "silu" if gated else "gelu_tanh"


def _norm(options: Options) -> str:
    known = (*_NORMS, "layernorm1p")
    said = options.choice("--normalization", known) or "LayerNorm"
    return "rmsnorm" if options.has("--use-rmsnorm") else _NORMS.get(said, "layernorm")


def _key_heads(options: Options, found: Found, heads: int) -> int:
    """Heads of keys and values."""
    of_relatives = options.whole("--num-key-heads")
    if of_relatives is not None:
        return of_relatives
    if options.choice("--attention-head-type", ("multihead", "multiquery")) == "multiquery":
        return 1
    groups, grouped = options.whole("--num-query-groups"), options.has("--group-query-attention")
    if grouped:
        # Megatron-LM's default is a single group.
        return groups or 1
    if groups is not None and groups != heads:
        text = f"--num-query-groups {groups} without --group-query-attention: heads share no keys"
        found.remark("contradicting", "model.kv_heads", text)
    return heads


def _has_biases(options: Options, found: Found) -> bool:
    """Whether products have biases."""
    without = [name for name in _WITHOUT_SOME_BIASES if options.has(name)]
    if without and not options.has("--disable-bias-linear"):
        # Pai-Megatron-Patch's switches leave biases to queries, keys and values at least.
        all_but_those = len(without) == len(_WITHOUT_SOME_BIASES)
        said = "none" if all_but_those else "all products"
        text = f"biases are taken in {said}, though some products alone have them"
        found.remark("assumed", " ".join(without), text)
        return not all_but_those
    if is_of_epfl(options):
        return options.has("--use-bias")
    if "--add-bias-linear" in options:
        return options.has("--add-bias-linear")
    return not options.has("--disable-bias-linear")


def _default_ffn(options: Options, hidden: int) -> int:
    """The width that Megatron-LM takes where none is given: two thirds for SwiGLU.

    FlagScale multiplies two thirds by a number, and rounds them up to a multiple.
    """
    multiple = options.whole("--multiple-of")
    factor = options.number("--hidden-dim-multiplier", 1.0)
    if not options.has("--swiglu"):
        return 4 * hidden
    if multiple is not None:
        return -(-int(8 * hidden // 3 * factor) // multiple) * multiple
    return 8 * hidden // 3 // 64 * 64


def _needed(options: Options, name: str) -> int:
    number = options.whole(name)
    if number is None and options.strays:
        message = f"{name}: is missing, unless it stands in what {options.strays[0].unknown}"
        raise InputError(message)
    if number is None:
        message = f"{name}: is missing: give it, or the model by --model"
        raise InputError(message)
    return number


def _position(options: Options, found: Found) -> str:
    said = options.choice("--position-embedding-type", tuple(_READ_POSITIONS))
    if options.has("--use-rotary-position-embeddings"):
        return "rotary"
    if said is None:
        return "none" if options.has("--no-position-embedding") else "absolute"
    if said == "mrope":
        message = (
            f"{options.where('--position-embedding-type')}: mrope turns the positions of images "
            "beside text, which no plan says: give a launch line that trains a decoder of text"
        )
        raise InputError(message)
    if said == "alibi":
        text = "alibi: attention is taken without biases of positions"
        found.remark("ignored", "--position-embedding-type", text)
    return _READ_POSITIONS[said]


def _dropout(options: Options, found: Found) -> float:
    names = ("--attention-dropout", "--hidden-dropout")
    silent = [name for name in names if name not in options.words]
    attention, hidden = (options.number(name, DROPOUT, maximum=1) for name in names)
    if silent:
        text = f"{DROPOUT}, Megatron-LM's default: {' and '.join(silent)} are not given"
        found.remark("assumed", "model.dropout", text)
    if attention != hidden:
        text = f"--attention-dropout {attention:g}, --hidden-dropout {hidden:g}: took {hidden:g}"
        found.remark("contradicting", "model.dropout", text)
    return hidden
