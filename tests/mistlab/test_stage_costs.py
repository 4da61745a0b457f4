"""Times of stages against a walk through their slots, and what must always hold."""

from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.side_by_side import overlapped
from mistlab.cost.slot_work import first_pass_s
from mistlab.cost.stage import StageSlots, StageTimeModel
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import STREAMS
from mistlab.network.link_times import GroupSpread
from mistlab.stages.stage_batch import StageBatch, StageSeconds
from tests.mistlab.slots_by_hand import (
    Slot,
    beside_endless_send,
    evicted,
    lasting_s,
    lost_beside,
    stepping_in_turn,
    together,
)
from tests.workloads import workload_of

WORK = workload_of("gpt3-2.7b", 2048, 64)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=2, gpus_per_node=8)


def model_of(
    engine: str = "mistlab",
    cluster: Cluster = CLUSTER,
    *,
    overlaps: bool = False,
    **options: object,
) -> StageTimeModel:
    tasks = TaskModel.of(WORK, cluster, ENGINES[engine], overlap_communication=overlaps)
    template = replace(tasks.template, **options)  # type: ignore[arg-type]
    return StageTimeModel(tasks=replace(tasks, template=template))


OFFLOADED = ("weights", "gradients", "optimizer", "activations")


def candidates(rows: int, seed: int = 0) -> StageBatch:
    draw = np.random.default_rng(seed)
    layers = draw.integers(1, 9, rows)
    return StageBatch(
        layers=layers,
        checkpointed_layers=draw.integers(0, layers + 1),
        data_parallel=2 ** draw.integers(0, 4, rows),
        tensor_parallel=2 ** draw.integers(0, 3, rows),
        micro_batch=draw.integers(1, 4, rows),
        zero=draw.integers(0, 4, rows),
        in_flight=draw.integers(1, 5, rows),
        has_embedding=draw.integers(0, 2, rows),
        has_head=draw.integers(0, 2, rows),
        first_rank=np.zeros(rows, dtype=int),
        **{f"offload_{kind}": draw.choice([0.0, 0.25, 1.0], rows) for kind in OFFLOADED},
    )


def seconds_of(model: StageTimeModel, batch: StageBatch, row: int) -> TaskSeconds:
    """The seconds of the tasks of one candidate's strategy."""
    return model.tasks.seconds(
        {name: getattr(batch, name)[row : row + 1] for name in task_columns()}
    )


def types_of(model: StageTimeModel, batch: StageBatch, row: int) -> list[int]:
    """The types of the layers of one candidate's stage, in order."""
    recomputed, last = batch.checkpointed_layers[row], len(model.tasks.types.names) - 1
    plain = [1] * (batch.layers[row] - recomputed)
    opening, ending = [0] * batch.has_embedding[row], [last] * batch.has_head[row]
    return [*opening, *plain, *[2] * recomputed, *ending]


# Slots by position from the stage's first layer.
SlotTimes = dict[int, Slot]


def walked(model: StageTimeModel, batch: StageBatch, row: int, phase: str) -> tuple[SlotTimes, int]:
    """The slots of one candidate, and how many layers there are."""
    template, types = model.tasks.template, types_of(model, batch, row)
    seconds = seconds_of(model, batch, row)
    upwards = "forward" in phase
    slots: SlotTimes = {}
    for here in range(-template.depth, len(types) + template.depth):
        alone, fetched = np.zeros((1, len(STREAMS))), {"P": 0.0, "U": 0.0}
        for task in template.phases[phase]:
            ahead = {"here": 0, "ahead": 1, "behind": -1}[task.place] * template.depth
            place = here + (ahead if upwards else -ahead)
            if 0 <= place < len(types) and batch.zero[row] >= task.from_zero:
                duration = seconds.alone(task.kind, task.direction or "")[types[place], 0]
                alone[0, STREAMS.index(task.stream)] += duration
                if task.place == "ahead" and task.kind in fetched and "first" not in phase:
                    fetched[task.kind] = duration
        # Weights of the next layer are swapped in before they are gathered.
        one_ahead = template.depth == 1 and batch.zero[row] == 3 and fetched["P"] > 0
        slots[here] = Slot(alone, (fetched["P"], fetched["U"]) if one_ahead else (0.0, 0.0))
        if 0 <= here < len(types):
            key = "forward" if upwards else "backward"
            alone[0, STREAMS.index("compute")] += seconds.tensor_s[key][types[here], 0]
    return slots, len(types)


