"""A model's shape as Megatron-LM's options, and back.

Megatron-LM's options choose norm, activation and position embedding of all blocks alike; parts that
only some models have are those of ``megatron_parts``. It pads vocabularies to a multiple, and takes
a dropout of a tenth unless it is told otherwise.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options
from mistlab.export.megatron_hybrids import check_hybrid
from mistlab.export.megatron_parts import part_options, parts_of, sayable_parts
from mistlab.export.with_parts import with_workload
from mistlab.values.errors import InputError, refuse
from mistlab.values.job import Job
from mistlab.values.model import ROTARY_BASE, VOCAB_MULTIPLE, ModelSpec

DROPOUT = 0.1
# What GPT-2's tokenizer knows, without padding.
GPT2_VOCAB = 50257

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "absolute", "rope": "rotary", "none": "none"}


def sayable_model(job: Job) -> Job:
    """The job with the nearest model that Megatron-LM builds."""
    model = job.workload.model
    if model.graph_file is not None:
        problem = (
            "is traced from code of its own, which no option builds: export a plan of a model of "
            "the catalogue, or of a mapping"
        )
        refuse("workload.model", problem)
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


def model_of(options: Options, found: Found) -> ModelSpec:
    """The model that options describe."""
    hidden, heads = _needed(options, "--hidden-size"), _needed(options, "--num-attention-heads")
    layers = _needed(options, "--num-layers")
    gated = options.has("--swiglu") or options.has("--quick-geglu")
    norm = options.choice("--normalization", tuple(_NORMS))
    ffn = options.whole("--ffn-hidden-size") or _default_ffn(hidden, gated=gated)
    position = _position(options)
    groups = options.whole("--num-query-groups")
    grouped = options.has("--group-query-attention")
    if groups is not None and not grouped:
        text = f"--num-query-groups {groups} without --group-query-attention: heads share no keys"
        found.remark("contradicting", "model.kv_heads", text)
    channels = options.whole("--kv-channels")
    percent = options.number("--rotary-percent", 1.0, maximum=1)
    base = options.number("--rotary-base", ROTARY_BASE)
    is_rotary = position == "rotary"
    fields: dict[str, Any] = {} if channels is None else {"head_dim": channels}
    fields |= {"rotary_fraction": percent if is_rotary else 0.0}
    fields |= parts_of(options, found, layers, ffn)
    return ModelSpec.of(
        family="llama" if gated and norm == "RMSNorm" and is_rotary else "gpt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=groups if grouped and groups else heads,
        ffn=ffn,
        mlp_type="gated_mlp" if gated else "mlp",
        activation="silu" if gated else "gelu_tanh",
        norm=_NORMS[norm or "LayerNorm"],
        position_embedding=position,
        rotary_base=base if is_rotary else ROTARY_BASE,
        tied_embeddings=not options.has("--untie-embeddings-and-output-weights"),
        biases=not options.has("--disable-bias-linear"),
        dropout=_dropout(options, found),
        vocab=_vocab(options, found),
        **fields,
    )


def _default_ffn(hidden: int, *, gated: bool) -> int:
    """The width that Megatron-LM takes where none is given: two thirds for a gated network."""
    return 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden


def _needed(options: Options, name: str) -> int:
    number = options.whole(name)
    if number is None:
        message = f"{name}: is missing: give it, or the model by --model"
        raise InputError(message)
    return number


def _position(options: Options) -> str:
    said = options.choice("--position-embedding-type", tuple(_POSITIONS))
    if options.has("--use-rotary-position-embeddings"):
        return "rotary"
    return _POSITIONS[said or "learned_absolute"]


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


def _vocab(options: Options, found: Found) -> int:
    """The vocabulary, padded as Megatron-LM does unless plans would pad it so themselves."""
    vocab = options.whole("--vocab-size")
    if vocab is None:
        vocab = GPT2_VOCAB
        text = f"{vocab} tokens, those of GPT-2: --vocab-size is not given"
        found.remark("assumed", "model.vocab", text)
    tensor = options.whole("--tensor-model-parallel-size") or 1
    divisor = options.whole("--make-vocab-size-divisible-by") or VOCAB_MULTIPLE
    padded = -(-vocab // (divisor * tensor)) * divisor * tensor
    by_plans = vocab
    if vocab % tensor:
        multiple = VOCAB_MULTIPLE * tensor
        by_plans = -(-vocab // multiple) * multiple
    return vocab if padded == by_plans else padded
