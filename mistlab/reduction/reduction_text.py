"""Reads a gradient reduction from a command line: its kind, then after a colon its fields, such as
``local:every=8``.
"""

from dataclasses import fields
from typing import Any

import yaml

from mistlab.core.values import from_mapping, near_matches, refuse, within
from mistlab.reduction.compression import Compressor
from mistlab.reduction.reduction_costs import REDUCTION_KINDS, Reduction

OF_COMPRESSORS = tuple(entry.name for entry in fields(Compressor) if entry.name != "kind")

# Fields whose value is several numbers, separated by plus signs.
LISTS = ("offsets", "liars")


def reduction_named(text: str) -> Reduction:
    """The gradient reduction that a text such as ``local:every=8`` describes; it may give fields of
    the compressor, too.

    >>> reduction_named("local:every=8").every
    8
    >>> reduction_named("all_reduce:compressor=top_k,share=0.01,feedback=memory").compressor.share
    0.01
    >>> reduction_named("gossip:offsets=1+4").offsets
    (1, 4)
    """
    kind, _, rest = text.partition(":")
    if kind not in REDUCTION_KINDS:
        refuse("reduction", f"{kind!r} is unknown{near_matches(kind, REDUCTION_KINDS)}")
    plain: dict[str, Any] = {"kind": kind}
    compressor: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            refuse("reduction", f"{part!r} has no value: give keys with values, such as every=8")
        if key == "compressor":
            compressor["kind"] = value
        elif key in OF_COMPRESSORS:
            compressor[key] = yaml.safe_load(value)
        elif key in LISTS:
            plain[key] = [yaml.safe_load(one) for one in value.split("+")]
        else:
            plain[key] = yaml.safe_load(value)
    if compressor:
        plain["compressor"] = compressor
    with within("reduction"):
        return from_mapping(Reduction, plain)
