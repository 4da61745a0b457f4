"""Defines the symbols of layer graphs and stages (such as b and tp), their values, and which layer
graph a stage's choices select.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Column, Floats, Ints
from mistlab.graph.compiled import Compiled
from mistlab.graph.sums import sympy
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.lean_sets import ALL, CHOICE
from mistlab.plan.workload import Workload
from mistlab.schedule.context_ways import RING

# Defines the symbols in the expressions of layer graphs and of stages, one or two letters each.
# Sizes are those of the whole model; a rank's part is divided by ``tp``.


# The meanings of the symbols of sizes that are the same for all plans of a workload.
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
    "x": "adapter_rank",
}


def sizes_of_candidates() -> Mapping[str, str]:
    """The symbols of sizes that a plan chooses, such as b for ``micro_batch``."""
    return {row.symbol: name for name, row in DIMENSIONS.items() if row.is_size}


def layer_columns() -> Mapping[str, str]:
    """The symbols of a plan's choices that change the operations and bytes of a layer: sizes, and
    choices between layer graphs.
    """
    return {
        row.symbol: name for name, row in DIMENSIONS.items() if row.is_size or row.chooses_graph
    }


def size_names() -> tuple[str, ...]:
    """The symbols of all sizes, those that the workload fixes and those that a plan chooses."""
    return (*sizes_of_candidates(), *WORKLOAD_SIZES)


def size_symbol(name: str) -> "sympy.Symbol":
    """The SymPy symbol of a size, which is a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def choice_symbol(name: str) -> "sympy.Symbol":
    """The SymPy symbol of a plan's choice, such as a ZeRO level or an offload ratio, which is a
    non-negative number.
    """
    return sympy.Symbol(name, nonnegative=True)


# Computes the values of a layer graph's symbols from a workload and columns of candidates.


def constants_of(workload: Workload) -> Mapping[str, float]:
    """The values of the sizes that are the same for all plans of a workload."""
    model = workload.model
    return {
        **_sizes_of_parts(workload),
        "s": workload.sequence_length,
        "h": model.hidden,
        "n": model.heads,
        "k": model.kv_heads,
        "d": model.head_dim,
        "r": model.rotated_channels,
        "f": model.ffn,
        "x": workload.rank,
    }


def _sizes_of_parts(workload: Workload) -> Mapping[str, float]:
    """The sizes of a model's optional parts (experts, latent attention, ...); 1 where the model has
    no such part.
    """
    model = workload.model
    window, latent, experts, scan = model.window, model.latent, model.experts, model.state_space
    sizes = dict.fromkeys("wumvEaAjylqpge", 1.0)
    if window is not None:
        sizes["w"] = min(window.size, workload.sequence_length)
    if latent is not None:
        sizes |= {"u": latent.query_rank or 1, "m": latent.key_rank, "v": latent.value_dim}
    if experts is not None:
        mean, busiest = workload.expert_load
        sizes |= {"a": experts.active * mean, "A": experts.active * busiest}
        sizes |= {"E": experts.count, "j": experts.ffn, "y": experts.shared_ffn or 1}
        sizes |= {"l": experts.hidden or 1}
    if scan is not None:
        sizes |= {"q": scan.heads, "p": scan.channels, "g": scan.groups, "e": scan.states}
    return sizes


def size_columns(workload: Workload, sizes: Mapping[str, Column]) -> dict[str, NDArray[Any]]:
    """The values of all sizes as columns; ``sizes`` has those that candidates choose, such as b and
    tp.

    Omitted ones have the default of their dimension. Of each sequence a rank has its part: all
    tokens if there is one context-parallel rank (cp).
    """
    rows = len(sizes["tp"])
    omitted = {
        row.symbol: np.full(rows, row.default)
        for row in DIMENSIONS.values()
        if row.is_size and row.default is not None
    }
    vocab = [workload.model.padded_vocab(int(degree)) for degree in sizes["tp"]]
    ranks = sizes.get("cp", np.ones(rows))
    return {
        **{name: np.full(rows, float(size)) for name, size in constants_of(workload).items()},
        **omitted,
        **sizes,
        "s": workload.sequence_length / ranks,
        "cp": ranks,
        "V": np.array(vocab),
    }


# Evaluates expressions for candidates that use different layer graphs: with sequence parallelism,
# with another way of exchanging keys, or with lean operators.


Columns = Mapping[str, Floats]


class GraphChoice(NamedTuple):
    """The choices that select a candidate's layer graphs: sequence parallelism, how
    context-parallel ranks exchange keys, and the lean operators.
    """

    splits_tokens: bool = False
    exchange: int = RING
    lean: int = ALL


PLAIN_GRAPH = GraphChoice()


def splits_tokens(columns: Columns) -> Bools:
    """A mask of the candidates with sequence parallelism; a single tensor-parallel rank has nothing
    to split.
    """
    chosen = columns.get(DIMENSIONS["sequence_parallel"].symbol)
    if chosen is None:
        return np.zeros(len(columns["tp"]), dtype=bool)
    return np.asarray((chosen == 1) & (columns["tp"] > 1))


def exchanges_of(columns: Columns) -> Ints:
    """The way in which each candidate's context-parallel ranks exchange keys; a single rank
    exchanges none.
    """
    chosen = columns.get(DIMENSIONS["context_exchange"].symbol)
    if chosen is None:
        return np.zeros(len(columns["tp"]), dtype=np.int64)
    return np.where(columns["cp"] > 1, chosen, 0).astype(np.int64)


def _lean_of(columns: Columns) -> Ints:
    """The set of operators that are lean (keep fewer bytes) in each candidate's lean blocks."""
    chosen = columns.get(DIMENSIONS[CHOICE].symbol)
    return np.asarray(np.zeros(len(columns["tp"])) if chosen is None else chosen).astype(np.int64)


def by_graph(plain: Compiled, other: Callable[[GraphChoice], Compiled], columns: Columns) -> Floats:
    """Evaluate expressions for each candidate; ``other`` evaluates those of candidates with other
    layer graphs.

    ``other`` is called only if there are such rows, because compiling takes long.
    """
    chosen = splits_tokens(columns), exchanges_of(columns), _lean_of(columns)
    if not any(one.any() for one in chosen):
        return plain(columns)
    rows = zip(*(one.tolist() for one in chosen), strict=True)
    choices = sorted({GraphChoice(*row) for row in rows})
    if len(choices) == 1:
        return _same_names(other(choices[0]), plain)(columns)
    values = plain(columns)
    for choice in choices:
        if any(choice):
            matching = np.all(
                [one == value for one, value in zip(chosen, choice, strict=True)], axis=0
            )
            compiled = _same_names(other(choice), plain)
            values[:, matching] = compiled(
                {name: column[matching] for name, column in columns.items()}
            )
    return values


def _same_names(compiled: Compiled, plain: Compiled) -> Compiled:
    assert compiled.names == plain.names
    return compiled