def with_steps_in_turn(
    model: StageTimeModel,
    batch: StageBatch,
    row: int,
    slots: SlotTimes,
    factors: np.ndarray,
) -> SlotTimes:
    """The slots of the first pass, of which those between alike layers last at least as long as
    several in turn, in which states leave when their block has stepped."""
    leaves = batch.offload_optimizer[row] or batch.offload_weights[row]
    if model.tasks.template.depth != 1 or not leaves:
        return slots
    seconds = seconds_of(model, batch, row)
    first, plain = batch.has_embedding[row], batch.layers[row] - batch.checkpointed_layers[row]
    found = dict(slots)
    for kind, start, end in ((1, 0, plain), (2, plain, batch.layers[row])):
        of_block = {
            task.name: float(seconds.alone(task.kind, task.direction or "")[kind, 0])
            * (batch.zero[row] >= task.from_zero)
            for task in model.tasks.template.phases["first_forward"]
        }
        of_block["F"] += float(seconds.tensor_s["forward"][kind, 0])
        mean_s = stepping_in_turn(of_block, factors)
        for place in range(first + start + 1, first + end - 1):
            found[place] = slots[place]._replace(least=max(slots[place].least, mean_s))
    return found


def first_passes_s(model: StageTimeModel, batch: StageBatch) -> np.ndarray:
    """The first passes that have no slots, since blocks run their optimizer steps when they can
    (``test_stepping_slots.py``); zero for others."""
    slots = StageSlots.of(model.tasks, batch)
    played = first_pass_s(slots.seconds, slots.strategies, slots.stages, "own")
    return np.zeros(len(batch)) if played is None else played[0]


def first_in_slots(
    model: StageTimeModel, batch: StageBatch, row: int, slots: SlotTimes, factors: np.ndarray
) -> float:
    """The first pass with the slots before it, less what leaves the last blocks after it."""
    layers, depth = len(types_of(model, batch, row)), model.tasks.template.depth
    steps = with_steps_in_turn(model, batch, row, slots, factors)
    return sum(lasting_s(steps[at], factors) for at in range(-depth, layers)) + sum(
        min(0.0, float(overlapped(slot.alone, factors, STAYING)[0]) - lasting_s(slot, factors))
        for at, slot in ((at, slots[at]) for at in range(layers))
        if leaves_last(batch, row, at + depth, layers)
    )


def shared_turn(
    batch: StageBatch, row: int, forward: SlotTimes, backward: SlotTimes
) -> np.ndarray | None:
    """What the streams hold while the first layer computes beside what is left of a backward pass;
    None if the layer waits for it."""
    fetches = batch.zero[row] == 3 or batch.offload_weights[row] > 0
    left = forward[-1].alone + backward[-1].alone
    if fetches or (batch.zero[row] == 2) == (batch.offload_gradients[row] > 0) or not left.any():
        return None
    left[0, 0] += forward[0].alone[0, 0]
    return left


# The streams of a slot without copies to the host.
STAYING = [stream for stream in STREAMS if stream != "device_to_host"]


def leaves_last(batch: StageBatch, row: int, ahead: int, layers: int) -> bool:
    """Whether nobody waits for what a slot of the first pass brings to the host: ``ahead`` of it is
    no layer with state or weights to bring there, nor with activations behind them."""
    if not (batch.offload_optimizer[row] or batch.offload_weights[row]):
        return False
    head = bool(batch.has_head[row]) and not batch.offload_activations[row]
    return ahead >= layers - int(head)


def left_of(lowest: Slot, factors: np.ndarray) -> float:
    """What is left of the slot of a backward pass's last layer when the layer has computed, and its
    gradient goes back."""
    return lasting_s(lowest, factors) - float(overlapped(lowest.alone, factors, ("compute",))[0])


def with_barriers(batch: StageBatch) -> StageBatch:
    """The candidates without what is played without barriers: passes that data leaves
    (``tests/simulators/test_backward_passes.py``), and first passes of first stages with offloaded
    weights (``test_stepping_slots.py``).
    """
    stays = {f"offload_{kind}": np.zeros(len(batch)) for kind in ("gradients", "activations")}
    weights = batch.offload_weights * (1 - batch.has_embedding)
    return batch.with_columns(**stays, offload_weights=weights)


