"""The shape (family and sizes) of a measured run's model, from the columns of its row or from the
catalogue.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from experiments.runs.run_row import RunRow
from experiments.runs.sized_models import model_of_size
from mistlab import catalog
from mistlab.core.values import did_you_mean, refuse, to_mapping
from mistlab.plan.model_parts import Experts, Window
from mistlab.plan.workload import ModelSpec

# GPT-2's vocabulary size, which Megatron-LM's tests round up to a multiple.
TOKENS = 50_257
MULTIPLE = 128
# Letters in the block patterns of hybrid models: for blocks with experts, and for blocks with
# state-space mixers.
EXPERTS, SCANS = frozenset("E"), frozenset("MG")
VOCAB = {"gpt": 50304, "falcon": 65024, "llama": 128256}
NAMES = {
    "layers": "the number of transformer blocks",
    "hidden": "the width of the residual stream",
    "heads": "the number of attention heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a model: its family, its sizes, and the ``parts`` that a plain transformer does
    not have.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied_embeddings: bool
    parts: tuple[tuple[str, Any], ...] = ()

    @property
    def model(self) -> ModelSpec:
        """The model of this shape."""
        return ModelSpec.from_mapping(
            {
                "family": self.family,
                "layers": self.layers,
                "hidden": self.hidden,
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "ffn": self.ffn,
                "vocab": self.vocab,
                "tied_embeddings": self.tied_embeddings,
                **{name: _plain(part) for name, part in self.parts},
            }
        )


def shape_of(row: RunRow) -> tuple[Shape, list[str]]:
    """The shape of a row's model, and the assumptions made about it."""
    notes = list[str]()
    known, note = named_model(row)
    given = _sizes_of(row, notes)
    if pattern := row.pattern.replace("|", "").upper():
        base = known if known is not None and known.pattern else base_of_pattern(pattern)
        given["vocab"] = _vocab(row, base.family, base, notes)
        return _by_pattern(base, pattern, row, given, notes), notes
    if known is not None and (known.pattern or note):
        notes.append(note)
        return _whole(known, given, notes), notes
    if known is not None and any(given[size] is None for size in NAMES):
        notes.append(f"no shape is given: the catalogue's {known.name} taken")
        given = {size: given[size] or getattr(known, size) for size in given}
        row = _with_experts(row, known, given)
    for size, meaning in NAMES.items():
        if given[size] is None:
            refuse(size, f"is empty, and {_unknown(row)}: give {meaning}, or a model's name")
    family = known.family if known is not None else _family(row, notes)
    if row.gated:
        family = "llama"
        given["ffn"] = _gated_width(given["ffn"], given["hidden"], row)
    tied = _shares_table(row, family)
    heads, kv_heads = given["heads"], given["kv_heads"]
    if kv_heads is None:
        notes.append("kv_heads is empty: as many as heads assumed")
    sizes: dict[str, Any] = {**given, "kv_heads": kv_heads or heads}
    plain = {name: sizes[name] for name in ("hidden", "layers", "heads", "kv_heads")}
    if given["ffn"] is None:
        sizes["ffn"] = ModelSpec.of(family=family, **plain).ffn  # type: ignore[arg-type]
        notes.append(f"ffn is empty: {sizes['ffn']} assumed")
    alike = None if not row.alike else catalog.model(row.alike)
    sizes["vocab"] = _vocab(row, family, alike, notes)
    parts = _parts_of(row, alike, sizes)
    if family == "gpt" and _is_traced_as_llama(parts):
        family = "llama"
        parts |= _gated(parts, sizes, notes)
    parts |= _dropped(row, family, notes)
    sizes |= {name: parts.pop(name) for name in ("ffn", "kv_heads") if name in parts}
    kept = tuple(sorted(parts.items()))
    shape = Shape(family=family, tied_embeddings=tied, parts=kept, **sizes)
    _ = shape.model  # refuses sizes that do not go together
    return shape, notes


def _sizes_of(row: RunRow, notes: list[str]) -> dict[str, int | None]:
    """The sizes that a row states, or that the run's script has in place of them."""
    sizes = {size: row.count(size) for size in (*NAMES, "kv_heads", "ffn", "vocab")}
    if row.script_sizes:
        listed = ", ".join(f"{name} {size}" for name, size in row.script_sizes.items())
        notes.append(f"sizes are those of the run's script: {listed}")
    return sizes | dict(row.script_sizes)


