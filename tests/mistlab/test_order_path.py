"""Iterations as the longest path through an order, beside the formula of the one that has one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mistlab.core.arrays import Floats
from mistlab.cost.chains import ISSUED
from mistlab.cost.order_path import OrderPath, order_bound_s
from mistlab.cost.pipeline import iteration_s
from mistlab.schedule.orders import interleaved, zero_bubble
from mistlab.schedule.placement import loop
from mistlab.schedule.stage_passes import StagePasses, passes_of
from mistlab.stages.part_times import EndTimes, HostTimes, SlowedTimes, SplitTimes
from mistlab.stages.plan_orders import named_order, order_of_text
from mistlab.stages.stage_batch import StageTimes
from tests.pipeline_orders import all_forwards_first

CANDIDATES = 20


def times_of(
    forward: np.ndarray, backward: np.ndarray, *, send_s: float = 0.0, **others: np.ndarray
) -> StageTimes:
    nothing = np.zeros_like(forward)
    names = ("delta_forward_s", "delta_backward_s", "within_forward_s", "within_backward_s")
    sends = (
        "first_send_late_s",
        "end_send_late_s",
        "end_return_late_s",
        "received_s",
        "within_round_s",
    )
    waits = "round_late_s", "queued_late_s", "held_forward_s", "held_backward_s", "left_backward_s"
    nothings = dict.fromkeys((*names, "after_first_s", *sends, *waits, *ISSUED), nothing)
    return StageTimes(
        **{
            **nothings,
            "forward_s": forward,
            "backward_s": backward,
            "through_forward_s": forward,
            "through_backward_s": backward,
            "point_to_point_s": nothing + 2 * send_s,
            **others,
        }
    )


def order_iteration_s(
    times: StageTimes,
    passes: tuple[StagePasses, ...],
    split: SplitTimes | None = None,
    **others: Any,
) -> Floats:
    """Seconds (C) of one iteration in which stages run these passes, and share no networks.

    ``others`` are further fields of the path.
    """
    no_s = np.zeros_like(times.forward_s)
    usual: dict[str, Any] = {
        **dict.fromkeys(("host", "turned")),
        "at_end": EndTimes(gathers_s=no_s, reductions_s=no_s, tied_s=no_s, steps_s=no_s),
        "slowed": {},
        "steps_apart": False,
    }
    path = OrderPath(times=times, passes=passes, split=split, **{**usual, **others})
    return path.iteration_s()


def equal(parts: int, forward: float, backward: float, send_s: float = 0.0) -> StageTimes:
    one = np.ones((1, parts))
    return times_of(forward * one, backward * one, send_s=send_s)


@pytest.mark.parametrize(("spread", "short", "long"), [(0.1, 0.04, 0.02), (0.75, 0.05, 0.03)])
def test_1f1b_is_near_its_formula(spread: float, short: float, long: float) -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        stages, micro_batches = int(draw.integers(1, 7)), int(draw.integers(1, 24))
        shape = CANDIDATES, stages
        forward, backward = draw.uniform(1 - spread, 1 + spread, (2, *shape)) * [[[1]], [[2]]]
        times = times_of(
            forward,
            backward,
            through_forward_s=forward * draw.uniform(0.9, 1, shape),
            through_backward_s=backward * draw.uniform(0.9, 1, shape),
            delta_forward_s=draw.uniform(0, 2, shape),
            delta_backward_s=draw.uniform(0, 2, shape),
            within_forward_s=draw.uniform(0, 0.3, shape),
            within_backward_s=draw.uniform(0, 0.3, shape),
            after_first_s=draw.uniform(0, 0.3, shape),
            point_to_point_s=(sends_s := draw.uniform(0, 0.5, shape)),
            first_send_late_s=draw.uniform(0, 0.3, shape) * (later := draw.random(shape) < 0.5),
            end_send_late_s=draw.uniform(-0.2, 0, shape) * sends_s * ~later,
            end_return_late_s=draw.uniform(-0.2, 0, shape) * sends_s,
        )
        passes = passes_of(named_order("1f1b", stages, micro_batches))
        path_s = order_iteration_s(times, passes)
        formula_s = iteration_s(times, np.full(CANDIDATES, micro_batches))
        assert (formula_s >= (1 - short) * path_s).all()
        assert (formula_s <= (1 + long) * path_s).all()
        bound_s = order_bound_s(times, loop(stages), micro_batches)
        assert (bound_s <= path_s * (1 + 1e-12)).all()
        # A bound that searches can use: not far below.
        assert (bound_s >= 0.6 * path_s).all()


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_equal_stages_of_1f1b_are_exact(stages: int, micro_batches: int) -> None:
    times = equal(stages, 1.0, 2.0, send_s=0.25)
    passes = passes_of(named_order("1f1b", stages, micro_batches))
    assert order_iteration_s(times, passes) == pytest.approx(
        iteration_s(times, np.array([micro_batches]))
    )


@pytest.mark.parametrize("reverses", [True, False])
def test_all_forwards_first_wait_for_the_published_bubble_and_for_sends_once(
    reverses: bool,
) -> None:
    order = order_of_text(all_forwards_first(4, 8, reverses=reverses), 4, 8)
    path_s = order_iteration_s(equal(4, 1.0, 2.0, send_s=0.1), passes_of(order))
    # In the reverse order gradients of the first micro-batch are waited for last.
    assert path_s == pytest.approx((8 + 3) * 3.0 + 2 * 3 * 0.1)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    order = order_of_text(interleaved(4, 8, chunks), 4, 8)
    path_s = order_iteration_s(equal(4 * chunks, 1.0 / chunks, 2.0 / chunks), passes_of(order))
    assert path_s == pytest.approx(8 * 3.0 + 3 * 3.0 / chunks)


def test_a_zero_bubble_leaves_what_is_published() -> None:
    """F, B and W as long as one another: (p - 1)(F + B - W) of waiting."""
    one = np.ones((1, 4))
    passes = passes_of(order_of_text(zero_bubble(4, 8), 4, 8))
    split = SplitTimes(weights_s=one, less_s=one, first_s=one)
    path_s = order_iteration_s(equal(4, 1.0, 2.0), passes, split)
    assert path_s == pytest.approx(8 * 3.0 + 3 * 1.0)
    slower = SplitTimes(weights_s=one, less_s=0.5 * one, first_s=one)
    assert (order_iteration_s(equal(4, 1.0, 2.0), passes, slower) > path_s + 8 * 0.4).all()
    assert order_bound_s(equal(4, 1.0, 2.0), loop(4), 8, splits=True) <= path_s


@pytest.mark.parametrize(("weights", "forward"), [(1.0, 1.0), (0.8, 1.0), (2 / 3, 1.0)])
def test_stages_that_step_apart_leave_what_is_published(weights: float, forward: float) -> None:
    """ZB-H2 waits for (p - 1)(F + B - 2 W), ZB-2p not at all if three W are as long as F + B."""
    one = np.ones((1, 4))
    split = SplitTimes(weights_s=weights * one, less_s=weights * one, first_s=weights * one)
    times = equal(4, forward, 1.0 + weights)
    busy = 24 * (forward + 1.0 + weights)

    def waits(order: str, *, steps_apart: bool = True) -> float:
        passes = passes_of(named_order(order, 4, 24))
        return float(order_iteration_s(times, passes, split, steps_apart=steps_apart)[0]) - busy

    assert waits("zb-h1") == pytest.approx(3 * (forward + 1.0 - weights))
    assert waits("zb-h2") == pytest.approx(3 * (forward + 1.0 - 2 * weights))
    assert waits("zb-2p") == pytest.approx(0.0, abs=1e-9)
    # Where all step together, the last stage's late beginning counts.
    assert waits("zb-2p", steps_apart=False) == pytest.approx(3 * forward)


@pytest.mark.parametrize("issued", [0.5, 1.0, 1.25])
def test_a_host_is_ahead_of_a_stage_that_waits(issued: float) -> None:
    """In the pipeline's bubble a host that is a little slower than its GPU gets ahead."""
    one = np.ones((1, 4))
    host = HostTimes(forward_s=issued * one, backward_s=2 * issued * one, blocks=100 * one)
    passes = passes_of(named_order("1f1b", 4, 8))
    path_s = float(order_iteration_s(equal(4, 1.0, 2.0), passes, host=host)[0])
    alone_s = (8 + 3) * 3.0
    # The first stage's host issues eight pairs; the last stage's last gradient goes back to it.
    assert alone_s <= path_s <= max(alone_s, 8 * 3.0 * issued + 3 * 2.0) + 0.1


