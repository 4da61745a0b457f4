"""Reads the model that a Hugging Face ``config.json`` describes, without torch or a download.

Types whose blocks a ``ModelSpec`` describes, or nearly so, are read by the rows of a table
(``mistlab.huggingface.type_keys``). What a description has otherwise than the model is among its
remarks. Other types are refused by name, and can be traced.
"""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from mistlab.core.values import near_matches, refuse, shown
from mistlab.huggingface.block_parts import UNLIKE, Fields, experts_of, latent_of, window_of
from mistlab.huggingface.type_keys import TypeKeys, TypeRow, model_types, refused_types
from mistlab.plan.workload import ModelSpec

# The key that every config.json has, and no file of tracing.
KIND = "model_type"
TEXT = "text_config"
TRACE = "trace it (python -m experiments.trace), or write its mapping (docs/reference/plan-file.md)"

# What configurations call activations, and the description's names of them; the others are one
# kernel each too.
ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"), "gelu_tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **{name: name for name in ("relu2", "relu", "quick_gelu", "xielu")},
}
# The activation of networks without a gate, and the positions, of each family.
_OF_FAMILY = {"gpt": "gelu_tanh", "falcon": "gelu_tanh", "nemotron": "relu2"}
_POSITIONS = {"gpt": "absolute", "llama": "rotary", "falcon": "rotary", "nemotron": "none"}


def model_of_config(config: Mapping[str, Any], name: str, part: str = "") -> ModelSpec:
    """The model of a configuration's content, or of the ``part`` of it that describes text."""
    if part:
        return model_of_config(_text_part(config, part), name)
    keys = TypeKeys(row=_row_of(config), config=config)
    _check_required(keys)
    fields, remarks = _fields(keys)
    given = {key: value for key, value in fields.items() if value is not None}
    return ModelSpec.from_mapping({"name": name, **given, "remarks": [*dict.fromkeys(remarks)]})


