"""Hugging Face's causal language models without memory: their configurations' defaults, and their
parameters, counted on torch's meta device."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mistlab.values.errors import InputError

logging.set_verbosity(logging.CRITICAL)


def causal_types() -> tuple[str, ...]:
    """The model types that the library has a causal language model for, in alphabetical order."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def configuration(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the config.json that the library writes for these keys: with all defaults."""
    return dict(json.loads(json.dumps(_made(kind, given).to_dict(), default=str)))


def parameters(kind: str, given: Mapping[str, Any]) -> int:
    """The number of parameters of the model that the library builds for these keys."""
    made = _made(kind, given)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # any: the code of some two hundred models runs here
        raise _unbuilt(kind, error) from error
    return sum(parameter.numel() for parameter in model.parameters())


def class_defaults(kind: str) -> dict[str, Any]:
    """The defaults of a configuration class's own fields, and its ``attribute_map``: other names of
    fields."""
    fields = dataclasses.fields(CONFIG_MAPPING[kind])
    own = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    return {**own, "attribute_map": dict(CONFIG_MAPPING[kind].attribute_map)}


def _made(kind: str, given: Mapping[str, Any]) -> Any:
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(given))
    except Exception as error:  # any, as above
        raise _unbuilt(kind, error) from error


def _unbuilt(kind: str, error: Exception) -> InputError:
    reason = str(error).strip().partition("\n")[0]
    return InputError(f"{kind}: transformers raised {type(error).__name__}: {reason}")