def named_model(row: RunRow) -> tuple[ModelSpec | None, str]:
    """The model that a row names, and a note; None if the name is not known."""
    if row.near_model is not None:
        return ModelSpec.from_mapping(row.near_model), row.near_note
    if row.model in catalog.model_names():
        return catalog.model(row.model), ""
    if row.hybrid:
        return catalog.model(row.hybrid), ""
    # Tables about fine-tuning name released models, so their rows need not state the sizes.
    billions = row.billions or (row.millions or 0.0) / 1e3
    if not billions or any(row.count(size) for size in NAMES):
        return None, ""
    return model_of_size(billions, has_experts=row.has_experts)


def _unknown(row: RunRow) -> str:
    """A message that the model of a row is not in the catalogue, with names similar to it."""
    if not row.model:
        return "no model is named"
    near = did_you_mean(row.model, catalog.model_names())
    meant = f" ({near})" if near else ""
    return f"the catalogue has no model {row.text('model')!r}{meant}"


def replicated(shape: Shape, ranks: int) -> tuple[Shape, str]:
    """The shape in which key and value heads are replicated until there are as many as
    tensor-parallel ranks, as Megatron does it; and a note if they are.
    """
    few = shape.kv_heads
    if ranks <= few or ranks % few or shape.heads % ranks:
        return shape, ""
    note = f"{few} kv_heads are fewer than tp {ranks}: each rank has one of its own"
    return replace(shape, kv_heads=ranks), note


def within_samples(shape: Shape, tokens: int | None) -> Shape:
    """The shape with attention that stays inside packed samples of at most ``tokens`` tokens, which
    costs about as much as a window of as many tokens in every block; the same shape if this is
    None, or if the model itself has windows.
    """
    if tokens is None or dict(shape.parts).get("window") is not None:
        return shape
    window = ("window", Window(size=tokens, full_every=0))
    parts = (part for part in shape.parts if part[0] != "window")
    return replace(shape, parts=(*parts, window))


def _with_experts(row: RunRow, known: ModelSpec, given: dict[str, int | None]) -> RunRow:
    """The row with the experts of its model, if it does not state any; ``ffn`` is then the width of
    one expert, as in rows that state experts.
    """
    experts = known.experts
    if experts is None or row.text("experts"):
        return row
    if row.count("ffn") is None:
        given["ffn"] = experts.ffn
    of_model = {"experts": str(experts.count), "topk": str(experts.active)}
    return replace(row, cells={**row.cells, **of_model})


def _is_traced_as_llama(parts: Mapping[str, Any]) -> bool:
    """Whether a model has features for which only blocks of the Llama kind can be traced."""
    experts = parts.get("experts")
    return bool(parts.get("latent")) or (experts is not None and experts.shared_ffn > 0)


def _gated(parts: Mapping[str, Any], sizes: Mapping[str, int], notes: list[str]) -> dict[str, Any]:
    """Two thirds of the width of a feed-forward network: a gated network of that width has as many
    parameters and activations.
    """
    notes.append("blocks like Llama's taken: gated networks of two thirds the width")
    widths: dict[str, Any] = {"ffn": two_thirds(parts.get("ffn", sizes["ffn"]))}
    if experts := parts.get("experts"):
        shared = two_thirds(experts.shared_ffn)
        widths["experts"] = replace(experts, ffn=two_thirds(experts.ffn), shared_ffn=shared)
    return widths


def _shares_table(row: RunRow, family: str) -> bool:
    """Whether embedding and head share their weights."""
    if row.tied is not None:
        return row.tied
    if row.usual_tied is not None:
        return row.usual_tied
    if row.tied_as_released and row.text("method"):
        return True
    return family == "gpt" and row.shares_as_gpt


def _plain(part: Any) -> Any:
    return to_mapping(part) if is_dataclass(part) and not isinstance(part, type) else part


def _whole(known: ModelSpec, given: Mapping[str, int | None], notes: list[str]) -> Shape:
    """The shape of a hybrid model of the catalogue, or of a similar one with the sizes of a row."""
    sizes: dict[str, Any] = {size: value for size, value in given.items() if value is not None}
    model = hybrid_of_sizes(known, given) if known.pattern else replace(known, **sizes)
    if name := model.name or known.name:
        notes.append(f"blocks are those of {name}")
    return _shape_of_model(model)