def _text_part(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    inner = config.get(part)
    if part != TEXT or not isinstance(inner, Mapping):
        refuse(part, f"the file has no such part: name the file alone, or #{TEXT} of one that has")
    if KIND not in inner:
        refuse(f"{part}.{KIND}", "missing: give the type of the text's model")
    return inner


def _row_of(config: Mapping[str, Any]) -> TypeRow:
    """The row of a configuration's type; refuses types without one."""
    kind = config[KIND]
    if isinstance(config.get(TEXT), Mapping):
        inner = config[TEXT].get(KIND)
        problem = f"{shown(kind)} takes more than text, and its {TEXT} is a {inner or 'model'}"
        refuse(KIND, f"{problem}: name the file with #{TEXT} to take text alone, or {TRACE}")
    if not isinstance(kind, str) or kind not in model_types():
        _refuse_type(kind)
    return model_types()[kind]


def _refuse_type(kind: object) -> NoReturn:
    """Refuse a type without a row: by its reason, or with names that are near to its own."""
    if isinstance(kind, str) and (reason := refused_types().get(kind)):
        refuse(KIND, f"{shown(kind)} is not read here, because it {reason}: {TRACE}")
    near = near_matches(kind, model_types())
    meant = f" ({near.removeprefix(': ')})" if "did you mean" in near else ""
    problem = f"{shown(kind)} is not read here{meant}, {len(model_types())} types are"
    refuse(KIND, f"{problem} (docs/reference/model-types.md): {TRACE}")


def _check_required(keys: TypeKeys) -> None:
    """Refuse a file whose keys say what no row describes."""
    for key, value in keys.row.requires.items():
        given = keys.get(key)
        if given is not None and (given != value or isinstance(given, bool) != (value is False)):
            problem = f"{shown(given)} is not read here, only {shown(value)} is"
            refuse(keys.name(key), f"{problem}: {TRACE}")
    for key, other in keys.row.equal.items():
        given = keys.whole(key)
        if given is not None and given != keys.needed(other):
            problem = f"{given} is not {other} {keys.needed(other)}, which is not read here"
            refuse(keys.name(key), f"{problem}: {TRACE}")


def _fields(keys: TypeKeys) -> tuple[Fields, list[str]]:
    """The fields of a model's description, and its remarks."""
    row, remarks = keys.row, [*keys.row.remarks]
    fields: Fields = {**_family(keys), **_sizes(keys)}
    fields["activation"], remark = _activation(keys, fields)
    remarks += [remark, *_left_out(keys)]
    pairs = (("qk_norm", row.qk_norm), ("post_norms", row.post_norms))
    fields |= {name: keys.flag(key) for name, key in pairs if key}
    if row.biases:
        fields["biases"] = all(map(keys.flag, row.biases))
    fields |= _parts(keys)
    if row.window:
        fields["window"], remark = window_of(keys)
        remarks.append(remark)
    return {**fields, **_rotation(keys, fields)}, [remark for remark in remarks if remark]


def _family(keys: TypeKeys) -> Fields:
    """The fields that all models of the type have, or all whose switches are on."""
    switched = [own for key, own in keys.row.when.items() if keys.flag(key)]
    return dict(ChainMap(*map(dict, reversed(switched)), dict(keys.row.model)))


def _parts(keys: TypeKeys) -> Fields:
    """The fields of latent attention, experts and unlike blocks."""
    row = keys.row
    latent = latent_of(keys) if row.latent else {}
    if row.turns:
        return {**latent, **UNLIKE[row.turns](keys)}
    return {**latent, **experts_of(keys)} if row.experts else latent


def _sizes(keys: TypeKeys) -> Fields:
    """The sizes that nearly all models have; None for those that follow from others."""
    row, hidden = keys.row, keys.needed("hidden_size")
    ffn = keys.whole(row.ffn)
    return {
        "hidden": hidden,
        "layers": keys.whole("num_hidden_layers"),
        "heads": keys.needed("num_attention_heads"),
        "kv_heads": _kv_heads(keys),
        "head_dim": keys.whole("head_dim"),
        "ffn": keys.needed(row.ffn_times) * hidden if row.ffn_times else ffn,
        "vocab": keys.needed("vocab_size"),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def _kv_heads(keys: TypeKeys) -> int | None:
    """The heads of keys and values; None for as many as there are heads."""
    row = keys.row
    if not row.shared_heads or (row.unless and keys.flag(row.unless)):
        return keys.whole("num_key_value_heads")
    return 1 if keys.flag(row.shared_heads) else None


def _activation(keys: TypeKeys, fields: Fields) -> tuple[str | None, str]:
    """The activation of the network, None for the family's; and a remark where another's is taken,
    which runs as many kernels on as many numbers."""
    if not keys.has("hidden_act"):
        return None, ""
    name = keys.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        problem = f"{shown(name)} is unknown: give one of {', '.join(ACTIVATIONS)}"
        refuse(keys.name("hidden_act"), f"{problem}, or {TRACE}")
    known = ACTIVATIONS[name]
    is_gated = fields.get("mlp_type", "") == "gated_mlp" or fields["family"] == "llama"
    taken = "silu" if is_gated else _OF_FAMILY[fields["family"]]
    if known == taken or (known == "gelu" and taken == "gelu_tanh"):
        return known, ""
    return taken, f"activation {name} is taken as {taken}"


def _left_out(keys: TypeKeys) -> Iterator[str]:
    """Remarks on what a file turns on and a description does not have."""
    row = keys.row
    yield from (text for key, text in row.lacking.items() if keys.flag(key))
    switched = {key: keys.flag(key) for key in (*row.biases, *row.part_biases)}
    if not row.biases or not all(map(keys.flag, row.biases)):
        on = [key for key, is_on in switched.items() if is_on]
        yield from (f"biases that {keys.name(key)} turns on are left out" for key in on)
    if row.later and keys.whole(row.later, minimum=0):
        yield "blocks for tokens after the next are left out"


def _rotation(keys: TypeKeys, fields: Fields) -> Fields:
    """The fields of rotary embedding, where positions are rotated."""
    position = fields.get("position_embedding", _POSITIONS[fields["family"]])
    if position != "rotary":
        return {}
    base = {"rotary_base": keys.rotary("rope_theta")}
    if "latent" in fields:
        return base
    channels = fields["head_dim"] or fields["hidden"] // fields["heads"]
    if (rotated := keys.whole("rotary_dim")) is not None:
        return {**base, "rotary_fraction": _fraction(keys, "rotary_dim", rotated, channels)}
    share = keys.rotary("partial_rotary_factor")
    if share is None:
        return base
    if math.isclose(share * channels, round(share * channels)) and share <= 1:
        _fraction(keys, "partial_rotary_factor", round(share * channels), channels)
        return {**base, "rotary_fraction": share}
    rotated = int(share * channels)
    return {**base, "rotary_fraction": _fraction(keys, "partial_rotary_factor", rotated, channels)}


def _fraction(keys: TypeKeys, key: str, rotated: int, channels: int) -> float:
    """The share of a head's channels that are rotated; refuses channels that do not pair up."""
    if not 0 < rotated <= channels or rotated % 2:
        problem = f"rotates {rotated} of {channels} channels of a head, which do not pair up"
        refuse(keys.name(key), f"{problem}: give what makes an even number of them")
    return round(rotated / channels, 12)
