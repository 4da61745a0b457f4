"""Factors that bounds over boxes take: no greater work beside other streams, or beside a send,
undercuts them."""

import numpy as np
import pytest
from numpy.typing import NDArray

from mistlab.core.arrays import Floats
from mistlab.cost.beside_sends import BesideSend
from mistlab.cost.side_by_side import SlowedBy, lowered, overlapped, raised
from mistlab.cost.slot_work import endless


def random_factors(seed: int) -> Floats:
    """Factors by the set of busy streams; more streams may slow a stream less."""
    draw = np.random.default_rng(seed)
    table = draw.uniform(1, 4, (16, 4))
    table[[0, 1, 2, 4, 8]] = 1.0
    return table


def works(seed: int, rows: int = 400) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Work on streams (C, 4), and greater work on the same streams."""
    draw = np.random.default_rng(seed)
    less = draw.exponential(1.0, (rows, 4)) * (draw.random((rows, 4)) < 0.7)
    return less, less * (1 + draw.exponential(0.3, (rows, 4)) * (draw.random((rows, 4)) < 0.5))


@pytest.mark.parametrize("seed", range(10))
def test_no_greater_work_undercuts_lowered_factors(seed: int) -> None:
    factors = random_factors(seed)
    less, more = works(seed)
    for awaited in (("compute", "gpu_to_gpu", "host_to_device", "device_to_host"), ("compute",)):
        true = overlapped(more, factors, awaited)
        assert (overlapped(less, lowered(factors), awaited) <= true * (1 + 1e-12)).all()
    # Without lowering, more work would sometimes take less time.
    assert (overlapped(less, factors) > overlapped(more, factors) * (1 + 1e-3)).any()


def beside_endless(
    alone: NDArray[np.float64], factors: Floats
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return endless(np.ascontiguousarray(alone.T), SlowedBy.of_all(factors, len(alone)))


@pytest.mark.parametrize("seed", range(10))
def test_no_greater_work_ends_before_lesser_beside_a_send_without_an_end(seed: int) -> None:
    factors = random_factors(seed)
    less, more = works(seed)
    (least_s, least_done), (true_s, done) = (
        beside_endless(work, kept) for work, kept in ((less, lowered(factors)), (more, factors))
    )
    assert (least_s <= true_s * (1 + 1e-12)).all()
    # Sends are no less late either.
    assert (least_s - least_done <= (true_s - done) * (1 + 1e-12) + 1e-12).all()
    true_s, most_s = (
        beside_endless(work, kept)[0] for work, kept in ((less, factors), (more, raised(factors)))
    )
    assert (true_s <= most_s * (1 + 1e-12)).all()
    # Without raising, lesser work would sometimes take longer.
    assert (true_s > beside_endless(more, factors)[0] * (1 + 1e-3)).any()


def drawn_box(draw: np.random.Generator, rows: int) -> tuple[BesideSend, BesideSend]:
    """Passes inside random boxes, and their bounds."""
    # At each end of the recomputed blocks: usual times, those beside an endless send, and how much
    # later the send is then.
    usual_s = draw.uniform(0.1, 1, (2, rows))
    elapsed_s = usual_s * draw.uniform(1, 4, (2, rows))
    late_s = elapsed_s * draw.uniform(0, 0.95, (2, rows))
    computed_s = usual_s * draw.uniform(0, 1, (2, rows))
    between, has_copies = draw.random(rows), draw.random(rows) < 0.5
    higher = draw.exponential(0.3, (4, rows)) * (draw.random((4, rows)) < 0.5) * has_copies
    usual, elapsed, late, computed = (
        (1 - between) * least + between * most + more
        for (least, most), more in zip(
            (usual_s, elapsed_s, late_s, computed_s), higher, strict=True
        )
    )
    elapsed = np.maximum(elapsed, np.maximum(usual, late * 1.01))
    hides = draw.random(rows) < 0.5
    ends = [
        beside(*of_end, hides)
        for of_end in zip(usual_s, elapsed_s, late_s, computed_s, strict=True)
    ]
    box = BesideSend.of_box(ends, np.where(has_copies, elapsed, 0.0))
    return beside(usual, elapsed, late, computed, hides), box


@pytest.mark.parametrize("seed", range(3))
def test_no_pass_of_a_box_loses_less_beside_sends_than_its_bound(seed: int) -> None:
    draw, rows = np.random.default_rng(seed), 2000
    inside, box = drawn_box(draw, rows)
    sends = draw.uniform(0, 2, rows)
    bound_s = box.usual_s + box.lost_s(sends)
    assert (bound_s <= (inside.usual_s + inside.lost_s(sends)) * (1 + 1e-9)).all()
    assert (box.later_s(sends) <= inside.later_s(sends) * (1 + 1e-9)).all()
    # Nor is the whole of the last pass longer, which may take longer than others.
    more_s = draw.uniform(0, 0.5, rows)
    last_s = box.usual_s + more_s + draw.exponential(0.1, rows)
    least_s = box.usual_s + more_s + box.if_usually_longer(more_s).lost_s(sends)
    true_s = np.maximum(inside.usual_s, last_s) + inside.lost_s(sends)
    assert (least_s <= true_s * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", range(3))
def test_no_turn_and_pass_of_a_box_lose_less_beside_a_send_than_their_bound(seed: int) -> None:
    draw, rows = np.random.default_rng(seed), 2000
    turns, passes = drawn_box(draw, rows), drawn_box(draw, rows)
    sends = draw.uniform(0, 3, rows)
    true_s, bound_s = (
        turn.usual_s + one.usual_s + turn.lost_s(sends) + one.lost_s(turn.left_s(sends))
        for turn, one in zip(turns, passes, strict=True)
    )
    assert (bound_s <= true_s * (1 + 1e-9)).all()


def beside(
    usual_s: NDArray[np.float64],
    elapsed_s: NDArray[np.float64],
    late_s: NDArray[np.float64],
    computed_s: NDArray[np.float64],
    hides: NDArray[np.bool_],
) -> BesideSend:
    """Passes that take so long beside an endless send, which is so late then; their arithmetic
    alone takes ``computed_s``, and where copies hide it, nothing makes them any longer.
    """
    longer_s = elapsed_s - usual_s
    most_longer_s = np.where(hides, longer_s, np.inf)
    computing = computed_s * 0.5, computed_s * 1.2
    return BesideSend(usual_s, *computing, longer_s, elapsed_s - late_s, late_s, most_longer_s)
