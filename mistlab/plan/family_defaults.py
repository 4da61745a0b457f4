"""The default fields of a model's description, for each model family (such as Llama or GPT)."""

from collections.abc import Mapping
from typing import Any

_GPT: Mapping[str, Any] = {
    "mlp_type": "mlp",
    "vocab": 50304,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "parallel_block": False,
    "position_embedding": "absolute",
    "tied_embeddings": False,
    "biases": False,
    "dropout": 0.0,
}
_LLAMA = {
    **_GPT,
    "mlp_type": "gated_mlp",
    "norm": "rmsnorm",
    "activation": "silu",
    "position_embedding": "rotary",
}
_FALCON = {**_GPT, "position_embedding": "rotary", "parallel_block": True}
_BERT = {**_GPT, "vocab": 30522, "activation": "gelu", "tied_embeddings": True, "biases": True}
_NEMOTRON = {**_GPT, "norm": "rmsnorm", "activation": "relu2", "position_embedding": "none"}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "nemotron": _NEMOTRON,
    "gpt": _GPT,
    "llama": _LLAMA,
    "falcon": _FALCON,
    "bert": _BERT,
    "custom": _GPT,
}
