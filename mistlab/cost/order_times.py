"""What the parts of plans take whose passes run in an order of their own.

Axes: C plans, P parts of the model in order, T types of layers.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.order_path import SplitTimes, order_iteration_s
from mistlab.cost.pipeline import StageTimes
from mistlab.cost.stage import StageTimeModel
from mistlab.cost.tasks import task_columns
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.schedule.order_text import PipelineOrder
from mistlab.schedule.stage_chunks import StagePart, parts_of_plan
from mistlab.schedule.stage_passes import passes_of
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch

Table = NDArray[np.float64]


def ordered_iterations_s(
    model: StageTimeModel, plans: Sequence[Plan], order: PipelineOrder
) -> Table:
    """Seconds (C) of an iteration of plans with equally many stages, all in one order."""
    parts = [part for plan in plans for part in parts_of_plan(plan, order.chunks)]
    batch = _batch(plans, parts)
    seconds = model(batch)
    shape = len(plans), order.num_stages * order.chunks
    names = (entry.name for entry in fields(StageTimes))
    times = StageTimes(**{name: getattr(seconds, name).reshape(shape) for name in names})
    passes = passes_of(order)
    split = None
    if any(of_stage.splits_backward for of_stage in passes):
        split = _split_times(model, batch, shape)
    return order_iteration_s(times, passes, split)


def _batch(plans: Sequence[Plan], parts: Sequence[StagePart]) -> StageBatch:
    """The parts of all plans as candidates of their own."""
    first = np.repeat(
        np.cumsum([0, *(plan.num_stages for plan in plans)])[:-1], len(parts) // len(plans)
    )
    stages = first + np.array([part.stage for part in parts])
    own = {
        "layers": [len(part.blocks) for part in parts],
        "checkpointed_layers": [part.checkpointed for part in parts],
        "has_embedding": [int(part.has_embedding) for part in parts],
        "has_head": [int(part.has_head) for part in parts],
    }
    of_stages = StageBatch.of_plans(plans).chosen(stages)
    return StageBatch.of_columns(
        {**of_stages.columns, **{name: np.array(column) for name, column in own.items()}}
    )


def _split_times(model: StageTimeModel, batch: StageBatch, shape: tuple[int, int]) -> SplitTimes:
    """What backward passes without the gradients of weights leave, and take besides."""
    seconds = model.tasks.seconds({name: batch.value(name) for name in task_columns()})
    plain = batch.layers - batch.checkpointed_layers
    counts = np.stack([batch.has_embedding, plain, batch.checkpointed_layers, batch.has_head])
    return SplitTimes(
        weights_s=(counts * weight_gradients_s(seconds)).sum(axis=0).reshape(shape),
        unhidden_s=(counts * seconds.hidden_s).sum(axis=0).reshape(shape),
    )
