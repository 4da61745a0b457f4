"""The times of plans whose passes run in an order without a formula.

Axes: C plans, P parts of the model in order, T types of layers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.order_path import SplitTimes, order_iteration_s
from mistlab.cost.pipeline import StageTimes
from mistlab.cost.stage import StageTimeModel
from mistlab.cost.tasks import task_columns
from mistlab.cost.unlike_nodes import StagesOnGroups
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.engines.table import ENGINES
from mistlab.schedule.plan_orders import order_of_plan, shortened
from mistlab.schedule.stage_passes import passes_of
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch

Table = NDArray[np.float64]


def ordered_iterations_s(model: StagesOnGroups, plans: Sequence[Plan]) -> Table:
    """Seconds (C) of an iteration of plans that have equally many stages and the same order, cut to
    equally many micro-batches (``shortened``)."""
    played = shortened(plans[0])
    order = order_of_plan(played)
    batch, passes = batch_of_parts(plans, order.chunks), passes_of(order)
    seconds = model(batch)
    shape = len(plans), order.num_stages * order.chunks
    names = (entry.name for entry in fields(StageTimes))
    times = StageTimes(**{name: getattr(seconds, name).reshape(shape) for name in names})
    splits = any(of_stage.splits_backward for of_stage in passes)
    split = _split_times(model, batch, shape) if splits else None
    apart = ENGINES[played.engine].steps_apart
    last = bool(model.tasks.template.phases["step"])
    few_s = order_iteration_s(times, passes, split, steps_apart=apart, steps_last=last)
    beyond = np.array([plan.micro_batches - played.micro_batches for plan in plans])
    if not beyond.any():
        return few_s
    # Each further group of micro-batches takes as long as the last of those that are played.
    stages = played.num_stages
    longer = replace(played, micro_batches=played.micro_batches + stages)
    passes = passes_of(order_of_plan(longer))
    more_s = order_iteration_s(times, passes, split, steps_apart=apart, steps_last=last)
    return np.asarray(few_s + (more_s - few_s) * beyond / stages)


def _split_times(model: StagesOnGroups, batch: StageBatch, shape: tuple[int, int]) -> SplitTimes:
    """The changes of backward passes whose gradients of weights have their own passes."""
    weights_s, unhidden_s = model.by_group(batch, _weights_and_unhidden_s)
    return SplitTimes(weights_s=weights_s.reshape(shape), unhidden_s=unhidden_s.reshape(shape))


def _weights_and_unhidden_s(model: StageTimeModel, batch: StageBatch) -> Table:
    """Seconds of the gradients of weights, and of messages that they hid (2, parts)."""
    types = model.tasks.types
    seconds = model.tasks.seconds({name: batch.value(name) for name in task_columns()})
    layers = types.of_stages(batch.value)
    counts = np.array([[one.count(place) for one in layers] for place in range(len(types.names))])
    of_types = np.stack([weight_gradients_s(seconds), seconds.hidden_s])
    return np.asarray((counts * of_types).sum(axis=1))