def test_a_host_slower_than_its_gpu_is_what_an_iteration_takes() -> None:
    one = np.ones((1, 4))
    host = HostTimes(forward_s=3 * one, backward_s=6 * one, blocks=100 * one)
    passes = passes_of(named_order("interleaved-2", 2, 8))
    path_s = order_iteration_s(equal(4, 1.0, 2.0), passes, host=host)
    assert path_s == pytest.approx(8 * 2 * 9.0, rel=0.04)
    least_s = order_bound_s(equal(4, 1.0, 2.0), loop(2, 2), 8, issued_s=9 * one)
    # The last stage's host issues all; its last gradient goes back after that.
    assert least_s == pytest.approx(8 * 2 * 9.0 + 2.0)
    assert (path_s >= least_s).all()


def test_parts_are_reduced_one_after_another_beside_passes_and_stepped_last() -> None:
    one = np.ones((1, 2))
    passes = passes_of(named_order("interleaved-2", 1, 2))
    reduced, stepped = 5.0, 0.5
    # Of each part 3 seconds of reductions are left when it has gone back.
    times = replace(equal(2, 1.0, 2.0), delta_backward_s=(3.0 + stepped) * one)
    at_end = EndTimes(
        gathers_s=0 * one,
        reductions_s=reduced * one,
        tied_s=0 * one,
        steps_s=stepped * one,
    )
    path_s = order_iteration_s(times, passes, at_end=at_end)
    # All passes take 12 seconds. The second chunk is done at 10, its reductions are at 13.
    assert path_s == pytest.approx(13.0 + reduced + 2 * stepped)
    hidden = replace(at_end, reductions_s=0 * one)
    assert order_iteration_s(times, passes, at_end=hidden) == pytest.approx(12 + 3 + 2 * stepped)
    # A tied table is exchanged when all parts are reduced.
    first = np.array([[1.0, 0.0]])
    late = replace(times, delta_backward_s=times.delta_backward_s + 2.0 * first)
    tied_s = order_iteration_s(late, passes, at_end=replace(at_end, tied_s=2.0 * first))
    assert tied_s == pytest.approx(13.0 + reduced + 2.0 + 2 * stepped)