COMPUTE, LINK, TO_HOST = map(STREAMS.index, ("compute", "gpu_to_gpu", "device_to_host"))
OTHERS = [stream for stream in STREAMS if stream != "gpu_to_gpu"]


def late_by_last_send(
    last: SlotTimes,
    below: Iterable[int],
    factors: np.ndarray,
    sent_s: float,
    reduced_s: float | None,
) -> float:
    """By how much a stage ends later because its last gradient is sent beside reductions (those
    ``below`` the layers if not given), then beside copies to the host.
    """
    left_s = sum((last[at].alone[0] for at in below), np.zeros(len(STREAMS)))
    reduced_s = min(sent_s, left_s[LINK] if reduced_s is None else reduced_s)
    slowed = factors[(1 << LINK) + (1 << TO_HOST)]
    beside_s = min(left_s[TO_HOST] * slowed[TO_HOST], (sent_s - reduced_s) * slowed[LINK])
    return float(reduced_s + beside_s * (1 - 1 / slowed[TO_HOST]))


def reduced_in_turn(layers: list[tuple[float, float]], factors: np.ndarray) -> tuple[float, float]:
    """When the last of the layers has computed, and when the gradients of all others are reduced:
    each layer is a time to compute and a time to reduce, and reductions queue."""
    now, queue, left = 0.0, 0.0, 0.0
    both = factors[(1 << COMPUTE) + (1 << LINK)]
    for place, (compute_s, _) in enumerate(layers):
        queue += layers[place - 1][1] if place else 0.0
        left = compute_s
        while left > 0:
            step = min(left * both[COMPUTE], queue * both[LINK]) if queue > 0 else left
            left -= step / both[COMPUTE] if queue > 0 else step
            queue = queue - step / both[LINK] if queue > 0 else 0.0
            left, queue = (0.0 if rest < 1e-15 else rest for rest in (left, queue))
            now += step
    return now, now + queue


def last_pass(
    last: SlotTimes, layers: int, below: range, factors: np.ndarray, *, queues: bool
) -> tuple[float, float]:
    """The seconds of the last backward pass without reductions and with all of them, which run slot
    by slot unless they queue."""
    below_s = sum(lasting_s(last[at], factors) for at in below)
    if queues:
        reduced_s = [last[at - 1].alone[0, LINK] if at else 0.0 for at in range(layers)]
        computed_s = [last[at].alone[0, COMPUTE] for at in range(layers)]
        of_layers = [*zip(computed_s, reduced_s, strict=True)][::-1]
        computing_s, ended_s = reduced_in_turn(of_layers, factors)
        return computing_s, ended_s + below_s
    slots = [last[at] for at in range(layers)]
    computing_s = sum(float(overlapped(one.alone, factors, OTHERS)[0]) for one in slots)
    return computing_s, sum(lasting_s(one, factors) for one in slots) + below_s


