"""Work side by side: what must hold of its time, of fits, and of shapes that nobody measured."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mistlab import catalog
from mistlab.calibration.fitted_slowdowns import OverlapRows, combined, errors, fit
from mistlab.calibration.tables import read_overlap_table
from mistlab.core.values import FieldError, InputError
from mistlab.cost.kernels import slowdowns_of_group
from mistlab.cost.layer_recurrences import slot_after
from mistlab.cost.side_by_side import BITS, BLOCK, SlowedBy, factors_of, overlapped
from mistlab.machine.slowdowns import SHARED_SETS, STREAMS, GroupSlowdowns, Interference, Slowdown

NO_SLOWDOWN = GroupSlowdowns(gpus_in_node=2, nodes=1, slowdowns=())

times = st.lists(st.floats(0, 10), min_size=4, max_size=4)
factor_lists = st.lists(st.floats(1, 5), min_size=28, max_size=28)


def group(factors: list[float], gpus_in_node: int = 2, nodes: int = 1) -> GroupSlowdowns:
    left = iter(factors)
    slowdowns = tuple(
        Slowdown(streams=streams, factors=tuple(next(left) for _ in streams))
        for streams in SHARED_SETS
    )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=slowdowns)


def seconds(alone: list[float], of_group: GroupSlowdowns) -> float:
    return float(overlapped(np.array([alone]), factors_of(of_group))[0])


@pytest.mark.parametrize("stream", range(4))
def test_work_on_one_stream_takes_its_own_time(stream: int) -> None:
    alone = [0.0] * 4
    alone[stream] = 3.0
    assert seconds(alone, group([2.0] * 28)) == 3.0


def test_nothing_takes_no_time() -> None:
    assert seconds([0.0] * 4, group([2.0] * 28)) == 0.0


@given(times)
def test_without_slowdowns_the_longest_part_decides(alone: list[float]) -> None:
    assert seconds(alone, NO_SLOWDOWN) == pytest.approx(max(alone))


@given(times, factor_lists)
def test_time_lies_between_the_longest_part_and_the_sum(
    alone: list[float], factors: list[float]
) -> None:
    found = seconds(alone, group(factors))
    assert max(alone) - 1e-12 <= found <= sum(alone) + 1e-12


@given(times, factor_lists, st.floats(0.1, 10))
def test_time_scales_with_the_work(alone: list[float], factors: list[float], by: float) -> None:
    scaled = seconds([by * part for part in alone], group(factors))
    assert scaled == pytest.approx(by * seconds(alone, group(factors)), rel=1e-9, abs=1e-12)


def test_the_shorter_of_two_ends_first_and_the_longer_goes_on_alone() -> None:
    slowed = GroupSlowdowns(
        gpus_in_node=2,
        nodes=1,
        slowdowns=(Slowdown(streams=("compute", "gpu_to_gpu"), factors=(1.25, 2.0)),),
    )
    # Communication ends at 2; compute has done 1.6 of its 4 by then.
    assert seconds([4.0, 1.0, 0.0, 0.0], slowed) == pytest.approx(2.0 + 2.4)


def test_four_streams_end_one_after_another() -> None:
    # Every factor is the number of busy streams: they share one resource fairly.
    shared = group([float(len(streams)) for streams in SHARED_SETS for _ in streams])
    assert seconds([1.0, 2.0, 3.0, 4.0], shared) == pytest.approx(10.0)


def slots_in_turn(
    layers: Sequence[tuple[Sequence[float], float]], slowed: SlowedBy, slots: int
) -> list[float]:
    """The seconds of slots of layers in turn, whose streams work for so long alone, of the link's
    for so long to reduce what then leaves."""
    left, lasting = (0.0, 0.0), []
    for number in range(slots):
        (computed, on_link, copied, _), reduced_s = layers[number % len(layers)]
        (_, _, _, leaves), own_s = layers[(number + 1) % len(layers)]
        of_slot = computed, left[0], on_link - reduced_s, own_s, 0.0, copied, left[1], leaves
        work = np.array(of_slot)[:, None]
        lasting.append(float(slot_after(work, slowed)[0][0]))
        left = float(work[3, 0]), float(work[7, 0])
    return lasting


def test_slots_whose_copies_last_longer_than_their_layers_alternate() -> None:
    """Copies back take four times as long beside what leaves, which takes as long as alone."""
    slowed = GroupSlowdowns(
        gpus_in_node=2,
        nodes=1,
        slowdowns=(
            Slowdown(streams=("host_to_device", "device_to_host"), factors=(4.0, 1.0)),
            Slowdown(
                streams=("compute", "host_to_device", "device_to_host"), factors=(1.0, 4.0, 1.0)
            ),
        ),
    )
    lasts = slots_in_turn(
        [((3.0, 0.0, 2.0, 2.0), 0.0)], SlowedBy.of_all(factors_of(slowed), 1), slots=4
    )
    # Nothing is left at first, and the slot is its arithmetic. The next copy is beside what is left
    # for 2, alone until the layer is done at 3, and beside what the layer leaves for another 2.
    assert lasts == pytest.approx([3.0, 5.0, 3.0, 5.0])


def test_what_leaves_waits_for_its_reduction() -> None:
    free = SlowedBy.of_all(np.ones((16, 4)), 1)
    lasts = slots_in_turn([((1.0, 3.0, 0.0, 2.0), 2.0)], free, slots=3)
    # Nothing is left at first. Then the reduction of the layer before, and what it leaves;
    # meanwhile the link gathers and reduces the slot's own layer for one of two seconds. The next
    # slot is left with the rest.
    assert lasts == pytest.approx([1.0, 4.0, 3.0])


def test_slots_of_two_kinds_take_turns() -> None:
    # What the first kind's layer leaves takes 4, what the second's leaves 1; copies take 3 and 2.
    kinds = [((1.0, 0.0, copied, left), 0.0) for copied, left in ((3.0, 1.0), (2.0, 4.0))]
    lasts = slots_in_turn(kinds, SlowedBy.of_all(np.ones((16, 4)), 1), slots=4)
    # The first slot's own layer begins to leave at 1, and 2 of 4 are over at 3; the second slot
    # waits for the other 2, and nothing of what its layer leaves keeps the first kind waiting.
    assert lasts == pytest.approx([3.0, 2.0, 3.0, 2.0])


def test_many_cases_take_what_each_takes_by_itself() -> None:
    draw = np.random.default_rng(0)
    alone: NDArray[np.float64] = draw.choice([0.0, 1.0, 2.0, 3.0], (BLOCK + 300, 4))
    factors = factors_of(group([1.0 + i % 7 / 10 for i in range(28)]))
    order = draw.permutation(len(alone))
    assert (overlapped(alone, factors)[order] == overlapped(alone[order], factors)).all()
    pieces = [overlapped(piece, factors) for piece in np.array_split(alone, 40)]
    assert (overlapped(alone, factors) == np.concatenate(pieces)).all()


def rows_of(true: GroupSlowdowns, seed: int, rows: int = 800) -> OverlapRows:
    draw = np.random.default_rng(seed)
    busy = draw.random((rows, 4)) < 0.7
    alone: NDArray[np.float64] = np.where(busy, draw.choice([1.0, 2.0, 3.0, 4.0], (rows, 4)), 0.0)
    alone *= draw.uniform(0.9, 1.1, alone.shape)
    found = OverlapRows(alone=alone, together=overlapped(alone, factors_of(true)))
    return found.chosen(found.shared)


def beside_compute(transfers: tuple[str, ...]) -> tuple[float, ...]:
    """Uneven factors; compute takes 4 % of each transfer's speed."""
    return tuple((1 + 0.3 * i + 0.2 * len(transfers)) * 1.04 for i in range(len(transfers)))


