"""Searches from which one idea is taken away: a weaker part stands in its place for the time of a
search.

The answer stays the same: no idea decides what is found, only how soon it is proven.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from searchers.exact import box_menus, partials, proof
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.partials import Completions
from searchers.registry import SEARCHERS
from searchers.strategy import Ending, Ledger, NeedsStageCosts, Strategy

# A module or a class, a name in it, and what stands there instead.
Weaker = tuple[Any, str, Any]


def _nothing(*_: object, **__: object) -> None:
    return None


def _all_rows(columns: Sequence[NDArray[np.float64]]) -> NDArray[np.intp]:
    """Every candidate, whether another is at least as good or not."""
    return np.arange(len(columns[0]))


# What is put in place of each idea. Without boxes there is another search: one that tries all ways.
REMOVED: Mapping[str, Sequence[Weaker]] = {
    "nothing": (),
    "plans found before and on the way": (
        (Hierarchy, "_in_order", lambda *_, **__: ()),
        (proof._GroupProof, "_look_for_plans", _nothing),
    ),
    "what is left of a pipeline": ((Completions, "of", _nothing),),
    "rounding of partial pipelines": ((proof, "GRAIN", 0.0),),
    "dominance between candidates": ((box_menus, "undominated", _all_rows),),
    "dominance between partial pipelines": ((partials, "undominated", _all_rows),),
}
BOXES = "boxes of ratios"
IDEAS = (*REMOVED, BOXES)


@contextmanager
def without(idea: str) -> Iterator[Strategy]:
    """The strategy without an idea, as long as the block lasts."""
    if idea == BOXES:
        yield SEARCHERS["exact"]
        return
    with ExitStack() as stack:
        for where, name, weaker in REMOVED[idea]:
            stack.enter_context(_replaced(where, name, weaker))
        yield NeedsStageCosts(_proven)


def _proven(
    problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
) -> Ending:
    """The proof by boxes, however few ways there are to save memory."""
    return Hierarchy.of(problem, space, ledger).proven(tolerance=0.0, seconds=inf)


@contextmanager
def _replaced(where: Any, name: str, weaker: Any) -> Iterator[None]:
    """Put something in the place of a name, and take it away again."""
    own: Callable[..., Any] = vars(where)[name]
    setattr(where, name, weaker)
    try:
        yield
    finally:
        setattr(where, name, own)
