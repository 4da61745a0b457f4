"""The mask of sizes that divide, against plain remainders."""

import numpy as np

from mistlab.symbolic.feasible import divides, holds, remainders
from mistlab.symbolic.library import Variant, shipped

LLAMA = {"h": 4096, "n": 32, "k": 8, "d": 128, "r": 128, "f": 14336, "V": 128256, "s": 2048}


def test_a_row_is_feasible_where_every_size_divides() -> None:
    graph = shipped(Variant(family="llama", attention="flash", precision="half"))
    tp = np.array([1, 2, 3, 4, 5, 6, 7, 8, 16])

    mask = divides(remainders(graph.conditions, ("tp",), LLAMA), {"tp": tp})

    split = [LLAMA[name] for name in ("f", "V", "k")]
    assert mask.tolist() == [all(size % int(degree) == 0 for size in split) for degree in tp]
    assert mask.tolist() == [True, True, False, True, False, False, False, True, False]


def test_a_model_whose_key_heads_do_not_divide_its_heads_is_never_feasible() -> None:
    graph = shipped(Variant(family="llama", attention="math", precision="half"))

    of_graph = remainders(graph.conditions, ("tp",), LLAMA | {"n": 30})
    mask = divides(of_graph, {"tp": np.array([1, 2])})

    assert mask.tolist() == [False, False]


def test_a_row_is_feasible_where_every_assumption_holds() -> None:
    columns = {"b": np.array([1, 2, 4]), "tp": np.array([1, 2, 2]), "s": np.full(3, 1024)}
    mask = holds(["b*s < 4096", "Ne(b, tp)"], columns)
    assert mask.tolist() == [False, False, False]
    assert holds(["b*s <= 4096"], columns).all()
    assert holds(["Ne(b, tp)"], columns).tolist() == [False, False, True]