def test_a_fit_finds_the_slowdowns_that_made_the_rows() -> None:
    factors = {
        streams: (1.3, *beside_compute(streams[1:]))
        if streams[0] == "compute"
        else tuple(factor / 1.04 for factor in beside_compute(streams))
        for streams in SHARED_SETS
    }
    true = group([factor for streams in SHARED_SETS for factor in factors[streams]])
    fitted = fit(rows_of(true, 0), gpus_in_node=2, nodes=1)
    assert np.abs(errors(rows_of(true, 1), fitted)).mean() < 2e-3
    assert np.abs(errors(rows_of(true, 1), NO_SLOWDOWN)).mean() > 0.1


def test_streams_that_take_turns_are_fitted_as_no_slower_than_in_turn() -> None:
    # Closed forms tell no slower factors from these; whoever plays tasks one by one does.
    levels = [
        (compute, 0.0, to_device, to_host)
        for compute, to_device, to_host in product((0.0, 1.0, 2.0, 4.0), repeat=3)
    ]
    rows = OverlapRows(alone=np.array(levels), together=1.05 * np.sum(levels, axis=1))
    found = fit(rows.chosen(rows.shared), gpus_in_node=2, nodes=1).slowdowns
    assert len(found) == 4
    for slowdown in found:
        assert 0.99 < sum(1 / factor for factor in slowdown.factors) < 1.01