def test_a_pass_is_slowed_by_the_send_of_the_pass_before_it_whatever_kind_that_is() -> None:
    one = np.ones((1, 2))
    passes = passes_of(named_order("gpipe", 2, 2))
    times = equal(2, 1.0, 2.0, send_s=0.5)

    def longer_s(share: float, most: float, hidden: float = 0.0, beside: float = 0.0) -> float:
        slowed = SlowedTimes(
            share=share * one,
            most_s=most * one,
            hidden_s=hidden * one,
            beside_send_s=beside * one,
        )
        path_s = order_iteration_s(times, passes, slowed={"F": slowed, "B": slowed})
        return float(path_s[0] - order_iteration_s(times, passes)[0])

    # The second forward pass of the first stage begins with the first send, and the last backward
    # pass of the second stage with the send of the first gradient; no other pass meets a send.
    assert longer_s(0.4, 9.0) == pytest.approx(2 * 0.4 * 0.5)
    assert longer_s(0.4, 0.15) == pytest.approx(2 * 0.15)
    assert longer_s(0.4, 9.0, hidden=0.05) == pytest.approx(2 * 0.15)
    assert longer_s(0.4, 9.0, hidden=9.0, beside=0.3) == pytest.approx(2 * 0.3)
    assert longer_s(0.4, 9.0, hidden=9.0) == pytest.approx(0.0)
