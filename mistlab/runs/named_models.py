"""Models that tables of runs name without their sizes: of the catalogue, or near to one of it.

Hybrid models are taken whole from the catalogue, because no columns say which of their blocks is of
which kind. Models whose attention this package does not have are taken with another's attention,
and a note says so. All sizes are those of released configurations.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mistlab import catalog
from mistlab.plan.workload import ModelSpec
from mistlab.runs.name_words import first_named, keys_in

# Words of a model's name, one after another, and the hybrid model of the catalogue; the first match
# counts.
HYBRIDS_BY_WORD: Mapping[str, str] = {
    "nemotron 3 nano": "nemotron-3-nano",
    "nemotron 3.5": "nemotron-3-nano",
    "nemotron v3 nano": "nemotron-3-nano",
    "nemotron 3 super": "nemotron-3-super",
    "nemotron v3 super": "nemotron-3-super",
    "nemotron 3 ultra": "nemotron-3-ultra",
    "nemotron v3 ultra": "nemotron-3-ultra",
    "nemotron h 8b": "nemotron-h-8b",
    "nemotron h": "nemotron-h-56b",
    "nemotron nano": "nemotron-h-56b",
    "qwen 3 next": "qwen3-next-80b-a3b",
    "qwen 3.5": "qwen3.6-35b-a3b",
    "qwen 3.6": "qwen3.6-35b-a3b",
    "llama 4 maverick": "llama4-maverick",
}

_DEEPSEEK_V4_FLASH: Mapping[str, Any] = {
    "family": "llama",
    "layers": 43,
    "hidden": 4096,
    "heads": 64,
    "head_dim": 192,
    "ffn": 2048,
    "vocab": 129280,
    "rotary_fraction": 0.333333333333,
    "latent": {"query_rank": 1024, "key_rank": 512, "value_dim": 128},
    "experts": {"count": 256, "active": 6, "ffn": 2048, "shared_ffn": 2048},
}
_GEMMA_4_26B: Mapping[str, Any] = {
    "family": "llama",
    "layers": 30,
    "hidden": 2816,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 256,
    "ffn": 2112,
    "vocab": 262144,
    "qk_norm": True,
    "tied_embeddings": True,
    "experts": {"count": 128, "active": 8, "ffn": 704, "shared_ffn": 2112},
}
# The same for models that are near to what this package has, with what they lack.
NEAR_BY_WORD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "deepseek v4 flash": (
        _DEEPSEEK_V4_FLASH,
        "compressed attention is taken as DeepSeek V3's, one residual stream of four counted",
    ),
    "gemma 4 26b": (_GEMMA_4_26B, "all blocks attend to all tokens, none has a window"),
}


def named_model(name: str) -> tuple[ModelSpec | None, str]:
    """The model that a table's name stands for, and a note; None if the name is unknown."""
    for words in keys_in(name, NEAR_BY_WORD):
        mapping, note = NEAR_BY_WORD[words]
        return ModelSpec.from_mapping({"name": words.replace(" ", ""), **mapping}), note
    if name.casefold() in catalog.model_names():
        return catalog.model(name.casefold()), ""
    known = first_named(name, HYBRIDS_BY_WORD)
    return (None if known is None else catalog.model(known)), ""


def base_of_pattern(pattern: str) -> ModelSpec:
    """The hybrid model of the catalogue whose blocks a pattern without a known model has."""
    return catalog.model("nemotron-3-nano" if "E" in pattern else "nemotron-h-56b")


def hybrid_of_sizes(known: ModelSpec, sizes: Mapping[str, int | None]) -> ModelSpec:
    """A hybrid model with the given sizes, whose blocks take turns as another's do.

    A state-space mixer is as wide as the hidden size makes it: its heads are as many times as many
    as the known model's. In models with experts a row's width is that of experts, and other
    networks are as much wider as the known model's.
    """
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if all(getattr(known, name) == size for name, size in given.items()):
        return known
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    scan, experts = known.state_space, known.experts
    if experts is not None and "ffn" in given:
        times = given["ffn"] / experts.ffn
        widths = {"ffn": given["ffn"], "shared_ffn": round(experts.shared_ffn * times)}
        given |= {"ffn": round(known.ffn * times), "experts": replace(experts, **widths)}
    if scan is None:
        return replace(known, **given)
    wider = given.get("hidden", known.hidden) / known.hidden
    groups = max(1, round(scan.heads * wider / scan.groups)) * scan.groups
    own = replace(scan, heads=groups)
    return replace(known, name="", **given, state_space=own)
