"""The times of plans whose passes run in an order without a formula.

Axes: C plans, P parts of the model in order, T types of layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.backward_turns import TurnTimes, beside_backward
from mistlab.cost.order_bound import order_bound_s
from mistlab.cost.order_path import EndTimes, HostTimes, SplitTimes, order_iteration_s
from mistlab.cost.pipeline import StageTimes
from mistlab.cost.stage import StageTimeModel, split_seconds
from mistlab.cost.tasks import TaskSeconds, task_columns
from mistlab.cost.unlike_nodes import StagesOnGroups
from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.plan_orders import order_of_plan, shortened
from mistlab.schedule.slot_table import Task
from mistlab.schedule.stage_passes import passes_of
from mistlab.values.parts import batch_of_parts
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch

Table = NDArray[np.float64]


def engine_of(plan: Plan) -> Engine:
    """The engine's row as it runs a plan: in the plan's order of passes."""
    engine = ENGINES[plan.engine]
    return engine if plan.order == DEFAULT_ORDER else engine.in_named_order()


def ordered_iterations_s(model: StagesOnGroups, plans: Sequence[Plan]) -> Table:
    """Seconds (C) of an iteration of plans that have equally many stages and the same order, cut to
    equally many micro-batches (``shortened``)."""
    played = shortened(plans[0])
    order = order_of_plan(played)
    batch, passes = batch_of_parts(plans, order.placement), passes_of(order)
    shape = len(plans), len(order.placement.stages)
    with_turns = model(batch)
    seconds = with_turns.without_turns
    times = StageTimes.of(seconds, *shape)
    host = None if model.tasks.host is None else HostTimes.of(times, batch.layers.reshape(shape))
    splits = any(of_stage.splits_backward for of_stage in passes)
    split = _split_times(model, batch, shape) if splits else None
    turned = _turn_times(model, batch, with_turns.turned_s, shape, splits=splits)
    iteration_s = partial(_played_s, times, split, host, _end_times(model, batch, shape), turned)
    few_s = iteration_s(played)
    micro_batches = np.array([plan.micro_batches for plan in plans])
    beyond = micro_batches - played.micro_batches
    if not beyond.any():
        return few_s
    stages = played.num_stages
    longer = replace(played, micro_batches=played.micro_batches + stages)
    apart = ENGINES[played.engine].steps_apart
    # A host that was ahead may no longer be.
    least_s = order_bound_s(
        times,
        order.placement,
        micro_batches,
        issued_s=seconds.issued_s.reshape(shape),
        splits=splits,
        steps_apart=apart,
    )
    return extended_s(few_s, iteration_s(longer), beyond / stages, least_s)


def extended_s(few_s: Table, more_s: Table, groups: Table, least_s: Table) -> Table:
    """Seconds (C) with further groups of micro-batches, from those without and with one of them:
    each takes as long as the first, unless another stage becomes the slowest."""
    return np.maximum(few_s + (more_s - few_s) * groups, least_s)


def _played_s(
    times: StageTimes,
    split: SplitTimes | None,
    host: HostTimes | None,
    at_end: EndTimes,
    turned: TurnTimes | None,
    plan: Plan,
) -> Table:
    """Seconds (C) of an iteration of stages with these times, in the order of a plan."""
    return order_iteration_s(
        times,
        passes_of(order_of_plan(plan)),
        split,
        host=host,
        at_end=at_end,
        turned=turned,
        steps_apart=ENGINES[plan.engine].steps_apart,
    )


def _end_times(model: StagesOnGroups, batch: StageBatch, shape: tuple[int, int]) -> EndTimes:
    """How long parts take to reduce gradients from their last backward pass on, and to do what
    comes after all passes."""
    reductions_s, steps_s = model.by_group(_reductions_and_steps_s, batch)
    return EndTimes(reductions_s=reductions_s.reshape(shape), steps_s=steps_s.reshape(shape))


def _reductions_and_steps_s(model: StageTimeModel, batch: StageBatch) -> Table:
    """Seconds of the last reduction of gradients, and of what comes after all passes (2, parts)."""
    phases = model.tasks.template.phases
    seconds, counts = _seconds(model, batch), model.tasks.types.counts(batch.columns)

    def summed(rows: Sequence[Task]) -> Table:
        found = np.zeros(len(batch))
        for row in rows:
            alone = (counts * seconds.alone(row.kind, row.direction or "")).sum(axis=0)
            found += np.where(batch.value("zero") >= row.from_zero, alone, 0.0)
        return found

    reductions = [row for row in phases["last_backward"] if row.kind == "R"][-1:]
    return np.stack([summed(reductions), summed(phases["step"])])


def _turn_times(
    model: StagesOnGroups,
    batch: StageBatch,
    turned_s: Table,
    shape: tuple[int, int],
    *,
    splits: bool,
) -> TurnTimes | None:
    """By how much passes are longer that follow a pass of a part with reductions; None if none
    is."""
    if not turned_s.any():
        return None
    beside_s, is_beside = model.by_group(partial(beside_backward, splits=splits), batch)
    backward_s = np.where(is_beside > 0, beside_s, turned_s)
    return TurnTimes(forward_s=turned_s.reshape(shape), backward_s=backward_s.reshape(shape))


def _split_times(model: StagesOnGroups, batch: StageBatch, shape: tuple[int, int]) -> SplitTimes:
    """The changes of backward passes whose gradients of weights have their own passes."""
    weights_s, less_s = model.by_group(split_seconds, batch)
    return SplitTimes(weights_s=weights_s.reshape(shape), less_s=less_s.reshape(shape))


def _seconds(model: StageTimeModel, batch: StageBatch) -> TaskSeconds:
    return model.tasks.seconds({name: batch.value(name) for name in task_columns()})
