"""The symbols of layer graphs and of stages, one or two letters each.

Sizes are positive integers of the whole model; a rank's share is a quotient by ``tp``. A plan's
choices for a stage are columns, with the names of ``mistlab.values.dimensions``.
"""

from collections.abc import Mapping

from mistlab.symbolic.lazily import sympy
from mistlab.values.dimensions import DIMENSIONS

# Sizes of a workload, which are the same for every candidate. Sizes of a candidate are dimensions.
WORKLOAD_SIZES: Mapping[str, str] = {
    "s": "sequence_length",
    "h": "hidden",
    "n": "heads",
    "k": "kv_heads",
    "d": "head_dim",
    "r": "rotated_channels",  # of a head, by rotary embedding
    "f": "ffn",
    "V": "vocab",  # padded
    "w": "window",
    "u": "query_rank",
    "m": "key_rank",
    "v": "value_dim",
    "E": "experts",
    "a": "active",  # copies of a token that experts take, in the mean
    "A": "taken",  # copies of a token that the busiest rank's experts take
    "j": "expert_ffn",
    "y": "shared_ffn",
    "l": "expert_hidden",
    "q": "scan_heads",
    "p": "scan_channels",  # of a head
    "g": "scan_groups",
    "e": "scan_states",
}


def sizes_of_candidates() -> Mapping[str, str]:
    """The symbols of dimensions that are sizes, such as b for ``micro_batch``."""
    return {row.symbol: name for name, row in DIMENSIONS.items() if row.is_size}


def layer_columns() -> Mapping[str, str]:
    """The symbols of dimensions on which the work of single layers depends: sizes, and choices of
    another graph."""
    return {
        row.symbol: name for name, row in DIMENSIONS.items() if row.is_size or row.chooses_graph
    }


def size_names() -> tuple[str, ...]:
    """The symbols of all sizes."""
    return (*sizes_of_candidates(), *WORKLOAD_SIZES)


def size_symbol(name: str) -> "sympy.Symbol":
    """The symbol of a size: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def choice_symbol(name: str) -> "sympy.Symbol":
    """The symbol of a choice: a number that is not negative."""
    return sympy.Symbol(name, nonnegative=True)
