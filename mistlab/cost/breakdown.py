"""Splits the time of a training iteration into causes: kernels, exposed communication, host copies
and stalls, for each pipeline stage.

Array axes: C candidates, S strategies, T types of layers, K kinds of time slots, P phases; the four
streams come first. A time slot is the set of tasks that overlap while one layer computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.cost.beside_sends import STEADY
from mistlab.cost.kernels import stage_flop
from mistlab.cost.layers import CLASSES, OF_ATTENTION, of_classes
from mistlab.cost.links import mean_peak_flop_per_s
from mistlab.cost.order_times import (
    StagesOnGroups,
    engine_of,
    ordered_iterations_s,
    split_seconds,
    task_models,
)
from mistlab.cost.pipeline import iteration_s, with_late_exchanges
from mistlab.cost.side_by_side import LINK, until
from mistlab.cost.slot_work import SlotWork, slot_ends
from mistlab.cost.stage import StageSlots, StageTimeModel
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns
from mistlab.graph.graph import PHASES, Collective
from mistlab.graph.symbols import layer_columns, size_columns
from mistlab.job.job import Job
from mistlab.job.prediction import BindingTier, Breakdown, StepParts
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.network.tiers import NODE
from mistlab.plan.plan import Plan
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.slots import PHASES as PASS_PHASES
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.plan_orders import order_of_plan, shortened
from mistlab.stages.stage_batch import StageBatch, StageSeconds, StageTimes, batch_of_parts

# Splits the kernel seconds of a model's layers by what limits each kernel: arithmetic, memory
# bandwidth or launches.


# The time of kernels in these operator classes counts as memory-bound, however much arithmetic they
# have.
OF_MEMORY = ("memory", "scan")
# If two times differ by a smaller share than this, the difference is taken for a rounding error and
# counts as zero.
ROUNDING = 1e-12
_ATTENTION = [CLASSES.index(one) for one in OF_ATTENTION]
_MEMORY = [place for place, one in enumerate(CLASSES) if one in OF_MEMORY]
_PRODUCTS = [place for place in range(len(CLASSES)) if place not in (*_ATTENTION, *_MEMORY)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelParts:
    """The seconds of the kernels in one forward and one backward pass of each type of layer, and
    the floating-point operations of the compute-bound ones, for each strategy.

    ``launched_s`` are the seconds that launches add; ``again_s`` are the seconds of recomputed
    kernels. Shapes: (T, S).
    """

    products_s: Floats
    attention_s: Floats
    memory_bound_s: Floats
    launched_s: Floats
    again_s: Floats
    products_flop: Floats
    attention_flop: Floats


def kernel_parts(seconds: TaskSeconds) -> KernelParts:
    """Split the kernel seconds of each type of layer by what limits the kernels: arithmetic, memory
    bandwidth or launches.
    """
    model, types = seconds.model.layers, seconds.model.types
    sizes = {symbol: seconds.columns[name] for symbol, name in layer_columns().items()}
    values, rates = model.work(size_columns(seconds.model.workload, sizes)), model.rates()
    shape = len(types.names), len(CLASSES), len(seconds.zero)
    flop, own_s = np.zeros(shape), np.zeros(shape)
    for number, layer in enumerate(types.names):
        for phase in PHASES:
            name = model.work.pass_of(layer, phase)
            assert name is not None, f"{layer} has no {phase}"
            flop_of_pass, seconds_of_pass = of_classes(name, values, rates)
            flop[number] += flop_of_pass[: len(CLASSES)]
            own_s[number] += seconds_of_pass[: len(CLASSES)]
    again_s = np.stack(
        [
            np.zeros(shape[-1]) if layer.again is None else layer.again.compute_s
            for layer in seconds.of_type
        ]
    )
    whole_s = seconds.alone("F", "") + seconds.alone("B", "") - again_s
    return KernelParts(
        products_s=own_s[:, _PRODUCTS].sum(axis=1),
        attention_s=own_s[:, _ATTENTION].sum(axis=1),
        memory_bound_s=own_s[:, _MEMORY].sum(axis=1),
        launched_s=rest_of(whole_s, own_s.sum(axis=1)),
        again_s=again_s,
        products_flop=flop[:, _PRODUCTS].sum(axis=1),
        attention_flop=flop[:, _ATTENTION].sum(axis=1),
    )


def rest_of(whole_s: Floats, parts_s: Floats) -> Floats:
    """What is left of a time after its parts are subtracted; zero if that is within rounding."""
    rest_s = whole_s - parts_s
    return np.where(rest_s > ROUNDING * whole_s, rest_s, 0.0)


# Splits the working time of stages into kernels, waits inside layers, the optimizer step, and
# exposed communication and host copies.


# The groups of ranks that communicate inside layers, by the name of the breakdown's part that
# counts their time.
EXCHANGED = {
    "tensor_exchange_s": ("tensor",),
    "context_exchange_s": ("context",),
    "expert_exchange_s": ("experts", "expert tensor"),
}
# For each kind of communication in the breakdown, the group of ranks and the collective that show
# which network tier limits it.
_SENT_BY: Mapping[str, tuple[str, Collective]] = {
    "tensor_exchange_s": ("tensor", "all_reduce"),
    "context_exchange_s": ("context", "all_gather"),
    "expert_exchange_s": ("experts", "all_to_all"),
    "data_parallel_s": ("reduce", "all_reduce"),
    "averaging_s": ("state replicas", "all_reduce"),
}
NAMES = (
    *("products_s", "attention_s", "memory_bound_s", "recomputation_s"),
    *EXCHANGED,
    *("data_parallel_s", "averaging_s", "copies_s", "hosts_s", "step_s"),
    *("products_flop", "attention_flop"),
)


def stage_parts(model: StageTimeModel, batch: StageBatch) -> Floats:
    """The seconds that each candidate stage spends on each part of the breakdown in an iteration: a
    row for each name in ``NAMES``, a column for each candidate.

    In ``model`` sends and hosts take no time, so that all of a stage's seconds are work.
    """
    slots = StageSlots.of(model.tasks, batch)
    return _parts_of_slots(slots, model.of_slots(slots))


def times_and_parts(model: StageTimeModel, batch: StageBatch) -> Floats:
    """The times of each candidate stage, and below them its seconds by part of the breakdown: a row
    for each field of ``StageSeconds`` and for each name in ``NAMES``, a column for each candidate.
    """
    slots = StageSlots.of(model.tasks, batch)
    times = model.of_slots(slots)
    columns = [getattr(times, entry.name) for entry in fields(StageSeconds)]
    return np.concatenate([np.stack(columns), _parts_of_slots(slots, times)])


def _parts_of_slots(slots: StageSlots, times: StageSeconds) -> Floats:
    """The seconds that each candidate stage spends on each part of the breakdown, from the times of
    the stage and of its layers: a row for each name in ``NAMES``.
    """
    batch, seconds, of_strategy = slots.batch, slots.seconds, slots.strategies.index
    counts = slots.tasks.types.counts(batch.columns)
    kernels = kernel_parts(seconds)

    def in_passes(of_types: Floats) -> Floats:
        of_candidates = of_types[:, of_strategy]
        return np.asarray(batch.micro_batches * (counts * of_candidates).sum(axis=0))

    parts = {
        "products_s": in_passes(kernels.products_s),
        "attention_s": in_passes(kernels.attention_s),
        "memory_bound_s": in_passes(kernels.memory_bound_s),
        "recomputation_s": in_passes(kernels.again_s),
        "hosts_s": in_passes(kernels.launched_s),
        "step_s": (counts * seconds.alone("S", "")[:, of_strategy]).sum(axis=0),
    }
    exchanged, waited = _exchanged(seconds)
    parts |= {name: in_passes(one) for name, one in exchanged.items()}
    # The waits of layers that no collective explains are waits for the host, which launches
    # kernels.
    parts["hosts_s"] = parts["hosts_s"] + in_passes(waited)
    busy_s = batch.micro_batches * times.stable_s + times.delta_forward_s + times.delta_backward_s
    after_s = slots.outside_passes().after_s
    exposed_s = rest_of(busy_s, np.sum([*parts.values(), after_s], axis=0))
    of_passes = np.sum([part for name, part in parts.items() if name != "step_s"], axis=0)
    steady_s = rest_of(times.stable_s, of_passes / batch.micro_batches)
    steady_s = np.minimum((batch.micro_batches - 1) * steady_s, exposed_s)
    steady, once = shares_of_link(slots)
    link_s = steady * steady_s + once * (exposed_s - steady_s)
    parts["averaging_s"] = seconds.averaging_s(counts, of_strategy)
    parts["data_parallel_s"] = after_s - parts["averaging_s"] + link_s
    parts["copies_s"] = exposed_s - link_s
    parts["products_flop"] = in_passes(kernels.products_flop)
    parts["attention_flop"] = in_passes(kernels.attention_flop)
    return np.stack([parts[name] for name in NAMES])


def _exchanged(seconds: TaskSeconds) -> tuple[dict[str, Floats], Floats]:
    """The seconds in which each type of layer waits for collectives, by part of the breakdown, and
    the seconds in which it waits for anything else, in one forward and one backward pass.

    Shapes: (T, S).
    """
    overlaps = seconds.model.template.overlaps_tensor_backward
    exchanged_s = {
        name: np.stack(
            [
                sum(
                    exchanges.unhidden_s(layer, phase, overlaps_products=overlaps)
                    for phase in PHASES
                )
                for layer in seconds.of_type
            ]
        )
        for name, groups in EXCHANGED.items()
        for exchanges in (seconds.exchanges.within(groups),)
    }
    waited_s = np.sum([seconds.tensor_s[phase] for phase in PHASES], axis=0)
    return exchanged_s, rest_of(waited_s, np.sum([*exchanged_s.values()], axis=0))


def split_parts(model: StageTimeModel, batch: StageBatch) -> Floats:
    """The seconds that computing weight gradients in passes of their own adds to each part of the
    breakdown: a row for each name in ``NAMES``, a column for each candidate.

    Weight-gradient GEMMs then no longer hide collectives, and gradient reductions overlap with the
    weight-gradient passes only.
    """
    seconds = model.tasks.seconds({name: batch.value(name) for name in task_columns()})
    weights_s, less_s = split_seconds(StageSlots.of(model.tasks, batch))
    longer_s = np.maximum(weights_s - less_s, 0.0)
    waits_s = (model.tasks.types.counts(batch.columns) * seconds.hidden_s).sum(axis=0)
    parts = dict.fromkeys(NAMES, np.zeros(len(batch)))
    parts["tensor_exchange_s"] = batch.micro_batches * np.minimum(longer_s, waits_s)
    parts["data_parallel_s"] = batch.micro_batches * np.maximum(longer_s - waits_s, 0.0)
    return np.stack([parts[name] for name in NAMES])


# Attributes the GPU-seconds of a plan's iteration to arithmetic, communication, hosts and the
# pipeline.

Altered = Callable[[TaskModel], TaskModel]

KERNELS = ("products_s", "attention_s", "memory_bound_s")
_OF_WORK = tuple(name for name in NAMES if name.endswith("_s"))
_BESIDE_OTHERS = ("data_parallel_s", "copies_s")


def breakdown_of(job: Job, whole_s: float | None = None) -> Breakdown:
    """The breakdown of an iteration of a job into seconds by cause, for each stage.

    Time that several causes share counts once: as arithmetic if there is any, otherwise as exposed
    time (``shares_of_link``). Host-bound time is how much shorter the iteration would be if hosts
    took no time; the time of sends is how much shorter it would be if sends took no time. In the
    rest of the iteration, a stage works or waits for its pipeline: all stages have the pipeline
    bubble, and stages with less work than the busiest one also have imbalance. ``whole_s`` is the
    predicted iteration time if it is already known.
    """
    own_s, late_s = _step_and_late_s(job)
    whole_s = own_s if whole_s is None else whole_s - late_s
    launched_s = min(_iteration_s(_model(job, _without_hosts), job.plan), own_s)
    model = _model(job, lambda tasks: replace(_without_hosts(tasks), send_factor=0.0))
    worked_s, works = _worked(model, job.plan)
    pipeline_s = min(worked_s, launched_s)
    busy_s = [min(sum(work[name] for name in _OF_WORK), pipeline_s) for work in works]
    busiest_s = max(busy_s)
    differences = {
        "sends_s": _beyond(launched_s, pipeline_s),
        # What passes and sends wait for one another beyond the closed form, if they are played.
        "bubble_s": _beyond(pipeline_s, busiest_s) + _beyond(whole_s, own_s),
    }
    stages = []
    for index, work in enumerate(works):
        parts = _within(work, pipeline_s)
        parts |= _kernels(parts, work, _peak_s(job, index))
        parts["hosts_s"] += _beyond(own_s, launched_s)
        parts |= {**differences, "imbalance_s": _beyond(busiest_s, busy_s[index])}
        parts["averaging_s"] += late_s
        stages.append(StepParts(**parts))
    whole = Breakdown.of(tuple(stages), tuple(stage.num_gpus for stage in job.plan.stages))
    return replace(whole, tiers=binding_tiers(job, whole.busiest_stage))


def binding_tiers(job: Job, stage: int) -> tuple[BindingTier, ...]:
    """The network tier that limits each kind of communication of one stage: its collectives, and
    its sends to a neighbouring stage.
    """
    first = sum(before.num_gpus for before in job.plan.stages[:stage])
    tasks = _model(job, None).models[job.cluster.group_of(first)].tasks
    batch = StageBatch.of_plan(job.plan)
    seconds = tasks.seconds({name: batch.value(name) for name in task_columns()})
    tiers = {}
    for part, (group, kind) in _SENT_BY.items():
        for rows, shape in seconds.shapes.of_several(group):
            if rows[stage]:
                inside = part in EXCHANGED
                tiers[part] = tasks.collective(kind, shape, inside_layer=inside).binding_tier
    ahead = stage + 1 < job.plan.num_stages
    if job.plan.num_stages > 1:
        places = seconds.shapes.place_to_next if ahead else seconds.shapes.place_from_previous
        tier, senders = int(places[stage]), int(seconds.shapes.senders[stage])
        at_once = int(seconds.shapes.senders_of_node[stage])
        tiers["sends_s"] = tasks.send(
            across_nodes=tier != NODE, at_once=at_once, tier=tier, senders=senders
        ).binding_tier
    return tuple(BindingTier(part=part, tier=tier) for part, tier in tiers.items())


def _step_and_late_s(job: Job) -> tuple[float, float]:
    """The seconds of an iteration, and the mean seconds by which exchanges of weights lengthen it:
    they overlap with later iterations, but may end too late.
    """
    model = _model(job, None)
    own_s = _iteration_s(model, job.plan)
    with_late = with_late_exchanges(model, [job.plan], np.array([own_s]))
    return own_s, float(with_late[0]) - own_s


def _beyond(longer_s: float, shorter_s: float) -> float:
    """By how many seconds the first time exceeds the second; zero if they differ by rounding
    only.
    """
    return float(rest_of(np.array(longer_s), np.array(shorter_s)))


def _without_hosts(tasks: TaskModel) -> TaskModel:
    """The model of task times with hosts that launch kernels in no time; only optimizer steps still
    wait for their host.
    """
    if tasks.host is None:
        return tasks
    return replace(tasks, host=replace(tasks.host, forward_s=0.0, backward_s=0.0, end_s=0.0))


def _model(job: Job, altered: Altered | None) -> StagesOnGroups:
    tasks = task_models(
        job.workload,
        job.cluster,
        engine_of(job.plan),
        overlap_communication=job.plan.overlap_communication,
        altered=altered,
    )
    return StagesOnGroups.of(job.cluster, tasks)


def _iteration_s(model: StagesOnGroups, plan: Plan) -> float:
    if plan.order != DEFAULT_ORDER:
        return float(ordered_iterations_s(model, [plan])[0])
    return _in_turn_s(model(StageBatch.of_plan(plan)), plan)


def _in_turn_s(seconds: StageSeconds, plan: Plan) -> float:
    """The iteration time of a plan in the default order of passes (1F1B), from the times of its
    stages.
    """
    times = StageTimes.of(seconds, 1, -1)
    return float(iteration_s(times, np.array([plan.micro_batches]))[0])


def _worked(model: StagesOnGroups, plan: Plan) -> tuple[float, list[dict[str, float]]]:
    """The seconds of an iteration, and the seconds that each stage spends on each part of the
    breakdown, named in ``NAMES``.
    """
    if plan.order == DEFAULT_ORDER:
        names = [entry.name for entry in fields(StageSeconds)]
        columns = model.by_group(times_and_parts, StageBatch.of_plan(plan))
        times, parts = columns[: len(names)], columns[len(names) :]
        seconds = StageSeconds(**dict(zip(names, times, strict=True)))
        works = [dict(zip(NAMES, part, strict=True)) for part in parts.T.tolist()]
        return _in_turn_s(seconds, plan), works
    order = order_of_plan(shortened(plan))
    batch = batch_of_parts([plan], order.placement)
    columns = model.by_group(stage_parts, batch)
    if any(one.splits_backward for one in passes_of(order)):
        columns = columns + model.by_group(split_parts, batch)
    of_stages = (
        columns[:, list(order.placement.of_stage(stage))] for stage in range(plan.num_stages)
    )
    works = [dict(zip(NAMES, one.sum(axis=1).tolist(), strict=True)) for one in of_stages]
    return _iteration_s(model, plan), works


def _within(work: Mapping[str, float], seconds: float) -> dict[str, float]:
    """One stage's seconds for each part of the breakdown; if together they exceed the iteration's
    ``seconds``, those of reductions and host copies are scaled down.

    If a stage has several parts of the model, exposed time of one part may overlap with passes of
    another part; then it is not exposed after all.
    """
    parts = {name: work[name] for name in _OF_WORK}
    longer_s = sum(parts.values()) - seconds
    beside_s = sum(parts[name] for name in _BESIDE_OTHERS)
    if longer_s > 0 and beside_s > 0:
        kept = max(1 - longer_s / beside_s, 0.0)
        parts |= {name: kept * parts[name] for name in _BESIDE_OTHERS}
    return parts


def _kernels(
    parts: Mapping[str, float], work: Mapping[str, float], peak_s: float
) -> dict[str, float]:
    """Split a stage's kernel seconds into arithmetic at the peak rate, and what each kind of kernel
    takes beyond that.
    """
    kernels_s = sum(parts[name] for name in KERNELS)
    arithmetic_s = min(peak_s, kernels_s)
    flop = {name: work[name.replace("_s", "_flop")] for name in ("products_s", "attention_s")}
    share = arithmetic_s / sum(flop.values()) if any(flop.values()) else 0.0
    beyond = {name: max(parts[name] - share * flop.get(name, 0.0), 0.0) for name in KERNELS}
    all_s = sum(beyond.values())
    lost = (kernels_s - arithmetic_s) / all_s if all_s > 0 else 0.0
    return {"arithmetic_s": arithmetic_s, **{name: lost * one for name, one in beyond.items()}}


def _peak_s(job: Job, stage: int) -> float:
    """The seconds that a stage's share of the model's arithmetic would take at the peak rate of the
    stage's GPUs.
    """
    gpus = job.plan.stages[stage].num_gpus
    first = sum(before.num_gpus for before in job.plan.stages[:stage])
    peak = mean_peak_flop_per_s(job.cluster, job.workload.precision, first, gpus)
    return stage_flop(job.workload, job.plan, stage) / (gpus * peak)


# Computes the exposed time of a stage's layers: communication and host copies that arithmetic does
# not hide.

_COPIES = [place for place in range(len(STREAMS)) if place not in (COMPUTE, LINK)]


def shares_of_link(slots: StageSlots) -> list[Floats]:
    """The share of each candidate stage's exposed time that is collectives between GPUs, in steady
    passes and in those that come once an iteration; the rest is host copies.
    """
    alone = SlotWork(slots.seconds, slots.kinds).alone()
    slots_s = _divided(alone, slot_ends(slots.seconds, alone, is_least=False))
    every = np.ones(len(slots.kinds), dtype=np.bool_)
    of_phases = [slots.summed([(of_phase, every)]) for of_phase in slots_s.swapaxes(0, 1)]
    is_steady = np.array([phase in STEADY for phase in PASS_PHASES])
    shares = []
    for chosen in (is_steady, ~is_steady):
        link_s, copies_s = np.array(of_phases)[chosen].sum(axis=0)
        both_s = link_s + copies_s
        # Where layers have no exposed time, only the collectives of an optimizer step can be
        # exposed, so the share is 1.
        shares.append(np.where(both_s > 0, link_s / np.where(both_s > 0, both_s, 1.0), 1.0))
    return shares


def _divided(alone: Floats, ends: Floats) -> Floats:
    """The exposed seconds of collectives and of host copies while one layer computes.

    The time slot of a layer takes at least as long as its arithmetic; the excess is exposed. It is
    divided among the other streams by how long each runs on after the arithmetic alone would have
    ended. If none does (the streams only slowed the arithmetic down), it is divided by their busy
    time. Shapes: the streams would take ``alone`` (4, P, K, S) by themselves and end at ``ends``;
    the result is (2, P, K, S).
    """
    arithmetic_s = alone[COMPUTE]
    exposed_s = until(STREAMS, ends, alone) - arithmetic_s
    beyond = np.clip(ends - arithmetic_s, 0.0, alone)
    beyond[COMPUTE] = 0.0
    others = alone.copy()
    others[COMPUTE] = 0.0
    weights = np.where(beyond.sum(axis=0) > 0, beyond, others)
    total = weights.sum(axis=0)
    shares = weights / np.where(total > 0, total, 1.0)
    return np.stack([exposed_s * shares[LINK], exposed_s * shares[_COPIES].sum(axis=0)])