def test_sets_of_streams_without_rows_get_no_slowdown() -> None:
    rows = rows_of(group([1.5] * 28), 0)
    fitted = fit(rows.chosen(rows.alone[:, 0] == 0), gpus_in_node=2, nodes=1)
    assert {slowdown.streams for slowdown in fitted.slowdowns} == {
        streams for streams in SHARED_SETS if "compute" not in streams
    }


shapes = st.tuples(st.integers(1, 64), st.integers(1, 1024))
communicating = shapes.filter(lambda shape: shape != (1, 1))


def of_shape(machine: Interference, shape: tuple[int, int]) -> GroupSlowdowns:
    return slowdowns_of_group(machine, gpus_in_node=shape[0], nodes=shape[1])


def as_table(groups: Sequence[GroupSlowdowns]) -> NDArray[np.float64]:
    return np.array([factors_of(one) for one in groups])


def linked(gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """Links that are shared fairly by copies and, in each direction, by the traffic of a group."""
    traffic = 1 - 1 / (gpus_in_node * nodes)
    transfers = {
        streams: [stream for stream in streams if stream != "compute"] for streams in SHARED_SETS
    }
    fair = [
        1.0
        if stream == "compute" or len(transfers[streams]) == 1
        else copies * (1.0 + (traffic if "gpu_to_gpu" in streams else 0.0))
        for streams in SHARED_SETS
        for copies in [sum(name != "gpu_to_gpu" for name in transfers[streams])]
        for stream in streams
    ]
    return group(fair, gpus_in_node, nodes)


@given(st.lists(shapes, min_size=1, max_size=6, unique=True), st.booleans())
def test_shapes_that_were_measured_are_as_measured(
    measured: list[tuple[int, int]], shared_links: bool
) -> None:
    groups = tuple(group([1.5 + i / 10] * 28, *shape) for i, shape in enumerate(measured))
    machine = Interference(shared_links=shared_links, groups=groups)
    assert [of_shape(machine, shape) for shape in measured] == list(groups)


@given(st.lists(shapes, min_size=1, max_size=6, unique=True), shapes, factor_lists)
def test_shapes_that_are_alike_make_others_like_them(
    measured: list[tuple[int, int]], other: tuple[int, int], factors: list[float]
) -> None:
    machine = Interference(groups=tuple(group(factors, *shape) for shape in measured))
    true = factors_of(group(factors))
    assert factors_of(of_shape(machine, other)) == pytest.approx(true, rel=1e-6)


@given(st.lists(st.tuples(shapes, factor_lists), min_size=1, max_size=6), shapes, st.booleans())
def test_no_shape_speeds_work_up(
    measured: list[tuple[tuple[int, int], list[float]]], other: tuple[int, int], shared_links: bool
) -> None:
    groups = tuple(group(factors, *shape) for shape, factors in measured)
    found = factors_of(of_shape(Interference(shared_links=shared_links, groups=groups), other))
    assert np.isfinite(found).all()
    assert (found >= 1).all()
    backwards = Interference(shared_links=shared_links, groups=groups[::-1])
    if other not in [shape for shape, _ in measured]:
        assert factors_of(of_shape(backwards, other)) == pytest.approx(found, rel=1e-6)


@given(st.lists(communicating, min_size=1, max_size=4, unique=True), communicating)
def test_links_that_are_shared_carry_in_all_shapes_what_they_carry_in_one(
    measured: list[tuple[int, int]], other: tuple[int, int]
) -> None:
    groups = tuple(linked(*shape) for shape in measured)
    found = of_shape(Interference(shared_links=True, groups=groups), other)
    assert factors_of(found) == pytest.approx(factors_of(linked(*other)), rel=1e-6)


def test_shapes_within_a_node_say_nothing_of_those_that_cross_nodes() -> None:
    within, across = group([1.2] * 28, 8, 1), group([2.0] * 28, 1, 2)
    machine = Interference(groups=(within, across))
    assert as_table([of_shape(machine, (4, 1))]) == pytest.approx(as_table([within]))
    assert as_table([of_shape(machine, (8, 2))]) == pytest.approx(as_table([across]))


def test_a_shape_between_two_lies_between_them() -> None:
    groups = (group([1.2] * 28, 2, 1), group([2.0] * 28, 8, 1))
    found = as_table([of_shape(Interference(groups=groups), (4, 1))])
    low, high = as_table(groups)
    busy = low > 1
    assert ((low < found[0]) & (found[0] < high))[busy].all()


@pytest.mark.parametrize("shared_links", [True, False])
def test_measurements_tell_whether_links_are_shared(shared_links: bool) -> None:
    measured = [(2, 1), (4, 1), (8, 1)]
    groups = [linked(*shape) if shared_links else linked(4, 1) for shape in measured]
    groups = [
        replace(one, gpus_in_node=shape[0], nodes=shape[1])
        for one, shape in zip(groups, measured, strict=True)
    ]
    machine = combined(groups, [rows_of(one, 0) for one in groups])
    assert machine.shared_links == shared_links
    assert machine.groups == tuple(groups)


@pytest.mark.parametrize(
    ("streams", "factors", "message"),
    [
        (("compute",), (1.0,), "give two to four of compute, gpu_to_gpu"),
        (("gpu_to_gpu", "compute"), (1.0, 1.0), "in this order"),
        (("compute", "gpu_to_gpu"), (1.0,), "has 1 numbers for 2 streams: give as many"),
        (("compute", "gpu_to_gpu"), (1.0, 0.9), "0.9 is too small"),
    ],
)
def test_slowdowns_that_mean_nothing_are_refused(
    streams: tuple[str, ...], factors: tuple[float, ...], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        Slowdown(streams=streams, factors=factors)


@pytest.mark.parametrize("name", ["l4-24gb", "a100-40gb"])
def test_calibrated_hardware_says_from_what(name: str) -> None:
    hardware = catalog.hardware(name)
    assert hardware.interference is not None
    assert hardware.provenance.interference is not None
    assert "held-out mean error" in hardware.provenance.interference.source
    for shape in hardware.interference.groups:
        assert {slowdown.streams for slowdown in shape.slowdowns} == set(SHARED_SETS)
        assert (factors_of(shape)[BITS] == 1).all()


HEADER = (
    "generation,intra_group,inter_group,latency_ms,"
    "iso_compute_ms,iso_g2g_ms,iso_c2g_ms,iso_g2c_ms\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column .*latency_ms.* is missing"),
        (HEADER.replace("latency_ms,", ""), "column latency_ms is missing: give a table with"),
        (HEADER, "has no rows"),
        (
            HEADER + "a,2,1,3,1,2,0,0\na,2,1,-3,1,2,0,0\n",
            "line 3: column latency_ms: -3 is negative",
        ),
        (HEADER + "a,2,1,0,1,2,0,0\n", "line 2: column latency_ms: 0 is not positive"),
        (HEADER + "a,2,1,3,nan,2,0,0\n", "line 2: column iso_compute_ms: nan is negative or not"),
        (HEADER + "a,2,1,3,one,2,0,0\n", "line 2: column iso_compute_ms: 'one' is not a number"),
        (HEADER + "a,2,1,3\n", "line 2: column iso_compute_ms: is empty"),
        (HEADER + "a,2,1,3,1,2,0,0\nb,2,1,3,1,2,0,0\n", "a, b, which cannot be fitted together"),
    ],
)
def test_bad_rows_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as refused:
        read_overlap_table(path)
    assert str(refused.value).startswith(str(path))


def test_repeated_and_incomplete_rows_are_dropped_and_single_streams_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.csv"
    row, other = "a,2,1,3,1,2,0,0\n", "a,2,1,3.1,1,2,0,0\n"
    single, incomplete = "a,2,1,2,0,2,0,0\n", "a,2,1,3,1,,0,0\n"
    path.write_text(HEADER + row + other + row + single + incomplete, encoding="utf-8")
    table = read_overlap_table(path, campaign="a")
    assert (table.origin.duplicates, table.incomplete) == (1, 1)
    (rows,) = table.groups.values()
    assert rows.together.tolist() == pytest.approx([0.003, 0.0031])
    assert rows.alone[0].tolist() == pytest.approx([0.001, 0.002, 0, 0])


def test_streams_are_named_once() -> None:
    assert len(set(STREAMS)) == len(BITS) == 4
