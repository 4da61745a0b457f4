"""Where the GPU-seconds of a plan's iteration go, by the closed form's own sums.

Time that several things share counts once: as arithmetic where there is any, then as what sticks
out (``mistlab.cost.exposed``). What an iteration takes longer because hosts launch kernels late is
the difference to hosts that take no time, and what it takes longer because stages send is the
difference to sends that take none. In the rest a stage works, or waits for its pipeline: all stages
for the bubble, and those that have less to do than the busiest one also for imbalance.

Axes: P parts of the model in order, S stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.arithmetic import stage_flop
from mistlab.cost.figures_at import mean_peak_flop_per_s
from mistlab.cost.kernel_parts import rest_of
from mistlab.cost.order_times import engine_of, ordered_iterations_s
from mistlab.cost.pipeline import StageTimes, iteration_s
from mistlab.cost.stage_parts import NAMES, split_parts, stage_parts
from mistlab.cost.tasks import TaskModel
from mistlab.cost.unlike_nodes import StagesOnGroups, task_models
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.plan_orders import order_of_plan, shortened
from mistlab.schedule.stage_passes import passes_of
from mistlab.values.breakdown import Breakdown, StepParts
from mistlab.values.job import Job
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]
Altered = Callable[[TaskModel], TaskModel]

KERNELS = ("products_s", "attention_s", "memory_bound_s")
_OF_WORK = tuple(name for name in NAMES if name.endswith("_s"))
_BESIDE_OTHERS = ("data_parallel_s", "copies_s")


def breakdown_of(job: Job) -> Breakdown:
    """The parts of an iteration of a job's plan."""
    whole_s = _iteration_s(_model(job, None), job.plan)
    launched_s = min(_iteration_s(_model(job, _without_hosts), job.plan), whole_s)
    model = _model(job, lambda tasks: replace(_without_hosts(tasks), send_factor=0.0))
    pipeline_s = min(_iteration_s(model, job.plan), launched_s)
    works = _works(model, job.plan)
    busy_s = [min(sum(own[name] for name in _OF_WORK), pipeline_s) for own in works]
    busiest_s = max(busy_s)
    differences = {
        "sends_s": _beyond(launched_s, pipeline_s),
        "bubble_s": _beyond(pipeline_s, busiest_s),
    }
    stages = []
    for index, own in enumerate(works):
        found = _within(own, pipeline_s)
        found |= _kernels(found, own, _peak_s(job, index))
        found["hosts_s"] += _beyond(whole_s, launched_s)
        found |= {**differences, "imbalance_s": _beyond(busiest_s, busy_s[index])}
        stages.append(StepParts(**found))
    return Breakdown.of(tuple(stages), tuple(stage.num_gpus for stage in job.plan.stages))


def _beyond(longer_s: float, shorter_s: float) -> float:
    """By how much the longer of two is longer; nothing if only rounding tells them apart."""
    return float(rest_of(np.array(longer_s), np.array(shorter_s)))


def _without_hosts(tasks: TaskModel) -> TaskModel:
    """Tasks whose passes no host launches late; steps wait for the host all the same."""
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
    seconds = model(StageBatch.of_plan(plan))
    times = StageTimes.of(seconds, 1, -1)
    return float(iteration_s(times, np.array([plan.micro_batches]))[0])


def _works(model: StagesOnGroups, plan: Plan) -> list[dict[str, float]]:
    """The ``NAMES`` of each stage, of all parts that it has."""
    if plan.order == DEFAULT_ORDER:
        batch, stages = StageBatch.of_plan(plan), range(plan.num_stages)
        found = model.by_group(stage_parts, batch)
        return [dict(zip(NAMES, found[:, stage].tolist(), strict=True)) for stage in stages]
    order = order_of_plan(shortened(plan))
    batch = batch_of_parts([plan], order.placement)
    found = model.by_group(stage_parts, batch)
    if any(one.splits_backward for one in passes_of(order)):
        found = found + model.by_group(split_parts, batch)
    own = (found[:, list(order.placement.of_stage(stage))] for stage in range(plan.num_stages))
    return [dict(zip(NAMES, one.sum(axis=1).tolist(), strict=True)) for one in own]


def _within(own: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The seconds of a stage's work, which takes no longer than the iteration's ``seconds``.

    Where a stage has several parts of the model, what sticks out of one part may run beside passes
    of another: then so much less sticks out.
    """
    found = {name: own[name] for name in _OF_WORK}
    longer_s = sum(found.values()) - seconds
    beside_s = sum(found[name] for name in _BESIDE_OTHERS)
    if longer_s > 0 and beside_s > 0:
        kept = max(1 - longer_s / beside_s, 0.0)
        found |= {name: kept * found[name] for name in _BESIDE_OTHERS}
    return found


def _kernels(
    found: Mapping[str, float], own: Mapping[str, float], peak_s: float
) -> dict[str, float]:
    """The seconds of kernels as those of arithmetic at the peak rate, and what each kind of kernel
    takes beyond its own part of it."""
    kernels_s = sum(found[name] for name in KERNELS)
    arithmetic_s = min(peak_s, kernels_s)
    flop = {name: own[name.replace("_s", "_flop")] for name in ("products_s", "attention_s")}
    share = arithmetic_s / sum(flop.values()) if any(flop.values()) else 0.0
    beyond = {name: max(found[name] - share * flop.get(name, 0.0), 0.0) for name in KERNELS}
    all_s = sum(beyond.values())
    lost = (kernels_s - arithmetic_s) / all_s if all_s > 0 else 0.0
    return {"arithmetic_s": arithmetic_s, **{name: lost * one for name, one in beyond.items()}}


def _peak_s(job: Job, stage: int) -> float:
    """Seconds that the model's own arithmetic in a stage takes at the peak rate of its GPUs."""
    gpus = job.plan.stages[stage].num_gpus
    first = sum(before.num_gpus for before in job.plan.stages[:stage])
    peak = mean_peak_flop_per_s(job.cluster, job.workload.precision, first, gpus)
    return stage_flop(job.workload, job.plan, stage) / (gpus * peak)
