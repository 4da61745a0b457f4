"""What rounds of equal stages lose, against the gaps between their passes worked out one by one."""

import numpy as np
import pytest

from mistlab.cost.beside_sends import within_round_s


def lost(slowed: float, stages: int) -> float:
    """What a round past so many stages loses, in sends."""
    low, high = 0.0, 2 / stages
    for _ in range(100):
        short = (low + high) / 2
        low, high = (low, short) if _last_gap(slowed, stages, short) > 2 else (short, high)
    return 2 - stages * low


def _last_gap(slowed: float, stages: int, short: float) -> float:
    gap = 0.0
    for stage in range(stages):
        loses = slowed * max(1 - gap, 0.0) if stage > 0 else 0.0
        gap += short + loses
        if stage + 1 < stages and gap > 1:
            # What the backward pass loses makes the next stage's gap longer.
            gap = (gap - slowed) / (1 - slowed)
    return gap


@pytest.mark.parametrize("slowed", [0.05, 0.3, 0.55, 0.95])
def test_losses_follow_from_the_gaps_between_passes(slowed: float) -> None:
    for stages in range(1, 17):
        found = within_round_s(np.array([3.0]), np.array([slowed]), np.array([stages]))
        wanted = 3.0 * (lost(slowed, stages + 1) - (lost(slowed, stages) if stages > 1 else 0.0))
        assert found == pytest.approx([wanted], abs=1e-9)


def test_nothing_is_lost_where_nothing_slows_down_or_is_sent() -> None:
    slowed, stages = np.array([0.0, 0.5]), np.array([4, 4])
    assert within_round_s(np.array([1.0, 0.0]), slowed, stages).tolist() == [0.0, 0.0]
    # What runs one after another loses both sends of a single stage, and no more.
    among = within_round_s(np.ones(4), np.ones(4), np.array([1, 2, 3, 4]))
    assert among.tolist() == [0.0, 2.0, 0.0, 0.0]