def _by_pattern(
    base: ModelSpec, pattern: str, row: RunRow, given: Mapping[str, int | None], notes: list[str]
) -> Shape:
    """The shape of a model whose blocks follow a pattern of letters; each letter stands for a kind
    of block of a hybrid model.
    """
    model = hybrid_of_sizes(base, given)
    experts = None
    if EXPERTS & {*pattern}:
        sizes = {"ffn": model.ffn, "layers": model.layers}
        experts = _experts_of_row(row, base.experts, sizes)
    model = replace(
        model,
        name="",
        pattern=pattern,
        experts=experts,
        state_space=model.state_space if SCANS & {*pattern} else None,
        head_dim=row.head_channels or model.head_dim,
    )
    notes.append(f"blocks {pattern} are built like those of {base.name}")
    if row.further_tokens:
        notes.append("blocks that predict later tokens are not counted")
    return _shape_of_model(model)


def _shape_of_model(model: ModelSpec) -> Shape:
    parts = tuple((name, getattr(model, name)) for name in _PARTS_OF_WHOLE)
    sizes = {name: getattr(model, name) for name in (*NAMES, "kv_heads", "ffn", "vocab")}
    return Shape(family=model.family, tied_embeddings=model.tied_embeddings, parts=parts, **sizes)


# The fields of a hybrid model that its shape copies.
_PARTS_OF_WHOLE = (
    *("head_dim", "rotary_fraction", "qk_norm", "attention_gate", "latent"),
    *("experts", "state_space", "pattern"),
)


