"""The shape of a measured run's model, from a row's columns or from the catalogue's model."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from experiments.runs.run_arguments import (
    DROPOUT,
    TOKENS,
    are_arguments,
    channels_of,
    dropout_of,
    gated_width,
    has_tokens_of,
    padded,
    pattern_in,
    two_thirds,
)
from experiments.runs.run_shapes import (
    alike_of,
    base_of_pattern,
    experts_of_row,
    first_named,
    hybrid_of_sizes,
    named_model,
    parts_of,
    words_of,
)
from experiments.runs.run_words import Usual
from experiments.runs.runs_table import count_of, text_of
from mistlab import catalog
from mistlab.core.values import near_matches, refuse, to_mapping
from mistlab.plan.workload import ModelSpec

# Words of a model's name, and its family; other models are taken as Llama's.
FAMILIES_BY_WORD: Mapping[str, str] = {
    "llama": "llama",
    "falcon": "falcon",
    "gpt oss": "llama",
    "deepseek": "llama",
    "mixtral": "llama",
    "qwen": "llama",
    "kimi": "llama",
    "moonlight": "llama",
    "glm": "llama",
    "olmo": "llama",
    "phi": "llama",
    "mpt": "gpt",
    "gpt": "gpt",
    "opt": "gpt",
    "nemotron": "gpt",
    "bert": "gpt",
}
VOCAB = {"gpt": 50304, "falcon": 65024, "llama": 128256}
NAMES = {
    "layers": "transformer blocks",
    "hidden": "the width of the residual stream",
    "heads": "attention heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's family and sizes, and its ``parts`` beyond a plain transformer's by name."""

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


def shape_of(
    cells: Mapping[str, str], remarks: str, usual: Usual | None = None
) -> tuple[Shape, list[str]]:
    """The shape of a row's model, and what is assumed about it, as its engine's users have it."""
    name, notes = text_of(cells, "model"), list[str]()
    known, note = named_model(name)
    found = {size: count_of(cells, size) for size in (*NAMES, "kv_heads", "ffn", "vocab")}
    if pattern := pattern_in(remarks):
        base = known if known is not None and known.pattern else base_of_pattern(pattern)
        found["vocab"] = _vocab(cells, base.family, remarks, base, usual, notes)
        return _by_pattern(base, pattern, cells, found, notes), notes
    if known is not None and (known.pattern or note):
        notes.append(note)
        return _whole(known, found, notes), notes
    if known is not None and any(found[size] is None for size in NAMES):
        notes.append(f"no shape is given: the catalogue's {known.name} taken")
        found = {size: found[size] or getattr(known, size) for size in found}
        cells = _with_experts(cells, known, found)
    for size, words in NAMES.items():
        if found[size] is None:
            refuse(size, f"is empty, and {_unknown(name)}: give {words}, or a model's name")
    family = known.family if known is not None else _family(name, found, notes)
    if "swiglu=1" in remarks:
        family = "llama"
        found["ffn"] = gated_width(found["ffn"], found["hidden"], remarks)
    tied = _shares_table(name, family, remarks, usual)
    heads, kv_heads = found["heads"], found["kv_heads"]
    if kv_heads is None:
        notes.append("kv_heads is empty: as many as heads assumed")
    sizes: dict[str, Any] = {**found, "kv_heads": kv_heads or heads}
    plain = {name: sizes[name] for name in ("hidden", "layers", "heads", "kv_heads")}
    if found["ffn"] is None:
        sizes["ffn"] = ModelSpec.of(family=family, **plain).ffn  # type: ignore[arg-type]
        notes.append(f"ffn is empty: {sizes['ffn']} assumed")
    alike = alike_of(name, remarks)
    sizes["vocab"] = _vocab(cells, family, remarks, alike, usual, notes)
    parts = parts_of(cells, remarks, alike, sizes)
    if family == "gpt" and _is_traced_as_llama(parts):
        family = "llama"
        parts |= _gated(parts, sizes, notes)
    parts |= _dropped(family, remarks, usual, notes)
    own: dict[str, Any] = {name: parts.pop(name) for name in ("ffn", "kv_heads") if name in parts}
    sizes |= own
    kept = tuple(sorted(parts.items()))
    shape = Shape(family=family, tied_embeddings=tied, parts=kept, **sizes)
    _ = shape.model  # refuses sizes that do not go together
    return shape, notes


def _unknown(name: str) -> str:
    """That the catalogue does not have a row's model, and names that are near to its name."""
    if not name:
        return "no model is named"
    near = near_matches(name.casefold(), catalog.model_names())
    meant = f" ({near.removeprefix(': ')})" if "did you mean" in near else ""
    return f"the catalogue has no model {name!r}{meant}"


def replicated(shape: Shape, ranks: int) -> tuple[Shape, str]:
    """A shape whose heads of keys and values lie on several of the tensor-parallel ranks if there
    are fewer of them, as Megatron has it, and a note where this is so."""
    few = shape.kv_heads
    if ranks <= few or ranks % few or shape.heads % ranks:
        return shape, ""
    note = f"{few} kv_heads are fewer than tp {ranks}: each rank has one of its own"
    return replace(shape, kv_heads=ranks), note


def _with_experts(
    cells: Mapping[str, str], known: ModelSpec, found: dict[str, int | None]
) -> Mapping[str, str]:
    """A row's cells with the experts of its model, if it says nothing of any; ``ffn`` is the width
    of one, as in rows that do."""
    experts = known.experts
    if experts is None or text_of(cells, "experts"):
        return cells
    if count_of(cells, "ffn") is None:
        found["ffn"] = experts.ffn
    return {**cells, "experts": str(experts.count), "topk": str(experts.active)}