@pytest.mark.parametrize("depth", [1, 2])
def test_times_are_those_of_a_walk_through_the_slots(depth: int) -> None:
    batch = candidates(60) if depth > 1 else with_barriers(candidates(60))
    model = model_of(depth=depth)
    found = model(batch)
    played_s = first_passes_s(model, batch)
    for row in range(len(batch)):
        seconds = seconds_of(model, batch, row)
        ((_, factors),) = seconds.factors()

        def lasting(
            slots: Iterable[int], *works: SlotTimes, factors: np.ndarray = factors
        ) -> float:
            return sum(
                lasting_s(together(*(work[slot] for work in works)), factors) for slot in slots
            )

        (forward, layers), (backward, _), (first, _), (last, _) = (
            walked(model, batch, row, phase)
            for phase in ("forward", "backward", "first_forward", "last_backward")
        )
        inside, below, above = range(layers), range(-depth, 0), range(layers, layers + depth)
        # Between a backward pass and a forward one, and the other way round.
        turns = [
            [together(forward[slot], backward[slot]) for slot in slots] for slots in (below, above)
        ]
        at_first = lasting(below, forward, backward)
        shared = shared_turn(batch, row, forward, backward) if depth == 1 else None
        if shared is not None:
            at_first = float(overlapped(shared, factors)[0]) - forward[0].alone[0, 0]
        turning = at_first + lasting(above, forward, backward)
        if batch.offload_gradients[row] > 0:
            # A layer's passes wait until the gradients before have left; reductions go on.
            backward, last = (
                {at: slot._replace(least=evicted(slot.alone, factors)) for at, slot in of.items()}
                for of in (backward, last)
            )
        once = [lasting(inside, work) for work in (forward, backward)]
        assert found.through_forward_s[row] == pytest.approx(once[0], rel=1e-9)
        left = left_of(backward[0], factors) * (depth < 2)
        assert found.left_backward_s[row] == pytest.approx(left, rel=1e-9, abs=1e-12)
        assert found.through_backward_s[row] == pytest.approx(once[1] - left, rel=1e-9)
        # A pass is slowed by what the one before sends.
        sent_s = seconds.send_s[0] * (1 - batch.has_head[row])
        received_s = seconds.receive_s[0] * (1 - batch.has_embedding[row])
        # It is sent beside turns too, in which a layer computes or waits for weights of its group.
        gathers = batch.zero[row] == 3
        turn, back = ([one for one in of if gathers and one.alone[0, 1] > 0] for of in turns)
        turn = turn if shared is None else [Slot(shared)]
        forwards, gradients = (
            lost_beside(slots, factors, send_s)
            + lost_beside(
                [work[slot] for slot in inside],
                factors,
                max(send_s - beside_endless_send(slots, factors)[1], 0.0),
            )
            for slots, work, send_s in ((back, backward, sent_s), (turn, forward, received_s))
        )
        assert found.stable_s[row] == pytest.approx(
            sum(once) + turning + forwards + gradients, rel=1e-9
        )
        offloads = any(getattr(batch, f"offload_{kind}")[row] for kind in OFFLOADED)
        queues = depth == 1 and batch.zero[row] < 2 and not offloads
        computed_s, last_s = last_pass(last, layers, below, factors, queues=queues)
        # Three micro-batches of a single stage, from its first slot to its last.
        first_s = played_s[row] or first_in_slots(model, batch, row, first, factors)
        whole = (
            first_s
            + 2 * sum(once)
            + 2 * at_first
            + 3 * lasting(above, forward, backward)
            + last_s
            + 3 * forwards
            + 2 * gradients
        )
        stay = batch.zero[row] < 2 and batch.offload_gradients[row] == 0
        reduced_s = last_s - computed_s if stay else None
        whole += late_by_last_send(last, below, factors, received_s, reduced_s)
        whole += found.after_first_s[row]
        taken_s = 3 * found.stable_s[row] + found.delta_forward_s[row] + found.delta_backward_s[row]
        assert taken_s == pytest.approx(whole, rel=1e-9)


def columns_of(seconds: StageSeconds) -> np.ndarray:
    return np.stack([getattr(seconds, entry.name) for entry in fields(seconds)])


def test_a_candidate_does_not_depend_on_its_neighbours() -> None:
    model, batch = model_of(), candidates(500)
    whole = columns_of(model(batch))
    for rows in (np.arange(7), np.arange(500)[::-1], np.array([3, 3, 250])):
        assert columns_of(model(batch.chosen(rows))) == pytest.approx(whole[:, rows], rel=1e-12)


def test_a_stage_of_one_block_does_not_depend_on_longer_ones() -> None:
    # Where its gradients are sharded, a stage of two blocks reduces inside a pass, and this one at
    # its end.
    model, rows = model_of(), 60
    kept = dict.fromkeys([f"offload_{kind}" for kind in OFFLOADED], np.zeros(rows))
    alone = {"tensor_parallel": np.ones(rows, int), "layers": np.arange(rows) % 2 + 1}
    batch = candidates(rows).with_columns(
        **kept, **alone, checkpointed_layers=np.zeros(rows, int), zero=np.full(rows, 2)
    )
    whole = columns_of(model(batch))
    for row in range(rows):
        own = columns_of(model(batch.chosen(np.array([row]))))
        assert own == pytest.approx(whole[:, [row]], rel=1e-12)


def test_dense_and_sparse_sums_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(), candidates(500)
    sparse = columns_of(model(batch))
    monkeypatch.setattr("mistlab.core.distinct.DENSE", 10**9)
    assert columns_of(model(batch)) == pytest.approx(sparse, rel=1e-12)


