"""Graphs of tasks made by hand: order, contention, and schedules that cannot progress."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.cost.side_by_side import overlapped
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import Action
from simulators.graph import LANES, SENDS, StalledError, TaskGraph
from simulators.play import ALONE, play

STREAM_OF = {"F": STREAMS[0], "U": STREAMS[1], "P": STREAMS[2], "A": STREAMS[3]}
seconds = st.floats(0.01, 10)
slowdowns = st.floats(1, 4)


def graph_of(*tasks: tuple[str, float], stages: int = 1) -> TaskGraph:
    graph = TaskGraph(stages=stages)
    for text, duration in tasks:
        action = Action.parse(text)
        graph.add(action, STREAM_OF[action.kind], duration)
    return graph


def factors_of(draw: list[float]) -> np.ndarray:
    """A table of factors for every set of busy streams, 1 for a stream by itself."""
    table, numbers = np.ones((16, 4)), iter(draw)
    for chosen in range(16):
        members = [stream for stream in range(4) if chosen & 1 << stream]
        if len(members) > 1:
            for stream in members:
                table[chosen, stream] = next(numbers)
    return table


def test_a_stream_runs_one_task_at_a_time_in_order() -> None:
    times = play(graph_of(("0F.0m0", 2.0), ("0F.1m0", 3.0)), [ALONE])
    assert times.starts_s == [0.0, 2.0]
    assert times.ends_s == [2.0, 5.0]


def test_a_task_waits_for_ends_and_starts() -> None:
    graph = graph_of(("0U.0m0", 2.0), ("0F.0m0", 3.0), ("0P<.1m0", 1.0))
    graph.wait(1, end_of=0)
    graph.wait_for_start(2, start_of=1)
    times = play(graph, [ALONE])
    assert times.starts_s == [0.0, 2.0, 2.0]
    assert times.ends_s == [2.0, 5.0, 3.0]


def test_a_stream_does_not_wait_for_a_task_that_is_not_ready() -> None:
    graph = graph_of(("0F.0m0", 1.0), ("0F.1m0", 1.0), ("0U.0m0", 5.0))
    graph.wait(0, end_of=2)
    assert play(graph, [ALONE]).starts_s == [5.0, 0.0, 0.0]


@given(seconds, seconds, slowdowns, slowdowns)
def test_two_streams_side_by_side_end_when_the_formula_says(
    compute: float, gather: float, compute_factor: float, gather_factor: float
) -> None:
    table = np.ones((16, 4))
    table[3, :2] = compute_factor, gather_factor
    times = play(graph_of(("0F.0m0", compute), ("0U.0m0", gather)), [table])
    ends = [compute * compute_factor, gather * gather_factor]
    first = min(ends)
    # Until the first ends both are slow; what the other has left goes on at full speed.
    left = compute - first / compute_factor, gather - first / gather_factor
    assert min(times.ends_s) == pytest.approx(first, rel=1e-12)
    assert max(times.ends_s) == pytest.approx(first + max(left), rel=1e-9)


@given(st.tuples(*[seconds] * 4), st.lists(slowdowns, min_size=28, max_size=28))
def test_four_streams_that_start_together_end_as_in_the_closed_form(
    durations: tuple[float, ...], draw: list[float]
) -> None:
    table = factors_of(draw)
    tasks = zip(("0F.0m0", "0U.0m0", "0P<.0m0", "0A>.0m0"), durations, strict=True)
    played = max(play(graph_of(*tasks), [table]).ends_s)
    # The closed form never exceeds the sum, as any schedule of one after another shows.
    closed = float(overlapped(np.array([durations]), table)[0])
    assert min(played, sum(durations)) == pytest.approx(closed, rel=1e-9)


@given(seconds, seconds, seconds, slowdowns)
def test_work_goes_on_at_a_new_speed_when_another_stream_becomes_busy(
    compute: float, before: float, copy: float, factor: float
) -> None:
    """A copy on the way slows the computing task down from its start to its end."""
    table = np.ones((16, 4))
    table[0b0101] = table[0b0111] = factor, 1.0, 1.0, 1.0
    graph = graph_of(("0F.0m0", compute), ("0U.0m0", before), ("0P<.0m0", copy))
    graph.wait(2, end_of=1)
    alone = min(before, compute)
    beside = min(copy, (compute - alone) * factor)
    expected = alone + beside + max(0.0, compute - alone - beside / factor)
    assert play(graph, [table]).ends_s[0] == pytest.approx(expected, rel=1e-9)


def test_a_task_that_waits_for_itself_is_named() -> None:
    graph = graph_of(("0F.0m0", 1.0), ("0U.1m0", 1.0), ("0F.1m0", 1.0), ("0A>.1m0", 1.0))
    graph.wait(2, end_of=1)
    graph.wait(1, end_of=2)
    graph.wait(3, end_of=2)
    names = r"0U\.1m0 which waits for 0F\.1m0 which waits for 0U\.1m0"
    with pytest.raises(StalledError, match=names) as error:
        play(graph, [ALONE])
    assert "3 tasks cannot start" in str(error.value)


def test_a_task_that_nothing_lets_go_is_named() -> None:
    graph = graph_of(("0F.0m0", 1.0), ("1F.1m0", 1.0), stages=2)
    graph.waits[1] += 1
    with pytest.raises(StalledError, match=r"1 tasks cannot start.*1F\.1m0"):
        play(graph, [ALONE, ALONE])


def sends_of(*uses: tuple[tuple[int, float], ...]) -> TaskGraph:
    """Two seconds of sending on each of some stages, with the links that each takes."""
    graph = TaskGraph(stages=len(uses))
    for stage, of_stage in enumerate(uses):
        action = Action(stage=stage, kind="X", layer=0, micro_batch=0)
        graph.networks[graph.add(action, "compute", 2.0)] = of_stage
    return graph


def test_sends_on_one_link_divide_it() -> None:
    graph = sends_of(((0, 1.0), (3, 1.0)), ((0, 1.0), (5, 1.0)), ((2, 1.0), (7, 1.0)))
    assert play(graph, [ALONE] * 3).ends_s == pytest.approx([4.0, 4.0, 2.0])


def test_sends_that_leave_room_on_a_link_do_not_slow_one_another_down() -> None:
    graph = sends_of(((0, 0.5),), ((0, 0.5),))
    assert play(graph, [ALONE] * 2).ends_s == [2.0, 2.0]


def test_a_send_that_is_left_alone_goes_on_at_full_speed() -> None:
    graph = sends_of(((0, 1.0),), ((0, 1.0),))
    graph.seconds[0] = 1.0
    # Until 2 s both run at half speed; what the other has left is one second's worth.
    assert play(graph, [ALONE] * 2).ends_s == pytest.approx([2.0, 3.0])
    graph.seconds[1], graph.seconds[0] = 4.0, 1.0
    other = graph.add(Action.parse("0F.0m0"), STREAMS[0], 1.0)
    graph.wait(0, end_of=other)
    # A second alone, two side by side, and two alone again.
    assert play(graph, [ALONE] * 2).ends_s == pytest.approx([3.0, 5.0, 1.0])


def test_a_send_on_a_crowded_link_stays_slow_while_others_of_its_stage_end() -> None:
    graph = sends_of(((0, 1.0),), ((0, 1.0),))
    graph.lanes = [LANES.index(SENDS), len(LANES) + LANES.index(SENDS)]
    for text in ("0F.0m0", "0F.1m0", "0F.2m0"):
        graph.add(Action.parse(text), "compute", 0.5)
    assert play(graph, [ALONE] * 2).ends_s[:2] == pytest.approx([4.0, 4.0])


def test_a_send_shares_its_links_with_a_collective_of_its_stage() -> None:
    graph = TaskGraph(stages=1)
    graph.add(Action.parse("0R.0m0"), "gpu_to_gpu", 3.0)
    graph.add(Action.parse("0X.0m0"), SENDS, 1.0)
    # Both at half speed until the send is over: together they take as long as in turn.
    assert play(graph, [ALONE]).ends_s == pytest.approx([4.0, 2.0])


def test_too_small_a_ring_of_buffers_is_named() -> None:
    """Two layers are wanted at once, where there is one buffer for both."""
    graph = graph_of(("0U.0m0", 1.0), ("0U.1m0", 1.0), ("0F.0m0", 1.0), ("0F.1m0", 1.0))
    graph.wait(2, end_of=0)
    graph.wait(2, end_of=1)
    graph.wait(3, end_of=1)
    # The buffer is free again when layer 0 has computed.
    graph.wait(1, end_of=2)
    names = r"0U\.1m0 which waits for 0F\.0m0 which waits for 0U\.1m0"
    with pytest.raises(StalledError, match=names):
        play(graph, [ALONE])
