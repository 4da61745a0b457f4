"""Builds causal language models of Hugging Face's transformers without memory, to trace them and to
check configurations and parameter counts.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mistlab.core.values import InputError, reject
from runtime.tracing.own_model import Factory

logging.set_verbosity(logging.CRITICAL)


def causal_types() -> tuple[str, ...]:
    """The model types for which transformers has a causal language model, in alphabetical order."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def configuration(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the ``config.json`` that transformers writes for these keys, with all
    defaults.
    """
    return dict(json.loads(json.dumps(_made(kind, given).to_dict(), default=str)))


def parameters(kind: str, given: Mapping[str, Any]) -> int:
    """The number of parameters of the model that transformers builds from these keys."""
    made = _made(kind, given)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # any error: the code of some two hundred models runs here
        raise _unbuilt(kind, error) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _made(kind: str, given: Mapping[str, Any]) -> Any:
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(given))
    except Exception as error:  # any error: the code of some two hundred configurations runs here
        raise _unbuilt(kind, error) from error


def _unbuilt(kind: str, error: Exception) -> InputError:
    reason = str(error).strip().partition("\n")[0]
    return InputError(
        f"model_type {kind}: transformers refuses the configuration ({type(error).__name__}: "
        f"{reason}): correct the config.json"
    )


# Makes functions that build Hugging Face models from a ``config.json``; nothing is downloaded.


# The name of each attention implementation in transformers.
IMPLEMENTATIONS: Mapping[str, str] = {"flash": "sdpa", "math": "eager"}


def factory_from(content: Mapping[str, Any], where: Path, attention: str) -> Factory:
    """A function that builds the causal language model of a ``config.json``."""
    config = _config(content, where)
    implementation = IMPLEMENTATIONS[attention]

    def factory() -> nn.Module:
        # Training generates no text, so no key-value cache is needed.
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=torch.get_default_dtype()
        )
        return model

    return factory


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Within the ``with`` block, transformers treats each row of tokens as a single sequence. In
    training each row is one sequence, which transformers detects from the values of positions. Fake
    tensors have no values, so transformers would write out a mask, which a real training step does
    not.
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
        reject(
            f"{where}: model_type {kind!r} is not one that transformers knows: give one such as "
            f"{', '.join(near)}"
        )
    return CONFIG_MAPPING[kind].from_dict(dict(content))