def test_more_blocks_take_as_much_more_each() -> None:
    # Nothing is sent, so passes do not begin beside sends.
    batch = candidates(3).with_columns(
        layers=np.array([3, 4, 5]), checkpointed_layers=0, has_embedding=1, has_head=1
    )
    alike = batch.chosen(np.zeros(3, int))
    stable = model_of()(alike.with_columns(layers=np.array([3, 4, 5]))).stable_s
    assert stable[2] - stable[1] == pytest.approx(stable[1] - stable[0])


@pytest.mark.parametrize("override", ["inter_node_gbytes_per_s", "intra_node_gbytes_per_s"])
def test_more_bandwidth_never_slows_a_stage_that_does_not_contend(override: str) -> None:
    batch = candidates(300)
    engine = {"engine": "megatron"}
    usual = float(getattr(CLUSTER.hardware.node, override))
    slow, fast = (
        model_of(cluster=replace(CLUSTER, **{override: factor * usual}), **engine)(batch)
        for factor in (1.0, 4.0)
    )
    for name in ("forward_s", "backward_s"):
        assert (getattr(fast, name) <= getattr(slow, name) * (1 + 1e-12)).all()
    # A send has less of the link beside a pass that is shorter, but both together are no longer.
    slow_s, fast_s = (one.stable_s + one.point_to_point_s for one in (slow, fast))
    assert (fast_s <= slow_s * (1 + 1e-12)).all()
    step = slow.delta_backward_s - fast.delta_backward_s
    assert (step >= -1e-12).all()
    assert step.max() > 0


def test_what_overlaps_takes_no_longer_than_one_after_another() -> None:
    batch = candidates(300)
    overlapping, serial = model_of()(batch), model_of(depth=0)(batch)
    assert (overlapping.stable_s <= serial.stable_s * (1 + 1e-9)).all()
    assert (overlapping.stable_s < serial.stable_s * 0.99).any()


def test_a_baseline_steps_at_the_end_and_the_overlapped_engine_at_the_start() -> None:
    batch = candidates(2).with_columns(
        **{f"offload_{kind}": np.zeros(2) for kind in ("weights", "gradients", "activations")},
        offload_optimizer=np.zeros(2),
        data_parallel=np.ones(2, int),
    )
    ours, theirs = (model_of(engine)(batch) for engine in ("mistlab", "megatron"))
    assert (ours.delta_forward_s > 0).all()
    assert ours.delta_backward_s == pytest.approx(0, abs=1e-12)
    assert theirs.delta_forward_s == pytest.approx(0, abs=1e-12)
    assert theirs.delta_backward_s == pytest.approx(theirs.step_s)


def test_sends_across_nodes_take_longer() -> None:
    batch = candidates(2).with_columns(
        **{name: np.array([2, 2]) for name in ("data_parallel", "tensor_parallel")},
        micro_batch=np.ones(2, int),
        has_head=np.zeros(2, int),
        first_rank=np.array([0, 4]),
    )
    inside, across = model_of("megatron")(batch).point_to_point_s
    assert 0 < inside < across


def test_ranks_may_send_their_parts_of_activations_and_gather_them() -> None:
    batch = candidates(2).with_columns(
        **{name: np.array([2, 2]) for name in ("data_parallel", "tensor_parallel")},
        micro_batch=np.ones(2, int),
        zero=np.zeros(2, int),
        has_head=np.zeros(2, int),
        first_rank=np.array([0, 4]),
    )
    whole, parts = (
        model_of("megatron", sends=sends)(batch).point_to_point_s / 2
        for sends in ("overlapped", "split")
    )
    tasks = model_of("megatron").tasks
    for across, whole_s, parts_s in zip((False, True), whole, parts, strict=True):
        link = tasks.links.send(across_nodes=across, at_once=4)
        size_bytes = np.array([(whole_s - link.latency_s) / link.s_per_byte])
        gathered_s = tasks.collective("all_gather", GroupSpread(2, 1))(size_bytes)
        assert parts_s == pytest.approx(float(link(size_bytes / 2)[0] + gathered_s[0]))


def test_groups_that_were_never_measured_are_named() -> None:
    hardware = CLUSTER.hardware
    for group in ("compute", "interference"):
        bare = replace(
            hardware, **{group: None}, provenance=replace(hardware.provenance, **{group: None})
        )
        named = {"interference": "measured slowdowns"}.get(group, group)
        with pytest.raises(InputError, match=rf"l4-24gb has no {named}.*experiments.calibrate"):
            model_of(cluster=replace(CLUSTER, hardware=bare))(candidates(3))
