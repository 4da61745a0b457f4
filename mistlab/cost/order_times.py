"""The times of plans whose passes run in an order without a formula.

Axes: C plans, P parts of the model in order, T types of layers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.host_waits import issued_by_pass, peculiar_s
from mistlab.cost.order_path import EndTimes, HostTimes, SplitTimes, order_iteration_s
from mistlab.cost.pipeline import StageTimes
from mistlab.cost.stage import StageTimeModel
from mistlab.cost.tasks import TaskSeconds, task_columns
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.engines.table import ENGINES
from mistlab.schedule.plan_orders import order_of_plan, shortened
from mistlab.schedule.slot_table import Task
from mistlab.schedule.stage_passes import passes_of
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch

Table = NDArray[np.float64]


def ordered_iterations_s(model: StageTimeModel, plans: Sequence[Plan]) -> Table:
    """Seconds (C) of an iteration of plans that have equally many stages and the same order, cut to
    equally many micro-batches (``shortened``)."""
    played = shortened(plans[0])
    order = order_of_plan(played)
    batch, passes = batch_of_parts(plans, order.chunks), passes_of(order)
    shape = len(plans), order.num_stages * order.chunks
    host = _host_times(model, batch, shape)
    seconds = (model if host is None else replace(model, awaits_host=False))(batch)
    names = (entry.name for entry in fields(StageTimes))
    times = StageTimes(**{name: getattr(seconds, name).reshape(shape) for name in names})
    splits = any(of_stage.splits_backward for of_stage in passes)
    split = _split_times(model, batch, shape) if splits else None
    iteration_s = partial(_played_s, times, split, host, _end_times(model, batch, shape))
    few_s = iteration_s(played)
    micro_batches = np.array([plan.micro_batches for plan in plans])
    beyond = micro_batches - played.micro_batches
    if not beyond.any():
        return few_s
    # Each further group of micro-batches takes as long as the last of those that are played, unless
    # a host that was ahead no longer is.
    stages = played.num_stages
    longer = replace(played, micro_batches=played.micro_batches + stages)
    more_s = iteration_s(longer)
    found_s = np.asarray(few_s + (more_s - few_s) * beyond / stages)
    if host is None:
        return found_s
    return np.asarray(np.maximum(found_s, host.whole_s(micro_batches, stages)))


def _played_s(
    times: StageTimes,
    split: SplitTimes | None,
    host: HostTimes | None,
    at_end: EndTimes,
    plan: Plan,
) -> Table:
    """Seconds (C) of an iteration of stages with these times, in the order of a plan."""
    return order_iteration_s(
        times,
        passes_of(order_of_plan(plan)),
        split,
        host=host,
        at_end=at_end,
        steps_apart=ENGINES[plan.engine].steps_apart,
    )


def _end_times(model: StageTimeModel, batch: StageBatch, shape: tuple[int, int]) -> EndTimes:
    """How long parts take to reduce gradients from their last backward pass on, and to do what
    comes after all passes."""
    phases = model.tasks.template.phases
    seconds = _seconds(model, batch)
    counts = _counts(model, batch)

    def summed(rows: Sequence[Task]) -> Table:
        found = np.zeros(len(batch))
        for row in rows:
            alone = (counts * seconds.alone(row.kind, row.direction or "")).sum(axis=0)
            found += np.where(batch.value("zero") >= row.from_zero, alone, 0.0)
        return found.reshape(shape)

    return EndTimes(
        reductions_s=summed([row for row in phases["last_backward"] if row.kind == "R"][-1:]),
        steps_s=summed(phases["step"]),
    )


def _host_times(
    model: StageTimeModel, batch: StageBatch, shape: tuple[int, int]
) -> HostTimes | None:
    """How long hosts take to issue the passes of parts; None if no host issues them, or if none is
    ahead of its GPU, so that passes take as long as their host."""
    host = model.tasks.host
    if host is None or peculiar_s(batch.value, model.tasks.cluster).any():
        return None
    forward, backward = issued_by_pass(host, batch)
    return HostTimes(
        forward_s=forward.reshape(shape),
        backward_s=backward.reshape(shape),
        blocks=np.maximum(batch.layers, 1).reshape(shape),
    )


def _split_times(model: StageTimeModel, batch: StageBatch, shape: tuple[int, int]) -> SplitTimes:
    """The changes of backward passes whose gradients of weights have their own passes."""
    seconds, counts = _seconds(model, batch), _counts(model, batch)
    return SplitTimes(
        weights_s=(counts * weight_gradients_s(seconds)).sum(axis=0).reshape(shape),
        unhidden_s=(counts * seconds.hidden_s).sum(axis=0).reshape(shape),
    )


def _seconds(model: StageTimeModel, batch: StageBatch) -> TaskSeconds:
    return model.tasks.seconds({name: batch.value(name) for name in task_columns()})


def _counts(model: StageTimeModel, batch: StageBatch) -> Table:
    """How many layers of each type a part has (T, C P)."""
    types = model.tasks.types
    layers = types.of_stages(batch.value)
    return np.array([[one.count(place) for one in layers] for place in range(len(types.names))])
