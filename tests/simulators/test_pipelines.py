"""Pipelines made by hand: bubbles, sends, and that no stages wait for one another for ever."""

from collections import defaultdict
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.cost.chains import ISSUED
from mistlab.cost.pipeline import iteration_s
from mistlab.engines.engine import ENGINES
from mistlab.schedule.slots import Sends, Template
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.plan_orders import named_order
from mistlab.stages.stage_batch import StageTimes
from simulators.build import StageTasks, build_graph
from simulators.play import ALONE, play


def by_hand(
    template: Template, order: str, stages: int, micro_batches: int, **times: float
) -> float:
    """Seconds of a pipeline of equal stages of two layers."""
    seconds = defaultdict(lambda: (0.0, 0.0))
    seconds["F", None] = (times["forward"] / 2,) * 2
    seconds["B", None] = (times["backward"] / 2,) * 2
    seconds["S", None] = (times.get("step", 0.0) / 2,) * 2
    equal = [
        StageTasks(
            stage=stage, first_layer=2 * stage, zero=0, seconds=seconds, send_s=times.get("send", 0)
        )
        for stage in range(stages)
    ]
    passes = passes_of(named_order(order, stages, micro_batches))
    graph = build_graph(equal, template, passes)
    return max(play(graph, [ALONE] * stages).ends_s)


stage_counts = st.integers(1, 6)
micro_batch_counts = st.integers(1, 10)
# Orders without chunks and split backward passes, for any number of micro-batches.
orders = st.sampled_from(["1f1b", "gpipe"])
times = st.floats(0.1, 10)
MEGATRON = ENGINES["megatron"].template(overlap_communication=False)
MISTLAB = ENGINES["mistlab"].template()
BLOCKING = replace(MISTLAB, sends="blocking")
MEETING = replace(MISTLAB, sends="meeting")


@given(stage_counts, micro_batch_counts, orders, times, times)
def test_equal_stages_wait_for_the_published_bubble(
    stages: int, micro_batches: int, order: str, forward: float, backward: float
) -> None:
    time = by_hand(MEGATRON, order, stages, micro_batches, forward=forward, backward=backward)
    busy = micro_batches * (forward + backward)
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert 1 - busy / time == pytest.approx(bubble, abs=1e-9)


@given(stage_counts, micro_batch_counts, times, times, times, st.floats(0, 0.1))
def test_equal_stages_agree_with_the_closed_form(
    stages: int, micro_batches: int, forward: float, backward: float, step: float, send: float
) -> None:
    time = by_hand(
        MISTLAB, "1f1b", stages, micro_batches, forward=forward, backward=backward, step=step
    )
    equal = np.full((1, stages), forward), np.full((1, stages), backward)
    nothing = np.zeros((1, stages))

    def closed(steps: float, sends: float) -> float:
        stage_times = StageTimes(
            forward_s=equal[0],
            backward_s=equal[1],
            through_forward_s=equal[0],
            through_backward_s=equal[1],
            delta_forward_s=nothing + steps,
            delta_backward_s=nothing,
            within_forward_s=nothing,
            within_backward_s=nothing,
            after_first_s=nothing,
            point_to_point_s=nothing + 2 * sends,
            first_send_late_s=nothing,
            end_send_late_s=nothing,
            end_return_late_s=nothing,
            received_s=nothing,
            within_round_s=nothing,
            round_late_s=nothing,
            queued_late_s=nothing,
            held_forward_s=nothing,
            held_backward_s=nothing,
            left_backward_s=nothing,
            **dict.fromkeys(ISSUED, nothing),
        )
        return float(iteration_s(stage_times, np.array([micro_batches]))[0])

    if stages == 1 or step <= forward:
        assert time == pytest.approx(closed(step, 0.0), rel=1e-9)
    parts = {"forward": forward, "backward": backward, "send": send}
    time = by_hand(MEGATRON, "1f1b", stages, micro_batches, **parts)
    assert time == pytest.approx(closed(0.0, send), rel=1e-9)
    # All forwards before all backwards: the sends come on top once.
    time = by_hand(MEGATRON, "gpipe", stages, micro_batches, **parts)
    assert time == pytest.approx(closed(0.0, 0.0) + 2 * (stages - 1) * send, rel=1e-9)