def _vocab(row: RunRow, family: str, alike: ModelSpec | None, notes: list[str]) -> int:
    """The vocabulary size of a row's model after padding: its own, that of a similar model, that of
    Megatron's tests, or that of its family.
    """
    vocab = row.count("vocab")
    if vocab is None:
        if alike is not None and (not row.arguments or _has_tokens_of(alike, row)):
            vocab = alike.vocab
        else:
            vocab = row.usual_vocab or (TOKENS if row.arguments else VOCAB[family])
    if row.arguments:
        # The vocabulary is padded to a multiple of this number for each tensor-parallel rank.
        multiple = (row.vocab_multiple or MULTIPLE) * (row.count("tp") or 1)
        vocab = -(-vocab // multiple) * multiple
    if row.count("vocab") is None:
        notes.append(f"vocab is empty: {vocab} assumed")
    return vocab


def _has_tokens_of(alike: ModelSpec, row: RunRow) -> bool:
    """Whether a functional test has the vocabulary of the model that it imitates: if it is as wide
    as the model or, for a tiny model, if it pads its vocabulary to a multiple that the model's
    vocabulary is.
    """
    multiple = row.vocab_multiple or MULTIPLE
    is_as_wide = alike.hidden == row.count("hidden")
    return is_as_wide or (multiple > MULTIPLE and alike.vocab % multiple == 0)


def _dropped(row: RunRow, family: str, notes: list[str]) -> dict[str, Any]:
    """The fields for dropout of a model that is trained with dropout; empty for other models."""
    if row.arguments:
        return {"dropout": row.dropout} if row.dropout else {}
    if family != "gpt" or row.noted_dropout is None:
        return {}
    notes.append(f"dropout {row.noted_dropout} taken")
    return {"biases": True, "dropout": row.noted_dropout}


def _family(row: RunRow, notes: list[str]) -> str:
    if row.family:
        return row.family
    # A name such as CodeLlama or nanoGPT ends with the word for its family.
    name = row.text("model")
    if row.family_by_end:
        notes.append(f"model {name!r} is taken as a {row.end} by the end of its name")
        return row.family_by_end
    notes.append(f"model {name!r} is unknown: a block like Llama's assumed")
    return "llama"


def _gated_width(ffn: int | None, hidden: int | None, row: RunRow) -> int | None:
    """The width of a gated feed-forward network, from the row or from the model; None if it is not
    known.

    If Megatron's arguments state four times the hidden size, as for networks without gates,
    Megatron uses two thirds of it.
    """
    if ffn is None or hidden is None or not row.arguments or ffn != 4 * hidden:
        return ffn
    return two_thirds(ffn)


def two_thirds(ffn: int) -> int:
    """Two thirds of a width, rounded to a multiple of 64: a gated network of this width has about
    as many parameters.
    """
    return 2 * ffn // 3 // 64 * 64


def base_of_pattern(pattern: str) -> ModelSpec:
    """The hybrid model of the catalogue whose kinds of blocks occur in a pattern of letters, for a
    model that is not known by name.
    """
    return catalog.model("nemotron-3-nano" if EXPERTS & {*pattern} else "nemotron-h-56b")


def hybrid_of_sizes(known: ModelSpec, sizes: Mapping[str, int | None]) -> ModelSpec:
    """A hybrid model with the given sizes, and with the pattern of blocks of another model.

    The width of a state-space mixer follows from the hidden size: its number of heads grows in
    proportion to the known model's. In models with experts, the row's width is that of an expert;
    other feed-forward networks are wider by the same ratio as in the known model.
    """
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if all(getattr(known, name) == size for name, size in given.items()):
        return known
    if heads := sizes.get("heads"):
        given.setdefault("kv_heads", heads)
    scan, experts = known.state_space, known.experts
    if experts is not None and (ffn := sizes.get("ffn")):
        times = ffn / experts.ffn
        shared_ffn = round(experts.shared_ffn * times)
        narrower = replace(experts, ffn=ffn, shared_ffn=shared_ffn)
        given |= {"ffn": round(known.ffn * times), "experts": narrower}
    if scan is None:
        return replace(known, **given)
    wider = given.get("hidden", known.hidden) / known.hidden
    groups = max(1, round(scan.heads * wider / scan.groups)) * scan.groups
    wider_scan = replace(scan, heads=groups)
    return replace(known, name="", **given, state_space=wider_scan)


# Fields that a row's model gets from a similar model: those on head sizes, rotary embedding and
# attention.
_STRUCTURE = ("qk_norm", "attention_gate", "sinks", "window", "latent", "biases")


def _parts_of(row: RunRow, alike: ModelSpec | None, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a row's model in which it differs from a plain transformer.

    ``sizes`` are the row's; its ``ffn`` is the width of an expert if there are experts.
    """
    parts: dict[str, Any] = {}
    if alike is not None:
        parts |= {name: getattr(alike, name) for name in _STRUCTURE}
        parts["head_dim"] = alike.head_dim
        parts["rotary_fraction"] = alike.rotary_fraction
        parts["position_embedding"] = alike.position_embedding
        if alike.latent is not None:
            parts["kv_heads"] = sizes["heads"]
    if (row.count("experts") or 1) > 1:
        experts = None if alike is None else alike.experts
        parts["experts"] = _experts_of_row(row, experts, sizes)
        # The row states the width of an expert; blocks without experts are wider, by the same ratio
        # as in the similar model.
        wider = 1.0 if alike is None or experts is None else alike.ffn / experts.ffn
        parts["ffn"] = round(sizes["ffn"] * wider)
    of_alike = 0 if alike is None else alike.further_tokens
    if tokens := row.further_tokens or of_alike:
        parts["further_tokens"] = tokens
    return parts


def busiest(experts: int, active: int) -> int:
    """By how many experts each token is effectively processed, if every expert is padded to the
    tokens of the busiest one.

    Even routing would give ``active``, and routing all tokens to one expert would give ``experts``.
    The result is their geometric mean, since a row says nothing about its routing.
    """
    return min(experts, round(math.sqrt(experts * active)))


def _experts_of_row(row: RunRow, like: Experts | None, sizes: Mapping[str, int]) -> Experts:
    """The experts in the blocks of a row's model; fields that the row omits are taken from the
    similar model ``like``.
    """
    experts = row.count("experts") or (1 if like is None else like.count)
    active = row.count("topk")
    if active is None:
        refuse("topk", f"is empty: give how many of {experts} experts a token takes")
    if active > experts:
        refuse("topk", f"{active} is more than the {experts} experts: give at most {experts}")
    if row.pads_experts:
        active = busiest(experts, active)
    shared, dense = row.shared_ffn, row.dense_blocks
    if shared is None:
        shared = 0 if like is None else like.shared_ffn * sizes["ffn"] // like.ffn
    if dense is None:
        dense = 0 if like is None else like.dense_blocks
    plain = Experts(count=experts, active=active, ffn=sizes["ffn"])
    return replace(plain, shared_ffn=shared, dense_blocks=min(dense, sizes["layers"] - 1))
