"""The shape of a measured run's model, from a row's columns or from the catalogue's model."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from mistlab import catalog
from mistlab.runs.cells import count_of, text_of
from mistlab.runs.parts import alike_of, parts_of
from mistlab.values.errors import refuse
from mistlab.values.model import ModelSpec
from mistlab.values.value import to_mapping

# What a model's name contains, and its family; other models are taken as Llama's.
FAMILIES_BY_WORD: Mapping[str, str] = {
    "llama": "llama",
    "falcon": "falcon",
    "gpt-oss": "llama",
    "gpt_oss": "llama",
    "deepseek": "llama",
    "mixtral": "llama",
    "qwen": "llama",
    "kimi": "llama",
    "moonlight": "llama",
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


def shape_of(cells: Mapping[str, str], remarks: str) -> tuple[Shape, list[str]]:
    """The shape of a row's model, and what is assumed about it."""
    name, notes = text_of(cells, "model"), list[str]()
    known = _catalogued(name)
    found = {size: count_of(cells, size) for size in (*NAMES, "kv_heads", "ffn", "vocab")}
    if known is not None and any(found[size] is None for size in NAMES):
        notes.append(f"no shape is given: the catalogue's {known.name} taken")
        found = {size: found[size] or getattr(known, size) for size in found}
    for size, words in NAMES.items():
        if found[size] is None:
            refuse(size, f"is empty, and the catalogue has no model {name!r}: give {words}")
    family = known.family if known is not None else _family(name, found, notes)
    if "swiglu=1" in remarks:
        family = "llama"
    tied = "tied embeddings" in remarks or (family == "gpt" and _ties(name))
    tied = tied and "untie-embeddings" not in remarks
    heads, kv_heads = found["heads"], found["kv_heads"]
    if kv_heads is None:
        notes.append("kv_heads is empty: as many as heads assumed")
    sizes: dict[str, Any] = {**found, "kv_heads": kv_heads or heads}
    plain = {name: sizes[name] for name in ("hidden", "layers", "heads", "kv_heads")}
    if found["ffn"] is None:
        sizes["ffn"] = ModelSpec.of(family=family, **plain).ffn  # type: ignore[arg-type]
        notes.append(f"ffn is empty: {sizes['ffn']} assumed")
    if found["vocab"] is None:
        sizes["vocab"] = VOCAB[family]
        notes.append(f"vocab is empty: {sizes['vocab']} assumed")
    parts = parts_of(cells, remarks, alike_of(name), sizes)
    own: dict[str, Any] = {name: parts.pop(name) for name in ("ffn", "kv_heads") if name in parts}
    sizes |= own
    kept = tuple(sorted(parts.items()))
    shape = Shape(family=family, tied_embeddings=tied, parts=kept, **sizes)
    _ = shape.model  # refuses sizes that do not go together
    return shape, notes


def _plain(part: Any) -> Any:
    return to_mapping(part) if is_dataclass(part) and not isinstance(part, type) else part


def _catalogued(name: str) -> ModelSpec | None:
    plain = name.casefold()
    return catalog.model(plain) if plain in catalog.model_names() else None


def _family(name: str, found: Mapping[str, int | None], notes: list[str]) -> str:
    words = name.casefold()
    for word, family in FAMILIES_BY_WORD.items():
        if word in words:
            return family
    notes.append(f"model {name!r} is unknown: a block like Llama's assumed")
    return "llama"


def _ties(name: str) -> bool:
    """Whether a GPT-like model shares its table of tokens with its head, as published."""
    return "mpt" in name.casefold() or "gpt" in name.casefold()
