"""Slots in which weights come from the host and are then gathered, and their bounds."""

import numpy as np
import pytest

from mistlab.core.arrays import Floats
from mistlab.cost.side_by_side import SlowedBy, ends_if_gathered, least_ends_if_gathered, lowered
from mistlab.machine.slowdowns import STREAMS

CASES = 2000
COMPUTE, LINK, HOST, AWAY = range(len(STREAMS))


def some_factors(draw: np.random.Generator) -> Floats:
    """Factors from one to three of each stream in each set of busy streams."""
    factors = draw.uniform(1, 3, (16, len(STREAMS)))
    busy = (np.arange(16)[:, None] & np.array([1, 2, 4, 8])) > 0
    alone = busy.sum(axis=1, keepdims=True) == 1
    return np.where(busy & ~alone, factors, 1.0)


def test_the_link_gathers_when_the_host_has_copied() -> None:
    factors = np.ones((16, len(STREAMS)))
    factors[(1 << COMPUTE) + (1 << LINK), COMPUTE] = 2.0
    alone = np.array([[5.0], [4.0], [2.0], [0.0]])
    fetched = np.array([1.0]), np.array([3.0])
    ends = ends_if_gathered(alone, SlowedBy.of_all(factors, 1), *fetched)
    # Until one the link does its other work beside the host. Until two the host still copies, and
    # until four the link alone is beside arithmetic, which does half as much.
    assert ends[:, 0] == pytest.approx([6.0, 4.0, 2.0, 0.0])


@pytest.mark.parametrize("seed", range(5))
def test_no_greater_copies_undercut_the_least_ends(seed: int) -> None:
    draw = np.random.default_rng(seed)
    factors = some_factors(draw)
    alone = draw.exponential(1.0, (len(STREAMS), CASES))
    alone[AWAY] *= draw.integers(0, 2, CASES)
    gathered = alone[LINK] * draw.choice([1.0, 0.6], CASES)
    copied = alone[HOST] * draw.choice([1.0, 0.3], CASES)
    least = least_ends_if_gathered(
        alone, SlowedBy.of_all(lowered(factors), CASES), copied, gathered
    )
    greater = alone.copy()
    more = draw.choice([1.0, 1.01, 2.0], (2, CASES))
    greater[[HOST, AWAY]] *= more
    ends = ends_if_gathered(greater, SlowedBy.of_all(factors, CASES), copied * more[0], gathered)
    assert (least.max(axis=0) <= ends.max(axis=0) * (1 + 1e-9)).all()
    assert (least[LINK] <= ends[LINK] * (1 + 1e-9)).all()
    # The link gathers no sooner than the host has copied.
    assert (least.max(axis=0) >= (copied + gathered) * (1 - 1e-9)).all()
