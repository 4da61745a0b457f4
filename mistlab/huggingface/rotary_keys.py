"""Reads from a ``config.json`` how a rotary embedding is scaled, and how many channels it
rotates.
"""

import math
from collections.abc import Mapping
from typing import Any

from mistlab.core.values import refuse
from mistlab.huggingface.context_lengths import ORIGINAL
from mistlab.huggingface.type_keys import UNSCALED, TypeKeys, scaling_kind
from mistlab.plan.rotary import yarn_amplitude

Fields = dict[str, Any]

# The keys of the parameters of each type of rotary scaling in a ``config.json``.
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {},
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"},
    "yarn": {"low": "beta_slow", "high": "beta_fast", "truncates": "truncate"},
    "dynamic": {},
    "longrope": {"short": "short_factor", "long": "long_factor"},
}
_YARN: Fields = {"low": 1.0, "high": 32.0}


def scaling_of(keys: TypeKeys, *, is_latent: bool) -> Fields | None:
    """Read the scaling of a model's rotary embedding, or None if it is not scaled."""
    scaling = keys.scaling
    kind = scaling_kind(scaling)
    if kind == UNSCALED:
        return None
    if kind not in SCALINGS:
        return {"kind": "other", "factor": 1.0}
    fields: Fields = {"kind": kind, **(_YARN if kind == "yarn" else {})}
    names = {"factor": "factor", "positions": ORIGINAL, **SCALINGS[kind]}
    fields |= {name: scaling[key] for name, key in names.items() if scaling.get(key) is not None}
    if kind == "linear":
        return fields
    longest = keys.whole("max_position_embeddings")
    if kind == "dynamic":
        return fields if longest is None else {**fields, "positions": longest}
    if (positions := keys.whole(ORIGINAL) or longest) is not None:
        fields.setdefault("positions", positions)
    if kind == "yarn":
        if "factor" not in fields and longest is not None and "positions" in fields:
            fields["factor"] = longest / fields["positions"]
        fields |= _steepness(scaling, fields.get("factor", 1.0), is_latent=is_latent)
    if kind == "longrope":
        fields |= _longrope(keys)
    return fields


def _longrope(keys: TypeKeys) -> Fields:
    """Return the factor by which LongRoPE extends the context, and its scale of attention scores,
    from the configuration or by default.
    """
    positions, longest = keys.rotary(ORIGINAL), keys.whole("max_position_embeddings")
    factor, amplitude = keys.rotary("factor"), keys.rotary("attention_factor")
    if factor is None:
        factor = longest / positions if longest and positions else 1.0
    if amplitude is None:
        amplitude = 1.0
        if factor > 1 and positions is not None and positions > 1:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(positions))
    return {"factor": factor, "amplitude": amplitude}


def _steepness(scaling: Mapping[str, Any], factor: float, *, is_latent: bool) -> Fields:
    """Return the two factors by which YaRN scales attention: that of rotated queries and keys, and
    that of attention scores.
    """
    times, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        amplitude = yarn_amplitude(factor)
        if times and of_all:
            amplitude = yarn_amplitude(factor, times) / yarn_amplitude(factor, of_all)
    scores = yarn_amplitude(factor, of_all) ** 2 if of_all and is_latent else 1.0
    return {"amplitude": amplitude, "score_factor": scores}


def rotated_share(keys: TypeKeys, key: str, rotated: int, channels: int) -> float:
    """Return the share of a head's channels that rotary embedding rotates; refuses a share that
    gives an odd number of channels.
    """
    if not 0 < rotated <= channels or rotated % 2:
        refuse(
            keys.name(key),
            f"would rotate {rotated} of a head's {channels} channels: give a value that rotates "
            f"an even number of them, at most {channels}",
        )
    return round(rotated / channels, 12)
