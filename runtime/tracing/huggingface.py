"""Makes factories of Hugging Face models from a ``config.json``; nothing is downloaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils

from mistlab.values.errors import InputError
from runtime.tracing.own_model import Factory

# The library's name for each way to compute attention.
IMPLEMENTATIONS: Mapping[str, str] = {"flash": "sdpa", "math": "eager"}


def factory_from(content: Mapping[str, Any], where: Path, attention: str) -> Factory:
    """A factory of the causal language model that a config.json describes."""
    config = _config(content, where)
    implementation = IMPLEMENTATIONS[attention]

    def factory() -> nn.Module:
        # A model in training generates no text, so it keeps no keys and values for later tokens.
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=torch.get_default_dtype()
        )
        return model

    return factory


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Within the ``with`` block, let the library treat every row of tokens as one sequence.

    In training each row is one sequence, and the library finds it out from the values of positions.
    Fake tensors have no values; then the library writes out a mask, which a real step does not do.
    """
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _config(content: Mapping[str, Any], where: Path) -> Any:
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = get_close_matches(str(kind), CONFIG_MAPPING.keys()) or ["llama", "gpt2", "qwen3"]
        message = (
            f"{where}: model_type {kind!r} is not one that transformers knows: give one such as "
            f"{', '.join(near)}"
        )
        raise InputError(message)
    return CONFIG_MAPPING[kind].from_dict(dict(content))
