"""Pipelines: their order, and their time against one that is played action by action."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.cost.chains import ISSUED
from mistlab.cost.pipeline import iteration_s
from mistlab.schedule.order_text import PipelineOrder
from mistlab.stages.plan_orders import named_order
from mistlab.stages.stage_batch import StageTimes

stage_counts = st.integers(1, 8)
micro_batch_counts = st.integers(1, 12)
orders = st.sampled_from(("1f1b", "gpipe"))


def one_forward_one_backward(stages: int, micro_batches: int) -> PipelineOrder:
    return named_order("1f1b", stages, micro_batches)


def played(
    order: PipelineOrder,
    forward: list[float],
    backward: list[float],
    delta_forward: list[float] | None = None,
    delta_backward: list[float] | None = None,
    sends: list[float] | None = None,
) -> float:
    """The time until all is done, each action as soon as its stage and its input are free; what
    comes once an iteration goes before the first and after the last. ``sends`` are from each stage
    to the next, and back; a stage sends one outcome after another."""
    to_next = sends or [0.0] * order.num_stages
    sent = [0.0] * order.num_stages
    ends: dict[str, float] = {}
    free = list(delta_forward or [0.0] * order.num_stages)
    left = [list(passes) for passes in order.stages]
    while any(left):
        ran = False
        for stage, actions in enumerate(left):
            if not actions:
                continue
            action = actions[0]
            source = stage - 1 if action.kind == "F" else stage + 1
            needed = f"{source}{order.word(action)}"
            if 0 <= source < order.num_stages and needed not in ends:
                continue
            duration = (forward if action.kind == "F" else backward)[stage]
            free[stage] = max(free[stage], ends.get(needed, 0.0)) + duration
            goal = stage + 1 if action.kind == "F" else stage - 1
            key = f"{stage}{order.word(actions.pop(0))}"
            if 0 <= goal < order.num_stages:
                sent[stage] = max(sent[stage], free[stage]) + to_next[min(stage, goal)]
                ends[key] = sent[stage]
            else:
                ends[key] = free[stage]
            ran = True
        assert ran, "the pipeline waits for itself"
    return max(map(sum, zip(free, delta_backward or [0.0] * order.num_stages, strict=True)))


def closed_form(
    forward: list[float],
    backward: list[float],
    micro_batches: int,
    delta_forward: list[float] | None = None,
    delta_backward: list[float] | None = None,
    point_to_point: list[float] | None = None,
    **others: list[float],
) -> float:
    nothing = [0.0] * len(forward)
    times = StageTimes(
        forward_s=np.array([forward]),
        backward_s=np.array([backward]),
        through_forward_s=np.array([others.get("through_forward", forward)]),
        through_backward_s=np.array([others.get("through_backward", backward)]),
        within_forward_s=np.array([others.get("within_forward", nothing)]),
        within_backward_s=np.array([others.get("within_backward", nothing)]),
        after_first_s=np.array([others.get("after_first", nothing)]),
        delta_forward_s=np.array([delta_forward or nothing]),
        delta_backward_s=np.array([delta_backward or nothing]),
        point_to_point_s=np.array([point_to_point or nothing]),
        first_send_late_s=np.array([others.get("first_send_late", nothing)]),
        end_send_late_s=np.array([others.get("end_send_late", nothing)]),
        end_return_late_s=np.array([others.get("end_return_late", nothing)]),
        received_s=np.array([others.get("received", nothing)]),
        within_round_s=np.array([others.get("within_round", nothing)]),
        round_late_s=np.array([others.get("round_late", nothing)]),
        queued_late_s=np.array([others.get("queued_late", nothing)]),
        held_forward_s=np.array([others.get("held_forward", nothing)]),
        held_backward_s=np.array([others.get("held_backward", nothing)]),
        left_backward_s=np.array([others.get("left_backward", nothing)]),
        **{name: np.array([others.get(name.removesuffix("_s"), nothing)]) for name in ISSUED},
    )
    return float(iteration_s(times, np.array([micro_batches]))[0])


@given(stage_counts, micro_batch_counts, orders, st.floats(0.1, 10), st.floats(0.1, 10))
def test_equal_stages_wait_for_the_published_bubble(
    stages: int, micro_batches: int, order: str, forward: float, backward: float
) -> None:
    time = played(
        named_order(order, stages, micro_batches), [forward] * stages, [backward] * stages
    )
    busy = micro_batches * (forward + backward)
    assert 1 - busy / time == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-9)
    assert closed_form([forward] * stages, [backward] * stages, micro_batches) == pytest.approx(
        time
    )


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6))
def test_one_micro_batch_passes_every_stage_twice(times: list[tuple[float, float]]) -> None:
    forward, backward = map(list, zip(*times, strict=True))
    time = played(one_forward_one_backward(len(times), 1), forward, backward)
    assert closed_form(forward, backward, 1) == pytest.approx(time)
    assert time == pytest.approx(sum(forward) + sum(backward))


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_single_stage_hides_nothing(
    forward: float, backward: float, delta_forward: float, delta_backward: float
) -> None:
    time = closed_form([forward], [backward], 5, [delta_forward], [delta_backward], [3.0])
    assert time == pytest.approx(5 * (forward + backward) + delta_forward + delta_backward)


def test_a_delta_hides_behind_earlier_stages_of_its_own_direction() -> None:
    forward, backward = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    plain = closed_form(forward, backward, 4)
    assert closed_form(forward, backward, 4, [0, 0, 2.0]) == plain
    assert closed_form(forward, backward, 4, [0, 0, 2.5]) == pytest.approx(plain + 0.5)
    assert closed_form(forward, backward, 4, None, [0, 0, 4.5]) == pytest.approx(plain + 0.5)
    # Pooled, as published, the two directions' slack of 6 would hide both of these.
    assert closed_form(forward, backward, 4, [0, 0, 4.0], [0, 0, 1.0]) == pytest.approx(plain + 2)


def test_nobody_waits_for_what_leaves_after_a_first_pass_but_the_stage_s_own_next_pass() -> None:
    forward, backward, after = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [5.0, 0.0, 0.0]

    def later_s(micro_batches: int) -> float:
        late = closed_form(forward, backward, micro_batches, after, after_first=after)
        return late - closed_form(forward, backward, micro_batches)

    # The only micro-batch comes back after 8 s. A second one begins after 6, and its gradient comes
    # back after 13, in place of 10.
    assert later_s(1) == pytest.approx(0)
    assert later_s(2) == pytest.approx(3)


def test_a_late_first_send_delays_only_who_waits_for_the_first_micro_batch() -> None:
    forward, backward = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]

    def later_s(forward: list[float], backward: list[float], micro_batches: int) -> float:
        sends: list[float] = [0.2] * 3
        late = [0.5, 0.25, 4.0]
        slow = closed_form(
            forward, backward, micro_batches, point_to_point=sends, first_send_late=late
        )
        return slow - closed_form(forward, backward, micro_batches, point_to_point=sends)

    # The last stage works without a pause once the first micro-batch is there. It sends nothing on.
    assert later_s([1.0, 1.0, 9.0], [2.0, 2.0, 9.0], 8) == pytest.approx(0.75)
    # Two late sends there, and then all gradients come back one after another.
    assert later_s(forward, backward, 2) == pytest.approx(0.75)
    # A first stage that is always busy waits for no micro-batch.
    assert later_s([9.0, 1.0, 1.0], [9.0, 2.0, 2.0], 8) == pytest.approx(0)


def test_what_makes_last_backwards_themselves_longer_adds_up() -> None:
    forward, backward = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    plain = closed_form(forward, backward, 4)
    delta, within = [0.5, 0.5, 2.5], [0.5, 0.5, 0.5]
    longer = closed_form(forward, backward, 4, None, delta, within_backward=within)
    assert longer == pytest.approx(plain + 1.5)
    # Of a stage whose last backward is followed by none, what goes on after it counts too.
    longer = closed_form(forward, backward, 4, None, [2.5, 0.5, 0.5], within_backward=within)
    assert longer == pytest.approx(plain + 3.5)


def test_what_stages_do_between_passes_delays_no_micro_batch_on_its_way() -> None:
    forward, backward = [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]
    plain = closed_form(forward, backward, 8)
    longer = closed_form(
        [1.1] * 3, [2.1] * 3, 8, through_forward=forward, through_backward=backward
    )
    assert longer == pytest.approx(plain + 8 * 0.2)


def test_sends_of_a_single_micro_batch_count_once_each_way() -> None:
    # The last stage sends to no other.
    assert closed_form([1.0] * 3, [1.0] * 3, 1, point_to_point=[0.1, 0.2, 9.0]) == pytest.approx(
        6.3
    )


@given(
    st.integers(1, 16), st.integers(1, 40), st.floats(0.1, 2), st.floats(0.1, 2), st.floats(0, 1)
)
def test_equal_stages_with_equal_sends_are_exact(
    stages: int, micro_batches: int, forward: float, backward: float, share: float
) -> None:
    """A round of as many micro-batches as there are stages waits for all sends but one's worth, if
    no send takes longer than a pass."""
    send = share * min(forward, backward)
    left, last = micro_batches - 1, stages - 1
    sends = 2 * (last + left - -(-left // stages))
    expected = (micro_batches + last) * (forward + backward) + sends * send
    equal = [forward] * stages, [backward] * stages
    order = one_forward_one_backward(stages, micro_batches)
    assert played(order, *equal, sends=[send] * stages) == pytest.approx(expected)
    received = [0.0, *[send] * (stages - 1)]
    sends_s = {"point_to_point": [2 * send] * stages, "received": received}
    assert closed_form(*equal, micro_batches, **sends_s) == pytest.approx(expected)


@given(st.integers(1, 40), st.floats(0.1, 2), st.floats(0.1, 2), st.floats(0, 9))
def test_two_stages_with_sends_of_any_length_are_exact(
    micro_batches: int, forward: float, backward: float, send: float
) -> None:
    equal = [forward] * 2, [backward] * 2
    order = one_forward_one_backward(2, micro_batches)
    sends = {"point_to_point": [2 * send] * 2, "received": [0.0, send]}
    form = closed_form(*equal, micro_batches, **sends)
    assert form == pytest.approx(played(order, *equal, sends=[send] * 2))


@pytest.mark.parametrize("longer", [1.0, 4.0, 8.0], ids="sends of {} passes".format)
@pytest.mark.parametrize("slow", ["all", "every second", "one"])
def test_sends_that_queue_are_counted(longer: float, slow: str) -> None:
    """Stages of passes that differ by 40 %, and sends that take longer than passes: the formula is
    never longer than the played pipeline, and not much shorter."""
    draw, shares = np.random.default_rng(0), []
    for _ in range(150):
        stages, micro_batches = int(draw.integers(2, 9)), int(draw.choice([1, 2, 3, 4, 6, 8, 16]))
        forward = np.exp(0.4 * draw.standard_normal(stages))
        boundary = np.arange(stages)
        keeps = {
            "all": boundary >= 0,
            "every second": boundary % 2 == 1,
            "one": boundary == draw.integers(stages - 1),
        }
        send = np.where(keeps[slow], 1.5 * longer * draw.uniform(0.5, 1.5), 0.01)
        passes = forward.tolist(), (2 * forward).tolist()
        order = one_forward_one_backward(stages, micro_batches)
        time = played(order, *passes, sends=send.tolist())
        sends_s = {
            "point_to_point": (2 * send).tolist(),
            "received": [0.0, *send[:-1].tolist()],
        }
        shares.append(closed_form(*passes, micro_batches, **sends_s) / time)
    assert max(shares) <= 1 + 1e-9
    assert np.mean(shares) > 0.98
    assert min(shares) > 0.88


def test_one_slow_boundary_costs_a_round_of_its_two_stages() -> None:
    """Four stages on two nodes: each micro-batch waits for half of there and back."""
    equal, sends = ([1.0] * 4, [2.0] * 4), [0.0, 0.5, 0.0, 0.0]
    at = {
        count: closed_form(*equal, count, point_to_point=[2 * send for send in sends])
        for count in (40, 80)
    }
    assert (at[80] - at[40]) / 40 == pytest.approx(3.0 + 0.5)
    assert at[80] == pytest.approx(
        played(one_forward_one_backward(4, 80), *equal, sends=sends), rel=5e-3
    )


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.integers(1, 16))
def test_two_stages_are_exact(times: list[float], micro_batches: int) -> None:
    forward, backward = times[:2], times[-2:]
    time = played(one_forward_one_backward(2, micro_batches), forward, backward)
    assert closed_form(forward, backward, micro_batches) == pytest.approx(time)


def test_a_slow_stage_hides_the_passage_through_those_after_it() -> None:
    # It runs three forwards ahead, 6, while its first micro-batch is away for 3 x 2.
    assert closed_form([2, 1, 1, 1], [4, 1, 1, 1], 8) == pytest.approx(8 * 6)
    published = 7 * 6 + (6 + 2 + 2 + 2)
    assert published > 8 * 6


@pytest.mark.parametrize("most_sent", [0.0, 1.0])
@pytest.mark.parametrize(("spread", "short"), [(0.1, 0.02), (0.75, 0.12)])
@given(data=st.data())
def test_uneven_stages_are_near_what_is_played_and_never_longer(
    spread: float, short: float, most_sent: float, data: st.DataObject
) -> None:
    near_one = st.floats(1 - spread, 1 + spread)
    extra = st.one_of(st.just(0.0), st.floats(0, 6))
    times = data.draw(st.lists(st.tuples(near_one, near_one, extra, extra), min_size=1, max_size=6))
    # Inside of nodes a send takes a tenth of what it takes across them.
    slow, in_node = data.draw(st.floats(0, most_sent)), data.draw(st.integers(1, 4))
    sends = [slow if (stage + 1) % in_node == 0 else slow / 10 for stage in range(len(times))]
    micro_batches = data.draw(st.integers(1, 24))
    forward, backward, before, after = map(list, zip(*times, strict=True))
    order = one_forward_one_backward(len(times), micro_batches)
    time = played(order, forward, backward, before, after, sends)
    there_and_back = [2 * send for send in sends]
    form = closed_form(forward, backward, micro_batches, before, after, there_and_back)
    assert (1 - short) * time <= form <= time * (1 + 1e-9)


def test_longer_parts_never_make_it_shorter() -> None:
    draw = np.random.default_rng(0)
    for _ in range(1000):
        stages, micro_batches = int(draw.integers(1, 7)), int(draw.integers(1, 12))
        parts = draw.uniform(0.1, 3, (5, stages))
        longer = parts.copy()
        longer[draw.integers(5), draw.integers(stages)] *= 1.3
        before, after = (
            closed_form(forward.tolist(), backward.tolist(), micro_batches, *extras.tolist())
            for forward, backward, *extras in (parts, longer)
            for extras in [np.array(extras)]
        )
        assert after >= before * (1 - 1e-12)


def telling(times: StageTimes) -> np.ndarray:
    """What may be compared: a micro-batch's passage there and back, whole passes, the last backward
    pass too, what is waited for in the first and the last, these with extras, sends, rounds."""
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    return np.stack(
        [
            *(times.through_forward_s, times.through_backward_s),
            *(times.forward_s, times.backward_s, times.backward_s + times.within_backward_s),
            *(first, last, first + times.begin_s, last + times.end_s),
            times.backward_s + times.within_backward_s + times.end_s,
            *(times.after_first_s, times.point_to_point_s),
            times.point_to_point_s / 2 + times.first_send_late_s,
            times.point_to_point_s + times.end_send_late_s + times.end_return_late_s,
            times.point_to_point_s / 2 + times.end_return_late_s,
            *(times.received_s, times.within_round_s, times.round_late_s, times.queued_late_s),
            *(times.held_forward_s, times.forward_s - times.held_forward_s, times.held_backward_s),
            times.through_backward_s + times.left_backward_s,
            last + times.end_s + times.left_backward_s,
            times.gone_backward_s,
            times.gone_backward_s + times.within_backward_s,
            *(getattr(times, name) for name in ISSUED),
        ]
    )


def test_a_gradient_goes_back_before_its_pass_is_over() -> None:
    """Of a backward pass of two seconds, half is left when its gradient goes back."""
    passes = {"through_backward": [1.0, 1.0], "left_backward": [1.0, 1.0]}
    # Two forwards and two gradients, and what is left of the first stage's pass.
    assert closed_form([1.0, 1.0], [2.0, 2.0], 1, **passes) == 5.0
    one = {name: own[:1] for name, own in passes.items()}
    assert closed_form([1.0], [2.0], 3, **one) == 9.0


@pytest.mark.parametrize(
    ("host", "seconds"),
    [
        # Faster than its passes; slower, and the last block and the step come after all is issued.
        ((0.5, 1.0, 0.1, 0.2, 1.0), 11.0),
        ((2.0, 4.0, 0.1, 0.2, 1.0), 3 * 6.0 + 1.0),
        # Slower, but ahead while the stage begins.
        ((1.5, 2.0, 0.1, 0.2, 1.0), 3 * 3.5 + 1.0),
    ],
)
def test_a_host_issues_passes_from_the_beginning_on(
    host: tuple[float, ...], seconds: float
) -> None:
    issued = {name.removesuffix("_s"): [own] for name, own in zip(ISSUED, host, strict=True)}
    assert closed_form([1.0], [2.0], 3, delta_forward=[2.0], **issued) == pytest.approx(seconds)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_that_are_nowhere_longer_never_make_it_longer(stages: int) -> None:
    draw, rows, trials = np.random.default_rng(stages), 4000, 0
    names = [entry.name for entry in fields(StageTimes)]
    parts = {name: draw.exponential(1.0, (rows, stages)) for name in names}
    for _ in range(48):
        # Some parts of one stage are longer, and others are shorter.
        changed = {name: table.copy() for name, table in parts.items()}
        stage = draw.integers(stages)
        for table in changed.values():
            table[:, stage] *= draw.choice([0.5, 0.9, 1, 1, 1, 1, 1, 1, 1.1, 1.3], rows)
        before, after = (_longer_than_passages(some) for some in (parts, changed))
        fewer = (telling(after) <= telling(before) * (1 + 1e-12)).all(axis=(0, 2))
        micro_batches = draw.integers(1, 12, rows)
        longer = iteration_s(after, micro_batches) > iteration_s(before, micro_batches) * (1 + 1e-9)
        assert not (longer & fewer).any()
        trials += int((fewer & (telling(after) != telling(before)).any(axis=(0, 2))).sum())
    assert trials > 1000


def _longer_than_passages(parts: dict[str, np.ndarray]) -> StageTimes:
    passed = {
        f"{way}_s": parts[f"{way}_s"] + parts[f"through_{way}_s"] + parts[f"held_{way}_s"]
        for way in ("forward", "backward")
    }
    passed["backward_s"] = passed["backward_s"] + parts["left_backward_s"]
    return StageTimes(**{**parts, **passed})


@pytest.mark.parametrize(
    ("forward", "backward", "micro_batches"),
    [
        # The second stage hands on faster than the third takes, and is held up by it at both ends.
        ([0.5, 1.0, 0.85, 0.1], [1.0, 2.0, 1.65, 0.16], 4),
        # The third stage runs all its forwards before the fourth gives the first gradient back.
        ([0.3, 0.05, 0.8, 0.65, 0.15], [0.65, 0.1, 1.85, 1.55, 0.3], 8),
        # Fewer micro-batches than stages: the last of them holds up the first gradient.
        ([1.0, 3.0, 1.0, 0.1], [5.0, 2.0, 1.5, 0.2], 2),
    ],
)
def test_gradients_wait_for_micro_batches_that_go_before_them(
    forward: list[float], backward: list[float], micro_batches: int
) -> None:
    order = one_forward_one_backward(len(forward), micro_batches)
    time = played(order, forward, backward)
    assert closed_form(forward, backward, micro_batches) == pytest.approx(time)