def _is_traced_as_llama(parts: Mapping[str, Any]) -> bool:
    """Whether a model has parts that are traced in blocks like Llama's alone."""
    experts = parts.get("experts")
    return bool(parts.get("latent")) or (experts is not None and experts.shared_ffn > 0)


def _gated(parts: Mapping[str, Any], sizes: Mapping[str, int], notes: list[str]) -> dict[str, Any]:
    """The widths of gated networks of two thirds the width: they have as many parameters, and keep
    as much."""
    notes.append("blocks like Llama's taken: gated networks of two thirds the width")
    found: dict[str, Any] = {"ffn": two_thirds(parts.get("ffn", sizes["ffn"]))}
    if experts := parts.get("experts"):
        shared = two_thirds(experts.shared_ffn)
        found["experts"] = replace(experts, ffn=two_thirds(experts.ffn), shared_ffn=shared)
    return found


def _shares_table(name: str, family: str, remarks: str, usual: Usual | None) -> bool:
    """Whether embedding and head share a table of tokens."""
    if "tied embeddings" in remarks:
        return "untie-embeddings" not in remarks
    if usual is not None:
        return usual.tied_embeddings
    return family == "gpt" and _ties(name) and "untie-embeddings" not in remarks


def _plain(part: Any) -> Any:
    return to_mapping(part) if is_dataclass(part) and not isinstance(part, type) else part


def _whole(known: ModelSpec, found: Mapping[str, int | None], notes: list[str]) -> Shape:
    """The shape of a hybrid model, or of one that is near to it, with the sizes of a row."""
    model = hybrid_of_sizes(known, found) if known.pattern else known
    notes.append(f"blocks are those of {model.name or known.name}")
    return _shape_of_model(model)


def _by_pattern(
    base: ModelSpec,
    pattern: str,
    cells: Mapping[str, str],
    found: Mapping[str, int | None],
    notes: list[str],
) -> Shape:
    """The shape of a model whose blocks are those of a pattern, each built as a hybrid model's."""
    remarks = text_of(cells, "notes").casefold()
    model = hybrid_of_sizes(base, found)
    experts = None
    if "E" in pattern:
        sizes = {"ffn": model.ffn, "layers": model.layers}
        experts = experts_of_row(cells, remarks, base.experts, sizes)
    model = replace(
        model,
        name="",
        pattern=pattern,
        experts=experts,
        state_space=model.state_space if set(pattern) & set("MG") else None,
        head_dim=channels_of(remarks) or model.head_dim,
    )
    notes.append(f"blocks {pattern} are built like those of {base.name}")
    if "mtp-num-layers=" in remarks:
        notes.append("blocks that predict later tokens are not counted")
    return _shape_of_model(model)


def _shape_of_model(model: ModelSpec) -> Shape:
    parts = tuple((name, getattr(model, name)) for name in _PARTS_OF_WHOLE)
    sizes = {name: getattr(model, name) for name in (*NAMES, "kv_heads", "ffn", "vocab")}
    return Shape(family=model.family, tied_embeddings=model.tied_embeddings, parts=parts, **sizes)


# Fields of models that are taken as they are.
_PARTS_OF_WHOLE = (
    *("head_dim", "rotary_fraction", "qk_norm", "attention_gate", "latent"),
    *("experts", "state_space", "pattern"),
)


def _vocab(
    cells: Mapping[str, str],
    family: str,
    remarks: str,
    alike: ModelSpec | None,
    usual: Usual | None,
    notes: list[str],
) -> int:
    """The tokens of a row's model, with padding; those of a model built alike, of Megatron's own
    tests, or of the family where the row says none."""
    vocab = count_of(cells, "vocab")
    if vocab is None:
        vocab = TOKENS if are_arguments(remarks) else VOCAB[family]
        vocab = vocab if usual is None else usual.vocab
        if alike is not None and (
            not are_arguments(remarks) or has_tokens_of(alike, count_of(cells, "hidden"), remarks)
        ):
            vocab = alike.vocab
    if are_arguments(remarks):
        vocab = padded(vocab, remarks, count_of(cells, "tp") or 1)
    if count_of(cells, "vocab") is None:
        notes.append(f"vocab is empty: {vocab} assumed")
    return vocab


def _dropped(family: str, remarks: str, usual: Usual | None, notes: list[str]) -> dict[str, Any]:
    """The parts of a model that is trained with dropout; none if it is trained without."""
    if are_arguments(remarks):
        dropout = dropout_of(remarks)
        return {"dropout": dropout} if dropout else {}
    if family != "gpt" or (usual is None and "dropout on" not in remarks):
        return {}
    dropout = DROPOUT if usual is None else usual.dropout
    notes.append(f"dropout {dropout} taken")
    return {"biases": True, "dropout": dropout}


def _family(name: str, found: Mapping[str, int | None], notes: list[str]) -> str:
    family = first_named(name, FAMILIES_BY_WORD)
    if family is not None:
        return family
    # A name such as CodeLlama or nanoGPT ends with the word that tells.
    for word, family in FAMILIES_BY_WORD.items():
        if any(part.endswith(word) for part in words_of(name)):
            notes.append(f"model {name!r} is taken as a {word} by the end of its name")
            return family
    notes.append(f"model {name!r} is unknown: a block like Llama's assumed")
    return "llama"


def _ties(name: str) -> bool:
    """Whether a GPT-like model shares its table of tokens with its head, as published."""
    return any(word.endswith(("mpt", "gpt")) for word in words_of(name))
