"""Names of models and of their parts in tables of runs, matched by whole words."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from experiments.runs.runs_table import count_of
from mistlab import catalog
from mistlab.core.values import refuse
from mistlab.plan.workload import Experts, ModelSpec

# The words of names that people give models, GPUs and software, so that names match whole words.
#
# A word ends where letters turn into digits, and at every other sign. A number keeps its decimal,
# and the letter of a size: ``Qwen3.6-35B-A3B`` is qwen, 3.6, 35b, a, 3b, and ``llama3_70b`` is
# llama, 3, 70b. So ``qwen-35b`` is no Qwen 3.5, and ``l40s`` no L4.


Named = TypeVar("Named")

# A number with the letter of its size, as in 8b; any other number, of which one digit after _ is a
# decimal too, as in nemotron3_5; letters, but for a v before a number, as in deepseekv3.
_WORD = re.compile(
    r"[0-9]+(?:\.[0-9]+)?[bmt](?![a-z0-9])|[0-9]+(?:\.[0-9]+|_[0-9](?![a-z0-9]))?|[a-z]+?(?=v[0-9])|[a-z]+"
)


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name, in small letters."""
    return tuple(word.replace("_", ".") for word in _WORD.findall(name.casefold()))


def first_named(name: str, known: Mapping[str, Named]) -> Named | None:
    """The first entry whose words a name has, one after another; None if it has none's."""
    return next((known[key] for key in keys_in(name, known)), None)


def keys_in(name: str, known: Iterable[str]) -> list[str]:
    """The keys whose words a name has, one after another."""
    words = words_of(name)
    return [key for key in known if _has(words, words_of(key))]


def _has(words: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    places = range(len(words) - len(wanted) + 1)
    return any(words[place : place + len(wanted)] == wanted for place in places)


# Models that tables of runs name without their sizes: of the catalogue, or near to one of it.
#
# Hybrid models are taken whole from the catalogue, because no columns say which of their blocks is
# of which kind. Models whose attention this package does not have are taken with another's
# attention, and a note says so. All sizes are those of released configurations.


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


# The parts of a measured run's model beyond a plain transformer's: experts, latent attention,
# windows.
#
# A row says how many experts there are and how many a token takes; the rest follows from the
# model's name, by the models of the catalogue that are built alike, and from these phrases of the
# column ``notes``: "shared expert ffn N", "N dense layer", "moe-shared-expert-intermediate-
# size=N", "moe-layer-freq=([0]*N", "multi-latent-attention=1", "kv-channels=N", "mtp-num-layers=N"
# and "w/ MTP".


# Words of a model's name, one after another, and the model of the catalogue that is built alike;
# the first match counts.
ALIKE_BY_WORD: Mapping[str, str] = {
    "deepseek v2 lite": "deepseek-v2-lite",
    "deepseek v2": "deepseek-v2",
    "deepseek v3 mtp": "deepseek-v3-mtp",
    "deepseek": "deepseek-v3",
    "kimi": "kimi-k2",
    "moonlight": "moonlight-16b-a3b",
    "glm 4.5 air": "glm-4.5-air",
    "glm": "glm-4.5",
    "llama 4 scout": "llama4-scout",
    "olmo": "olmo2-7b",
    "qwen 3 235b": "qwen3-235b-a22b",
    "qwen 3": "qwen3-30b-a3b",
    "gpt oss": "gpt-oss-120b",
    "mixtral": "mixtral-8x7b",
}
# Head dimension, share of rotated channels and sizes of heads that a model built alike passes on.
_STRUCTURE = ("qk_norm", "attention_gate", "sinks", "window", "latent", "biases")


def alike_of(name: str, remarks: str) -> ModelSpec | None:
    """The model of the catalogue that is built like a model of this name, with these remarks."""
    own = first_named(name, ALIKE_BY_WORD)
    if own is None and "multi-latent-attention=1" in remarks:
        own = "deepseek-v3"
    return None if own is None else catalog.model(own)


def parts_of(
    cells: Mapping[str, str], remarks: str, alike: ModelSpec | None, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The fields of the model's description that differ from a plain transformer's.

    ``sizes`` are those of the row, whose ``ffn`` is the experts' if there are experts.
    """
    found: dict[str, Any] = {}
    if alike is not None:
        found |= {name: getattr(alike, name) for name in _STRUCTURE}
        found["head_dim"] = alike.head_dim
        found["rotary_fraction"] = alike.rotary_fraction
        found["position_embedding"] = alike.position_embedding
        if alike.latent is not None:
            found["kv_heads"] = sizes["heads"]
    if (count_of(cells, "experts") or 1) > 1:
        own = None if alike is None else alike.experts
        found["experts"] = experts_of_row(cells, remarks, own, sizes)
        # The row's width is that of experts; dense blocks are as much wider as published.
        wider = 1.0 if alike is None or own is None else alike.ffn / own.ffn
        found["ffn"] = round(sizes["ffn"] * wider)
    of_alike = 0 if alike is None else alike.further_tokens
    if tokens := further_tokens_in(remarks) or of_alike:
        found["further_tokens"] = tokens
    return found


def further_tokens_in(remarks: str) -> int:
    """How many tokens after the next remarks say that a model predicts ("mtp-num-layers=N", or
    "w/ MTP" for one)."""
    words = remarks.casefold()
    return _number_in(r"mtp-num-layers=(\d+)", words) or int("w/ mtp" in words)


def experts_of_row(
    cells: Mapping[str, str], remarks: str, own: Experts | None, sizes: Mapping[str, int]
) -> Experts:
    """The experts of a row's blocks; what it does not say is as in another model's ``own``."""
    experts = count_of(cells, "experts") or (1 if own is None else own.count)
    active = count_of(cells, "topk")
    if active is None:
        refuse("topk", f"is empty: give how many of {experts} experts a token takes")
    if active > experts:
        refuse("topk", f"{active} is more than experts {experts}: correct one of them")
    shared = _number_in(r"shared expert ffn (\d+)", remarks)
    if shared is None:
        shared = _number_in(r"moe-shared-expert-intermediate-size=(\d+)", remarks)
    if shared is None:
        shared = 0 if own is None else own.shared_ffn * sizes["ffn"] // own.ffn
    dense = _number_in(r"(\d+) dense layer", remarks)
    if dense is None:
        dense = _number_in(r"moe-layer-freq=\(\[0\]\*(\d+)", remarks)
    if dense is None:
        dense = 0 if own is None else own.dense_blocks
    plain = Experts(count=experts, active=active, ffn=sizes["ffn"])
    return replace(plain, shared_ffn=shared, dense_blocks=min(dense, sizes["layers"] - 1))


def _number_in(pattern: str, remarks: str) -> int | None:
    found = re.search(pattern, remarks)
    return int(found[1]) if found else None
