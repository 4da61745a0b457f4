"""Reads the YAML of Megatron-LM's ``--yaml-cfg``: fields of Megatron-core, in two sections.

Left-out fields take the options' defaults (megatron/training/yaml_arguments.py).
"""

from collections.abc import Mapping
from typing import Any

from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.interpolation import resolved
from mistlab.shell.source import Source

_SECTIONS = ("language_model", "model_parallel")
_ACTIVATIONS = {"swiglu": "--swiglu", "squaredrelu": "--squared-relu"}
# Fields of other names than their options', or of none.
_OWN = (
    "activation_func gated_linear_unit params_dtype perform_initialization init_method timers "
    "output_layer_init_method layernorm_zero_centered_gamma bias_activation_fusion "
    "memory_efficient_layer_norm clone_scatter_output_in_embedding moe_token_dropping spec "
    "tp_comm_split_ag tp_comm_split_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_atomic_ag"
)


def recognises(source: Source) -> bool:
    """Whether a file has both sections."""
    settings = settings_of(source)
    return all(isinstance(settings.get(name), Mapping) for name in _SECTIONS)


def read(source: Source, given: Given) -> Imported:
    """The job of a file's fields."""
    settings = resolved(settings_of(source), source.settings)
    flags = Flags(where="language_model")
    _put({key: value for key, value in settings.items() if key not in _SECTIONS}, flags, "")
    for name in _SECTIONS:
        _put(settings[name], flags, f"{name}.")
    model = settings["language_model"]
    kind = str(model.get("activation_func", "gelu")).lower()
    if kind in _ACTIVATIONS or (kind == "silu" and model.get("gated_linear_unit")):
        flags.options[_ACTIVATIONS.get(kind, "--swiglu")] = None
    elif kind != "gelu":
        flags.remark("language_model.activation_func", f"{kind}: taken as gelu")
    if model.get("num_query_groups"):
        flags.put("group_query_attention", True)
    return flags.read(given)


def _put(section: Mapping[str, Any], flags: Flags, where: str) -> None:
    own = _OWN.split()
    for key, value in section.items():
        if key not in own and not isinstance(value, Mapping):
            flags.put(str(key), value, f"{where}{key}")
