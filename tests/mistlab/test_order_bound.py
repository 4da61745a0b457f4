"""Bounds of iterations in any named order, beside the longest path through all passes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mistlab.cost import order_path as order_bound
from mistlab.cost.chains import ISSUED
from mistlab.cost.order_path import InOrder, order_bound_s
from mistlab.cost.order_times import extended_s
from mistlab.schedule.orders import (
    CONTROLLED,
    ORDERS,
    SPLIT,
    TURNING,
    fewer_micro_batches,
    order_problem,
)
from mistlab.schedule.placement import loop
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.part_times import EndTimes, HostTimes, SplitTimes
from mistlab.stages.plan_orders import named_order
from mistlab.stages.stage_batch import StageTimes
from tests.mistlab.test_order_path import equal, order_iteration_s

CANDIDATES = 12


def drawn_times(draw: np.random.Generator, parts: int) -> StageTimes:
    """Times of parts with fetches, extras and sends, some of them long."""
    shape = CANDIDATES, parts
    forward, backward = draw.uniform(0.5, 1.5, (2, *shape)) * [[[1]], [[2]]]
    once = {
        name: draw.exponential(draw.choice([0.0, 0.2, 4.0]), shape)
        for name in ("delta_forward_s", "delta_backward_s", "point_to_point_s")
    }
    through_forward, through_backward = (
        own * draw.uniform(0.7, 1, shape) for own in (forward, backward)
    )
    left = np.random.default_rng(parts).uniform(0, 1, shape)
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        through_forward_s=through_forward,
        through_backward_s=through_backward,
        within_forward_s=draw.uniform(0, 0.4, shape) * (once["delta_forward_s"] > 0),
        within_backward_s=draw.uniform(0, 0.4, shape) * (once["delta_backward_s"] > 0),
        after_first_s=np.zeros(shape),
        first_send_late_s=np.zeros(shape),
        end_send_late_s=np.zeros(shape),
        end_return_late_s=np.zeros(shape),
        received_s=np.zeros(shape),
        within_round_s=np.zeros(shape),
        round_late_s=np.zeros(shape),
        queued_late_s=np.zeros(shape),
        held_forward_s=np.zeros(shape),
        held_backward_s=np.zeros(shape),
        left_backward_s=(backward - through_backward) * left,
        **dict.fromkeys(ISSUED, np.zeros(shape)),
        **once,
    )


def drawn_pipelines(order: str, count: int = 25) -> Iterator[tuple[np.random.Generator, int, int]]:
    draw = np.random.default_rng(sum(map(ord, order)))
    for _ in range(count):
        stages, micro_batches = int(draw.integers(2, 6)), int(draw.integers(1, 13))
        if not order_problem(order, stages, micro_batches, most_chunks=8):
            yield draw, stages, micro_batches


def shares_of_paths(
    order: str, *, steps_apart: bool, issued: float = 0.0
) -> Iterator[NDArray[np.float64]]:
    """The bounds of random pipelines as shares of their longest paths. Hosts issue passes in up to
    ``issued`` times as long as they take."""
    for draw, stages, micro_batches in drawn_pipelines(order):
        passes = passes_of(named_order(order, stages, micro_batches))
        placement = passes[0].placement
        times = drawn_times(draw, len(placement.stages))
        weights_s = times.backward_s * draw.uniform(0, 1)
        less_s = weights_s * (1 - draw.uniform(0, 0.1))
        split = SplitTimes(weights_s=weights_s, less_s=less_s, first_s=weights_s)
        nothing = np.zeros_like(times.forward_s)
        forward_s, backward_s = (
            own_s * (draw.uniform(0, issued, own_s.shape) if issued else 0.0)
            for own_s in (times.forward_s, times.backward_s)
        )
        blocks = 1 + nothing + draw.integers(8)
        host = HostTimes(forward_s=forward_s, backward_s=backward_s, blocks=blocks)
        path_s = order_iteration_s(
            times,
            passes,
            split if order in SPLIT else None,
            host=host if issued else None,
            at_end=EndTimes(
                gathers_s=nothing,
                reductions_s=nothing,
                tied_s=nothing,
                steps_s=times.end_s * draw.uniform(0, 1),
            ),
            steps_apart=steps_apart,
        )
        least_s = order_bound_s(
            times,
            placement,
            micro_batches,
            issued_s=forward_s + backward_s,
            splits=order in SPLIT,
            steps_apart=steps_apart,
        )
        yield least_s / path_s


@pytest.mark.parametrize("steps_apart", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_no_path_in_any_order_is_shorter_than_its_bound(order: str, steps_apart: bool) -> None:
    shares = np.concatenate([*shares_of_paths(order, steps_apart=steps_apart)])
    assert (shares <= 1 + 1e-12).all()
    # A bound that searches can use: not far below. Few micro-batches fill a V slowly, and where
    # backward passes are split the bound knows no way back. Stages that hold few micro-batches
    # wait.
    waits = steps_apart or order in CONTROLLED
    assert shares.mean() > (0.6 if waits else 0.7 if order in TURNING else 0.8)


@pytest.mark.parametrize("order", ORDERS)
def test_no_path_is_shorter_than_its_hosts_take(order: str) -> None:
    shares = np.concatenate([*shares_of_paths(order, steps_apart=False, issued=5.0)])
    assert (shares <= 1 + 1e-12).all()
    # Where a host is the slowest of all, the bound knows it.
    assert np.median(shares) > 0.9
    apart = np.concatenate([*shares_of_paths(order, steps_apart=True, issued=5.0)])
    assert (apart <= 1 + 1e-12).all()


def slower_hosts(*arguments: Any, **options: Any) -> InOrder:
    """Stages with a planted fault: their hosts issue passes for longer."""
    true = IN_ORDER(*arguments, **options)
    return replace(true, issued_s=1.1 * true.issued_s)


def test_a_host_that_is_too_slow_in_the_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InOrder, "of", slower_hosts)
    for order in ("gpipe", "interleaved-2", "zb-h1"):
        shares = np.concatenate([*shares_of_paths(order, steps_apart=False, issued=5.0)])
        assert (shares > 1 + 1e-12).any()


@pytest.mark.parametrize("chunks", [2, 3])
def test_bounds_of_equal_stages_are_exact_where_nothing_is_sent(chunks: int) -> None:
    times, order = equal(4 * chunks, 1.0 / chunks, 2.0 / chunks), f"interleaved-{chunks}"
    path_s = order_iteration_s(times, passes_of(named_order(order, 4, 8)))
    assert order_bound_s(times, loop(4, chunks), 8) == pytest.approx(path_s)


def test_a_stage_that_is_slowest_in_the_long_run_alone_is_not_forgotten() -> None:
    draw = np.random.default_rng(8)
    shares = []
    for _ in range(12):
        stages, order = int(draw.integers(2, 5)), "interleaved-2"
        micro_batches, times = 30 * stages, drawn_times(draw, 2 * stages)
        few = fewer_micro_batches(order, stages, micro_batches)
        few_s, more_s, whole_s = (
            order_iteration_s(times, passes_of(named_order(order, stages, count)))
            for count in (few, few + stages, micro_batches)
        )
        groups = np.full(CANDIDATES, (micro_batches - few) / stages)
        least_s = order_bound_s(times, loop(stages, 2), micro_batches)
        shares.append(
            [extended_s(few_s, more_s, groups, s) / whole_s for s in (0 * least_s, least_s)]
        )
    without, found = np.concatenate(shares, axis=1)
    assert found.min() > without.min() + 0.01


def longer_stages(*arguments: Any, **options: Any) -> InOrder:
    """Stages with a planted fault: their passes take longer."""
    true = IN_ORDER(*arguments, **options)
    return replace(true, all_s=1.2 * true.all_s + 0.1)


IN_ORDER = InOrder.of


@pytest.mark.parametrize("fault", ["way_in_s", "way_out_s", "of", "there_and_back_s"])
def test_a_part_of_the_bound_that_is_too_long_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "of":
        monkeypatch.setattr(InOrder, fault, longer_stages)
    else:
        parts, true = order_bound._OfChunks, getattr(order_bound._OfChunks, fault)
        monkeypatch.setattr(parts, fault, lambda *arguments: 1.2 * true(*arguments) + 0.1)
    shares = np.concatenate([*shares_of_paths("gpipe", steps_apart=False)])
    assert (shares > 1 + 1e-12).any()
