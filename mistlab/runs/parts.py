"""The parts of a measured run's model beyond a plain transformer's: experts, latent attention,
windows.

A row says how many experts there are and how many a token takes; the rest follows from the model's
name, by the models of the catalogue that are built alike, and from these phrases of the column
``notes``: "shared expert ffn N", "N dense layer", "moe-shared-expert-intermediate-size=N",
"moe-layer-freq=([0]*N", "multi-latent-attention=1", "kv-channels=N", "mtp-num-layers=N"
and "w/ MTP".
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mistlab import catalog
from mistlab.core.values import refuse
from mistlab.plan.workload import Experts, ModelSpec
from mistlab.runs.cells import count_of
from mistlab.runs.name_words import first_named

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
