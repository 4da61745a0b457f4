"""The mask of sizes that divide, against plain remainders."""

from collections.abc import Mapping, Sequence

import numpy as np

from mistlab.graph.library import divides, graph_of, holds, remainders
from mistlab.plan.workload import Attention
from tests.workloads import workload_of

LLAMA = {"h": 4096, "n": 32, "k": 8, "d": 128, "r": 128, "f": 14336, "V": 128256, "s": 2048}


def feasible(attention: Attention, sizes: Mapping[str, int], degrees: Sequence[int]) -> list[bool]:
    work = workload_of("llama3-8b", 2048, 8, "bf16", attention=attention)
    columns = {name: np.full(len(degrees), size) for name, size in sizes.items()}
    columns["tp"] = np.array(degrees)
    of_graph = remainders(graph_of(work).counts.conditions, tuple(columns))
    return [bool(one) for one in divides(of_graph, columns)]


def test_a_row_is_feasible_where_every_size_divides() -> None:
    degrees = [1, 2, 3, 4, 5, 6, 7, 8, 16]

    mask = feasible("flash", LLAMA, degrees)

    split = [LLAMA[name] for name in ("f", "V", "k")]
    assert mask == [all(size % degree == 0 for size in split) for degree in degrees]
    assert mask == [True, True, False, True, False, False, False, True, False]


def test_a_model_whose_key_heads_do_not_divide_its_heads_is_never_feasible() -> None:
    assert feasible("math", LLAMA | {"n": 30}, [1, 2]) == [False, False]


def test_a_row_is_feasible_where_every_assumption_holds() -> None:
    columns = {"b": np.array([1, 2, 4]), "tp": np.array([1, 2, 2]), "s": np.full(3, 1024)}
    mask = holds(["b*s < 4096", "Ne(b, tp)"], columns)
    assert mask.tolist() == [False, False, False]
    assert holds(["b*s <= 4096"], columns).all()
    assert holds(["Ne(b, tp)"], columns).tolist() == [False, False, True]