@given(st.integers(2, 6), micro_batch_counts, times, times, st.floats(0.001, 0.1))
def test_sends_that_block_cost_the_stages_what_the_closed_form_says(
    stages: int, micro_batches: int, forward: float, backward: float, send: float
) -> None:
    """Exactly between two stages; among more, the last stage's shorter turn hides one send."""
    time = by_hand(
        BLOCKING, "1f1b", stages, micro_batches, forward=forward, backward=backward, send=send
    )
    received = np.array([[0.0] + [send] * (stages - 1)])
    nothing = np.zeros_like(received)
    stage_times = StageTimes(
        forward_s=forward + received,
        backward_s=backward + received[:, ::-1],
        through_forward_s=forward + received,
        through_backward_s=backward + received[:, ::-1],
        delta_forward_s=nothing,
        delta_backward_s=nothing,
        within_forward_s=nothing,
        within_backward_s=nothing,
        after_first_s=nothing,
        point_to_point_s=nothing,
        first_send_late_s=nothing,
        end_send_late_s=nothing,
        end_return_late_s=nothing,
        received_s=nothing,
        within_round_s=nothing,
        round_late_s=nothing,
        queued_late_s=nothing,
        held_forward_s=nothing,
        held_backward_s=nothing,
        left_backward_s=nothing,
        **dict.fromkeys(ISSUED, nothing),
    )
    closed = float(iteration_s(stage_times, np.array([micro_batches]))[0])
    hidden = closed - time
    assert -1e-9 <= hidden <= (0 if stages == 2 else send) + 1e-9


@given(st.integers(1, 6), micro_batch_counts, times, times, st.floats(0.01, 10))
def test_sends_that_meet_hold_both_stages_as_the_closed_form_says(
    stages: int, micro_batches: int, forward: float, backward: float, send: float
) -> None:
    """A send is the receiver's wait before its pass, and keeps the sender from its next pass."""
    time = by_hand(
        MEETING, "1f1b", stages, micro_batches, forward=forward, backward=backward, send=send
    )
    received = np.array([[0.0] + [send] * (stages - 1)])
    sent, nothing = received[:, ::-1], np.zeros_like(received)
    known = {
        "forward_s": forward + received + sent,
        "backward_s": backward + received + sent,
        "through_forward_s": forward + received,
        "through_backward_s": backward + sent,
        "delta_forward_s": nothing - sent,
        "held_forward_s": sent,
        "held_backward_s": received,
        "left_backward_s": received,
    }
    names = [entry.name for entry in fields(StageTimes)]
    stage_times = StageTimes(**{**dict.fromkeys(names, nothing), **known})
    closed = float(iteration_s(stage_times, np.array([micro_batches]))[0])
    assert closed == pytest.approx(time, rel=1e-9)


NAMES = tuple(
    dict.fromkeys(
        (row.kind, row.direction)
        for engine in ("mistlab", "megatron")
        for rows in ENGINES[engine].template().phases.values()
        for row in rows
    )
)
durations = st.sampled_from([0.0, 0.1, 1.0, 3.0])


@st.composite
def stages_by_hand(draw: st.DrawFn) -> list[StageTasks]:
    """Stages of one to four layers, each with its own tasks, some of no duration."""
    stages = []
    for stage in range(draw(st.integers(1, 4))):
        layers = draw(st.integers(1, 4))
        seconds = {
            name: [of_kind if draw(st.booleans()) else 0.0 for _ in range(layers)]
            for name in NAMES
            for of_kind in [draw(durations)]
        }
        # What is swapped in was swapped out.
        for kind in "PGOA":
            seconds[kind, ">"] = list(seconds.get((kind, "<"), seconds[kind, ">"]))
        stages.append(
            StageTasks(
                stage=stage,
                first_layer=0,
                zero=draw(st.integers(0, 3)),
                seconds=seconds,
                send_s=draw(durations),
            )
        )
    return stages


@given(
    stages_by_hand(),
    st.sampled_from(["mistlab", "megatron", "deepspeed"]),
    st.sampled_from(["overlapped", "blocking"]),
    st.integers(0, 3),
    st.integers(1, 5),
    orders,
)
def test_no_stages_wait_for_one_another_for_ever(
    stages: list[StageTasks],
    engine: str,
    sends: Sends,
    depth: int,
    micro_batches: int,
    order: str,
) -> None:
    template = replace(
        ENGINES[engine].template(overlap_communication=False), depth=depth, sends=sends
    )
    graph = build_graph(stages, template, passes_of(named_order(order, len(stages), micro_batches)))
    played = play(graph, [ALONE] * len(stages))
    for source, task, ended in graph.edges():
        assert played.starts_s[task] >= (played.ends_s if ended else played.starts_s)[source]
    busy = defaultdict(float)
    for lane, seconds in zip(graph.lanes, graph.seconds, strict=True):
        busy[lane] += seconds
    last = max(played.ends_s)
    assert max(busy.values()) - 1e-9 <= last <= sum(graph.seconds) + 1e-9
