"""Random plans in every view, to see in which order the views' times are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.comparing.bench import Bench
from experiments.comparing.cases import Case
from mistlab.cost.named_views import VIEWS
from mistlab.values.plan import Plan
from mistlab.values.space import space_of
from searchers.choices import Chooser, chosen_plan

# Spaces that plans are drawn from, in turns: those of all engines.
SPACES = ("mist", "wide", "mist", "megatron", "mist", "deepspeed", "mist", "aceso")
# What may be lost to rounding.
ROUNDING = 1e-9
# Views of which the first must take at least as long as the second.
ORDER = (("serial", "full"), ("full", "ideal"))


def drawn(bench: Bench, count: int, seed: int) -> list[Plan]:
    """Random plans for a problem; whether they fit does not matter to their times."""
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    found: list[Plan] = []
    while len(found) < count:
        plan = chosen_plan(bench.problem, space_of(SPACES[len(found) % len(SPACES)]), chooser)
        found += [] if plan is None else [plan]
    return found


def ordered(case: Case, count: int, seed: int) -> dict[str, Any]:
    """The row of a case: how many plans break the order, and how far apart views are."""
    bench = Bench.of(case.problem())
    plans = drawn(bench, count, seed)
    seconds = {
        view: np.array([one.iteration_s for one in bench.seen(view).predict_many(plans)])
        for view in VIEWS
    }
    broken = {
        f"{more} < {less}": int((seconds[more] < seconds[less] * (1 - ROUNDING)).sum())
        for more, less in ORDER
    }
    return {
        "chapter": "order",
        "case": case.name,
        "plans": count,
        "broken": broken,
        "over_full": {view: _spread(seconds[view] / seconds["full"]) for view in VIEWS},
    }


def _spread(ratios: Sequence[float] | np.ndarray) -> dict[str, float]:
    least, median, most = np.quantile(ratios, [0, 0.5, 1])
    return {"least": float(least), "median": float(median), "most": float(most)}
