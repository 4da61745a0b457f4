"""Where the time of stages goes while they work: kernels, what they wait for inside layers, the
optimizer's step, and what sticks out of their slots.

Axes: C candidates, T types of layers, S strategies (here one for each candidate).
"""

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.exposed import share_of_link
from mistlab.cost.kernel_parts import kernel_parts, rest_of
from mistlab.cost.stage import StageSlots, StageTimeModel, split_seconds
from mistlab.cost.tasks import TaskSeconds, task_columns
from mistlab.symbolic.graph import PHASES
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]

# The groups of the mesh whose ranks exchange something inside layers, by the part that it is of.
EXCHANGED = {
    "tensor_exchange_s": ("tensor",),
    "context_exchange_s": ("context",),
    "expert_exchange_s": ("experts", "expert tensor"),
}
NAMES = (
    *("products_s", "attention_s", "memory_bound_s", "recomputation_s"),
    *EXCHANGED,
    *("data_parallel_s", "copies_s", "hosts_s", "step_s"),
    *("products_flop", "attention_flop"),
)


def stage_parts(model: StageTimeModel, batch: StageBatch) -> Values:
    """The ``NAMES`` of each candidate (names, C), over a whole iteration.

    Nothing sends and no host waits in the model, so a stage works for the sum of all seconds.
    """
    seconds = model.tasks.seconds({name: batch.value(name) for name in task_columns()})
    counts = model.tasks.types.counts(batch.columns)
    kernels = kernel_parts(seconds)

    def in_passes(of_types: Values) -> Values:
        return np.asarray(batch.micro_batches * (counts * of_types).sum(axis=0))

    found = {
        "products_s": in_passes(kernels.products_s),
        "attention_s": in_passes(kernels.attention_s),
        "memory_bound_s": in_passes(kernels.memory_bound_s),
        "recomputation_s": in_passes(kernels.again_s),
        "hosts_s": in_passes(kernels.launched_s),
        "step_s": (counts * seconds.alone("S", "")).sum(axis=0),
    }
    exchanged, waited = _exchanged(seconds)
    found |= {name: in_passes(one) for name, one in exchanged.items()}
    # Ranks wait inside layers for what is no exchange: for hosts.
    found["hosts_s"] = found["hosts_s"] + in_passes(waited)
    times = model(batch)
    busy_s = batch.micro_batches * times.stable_s + times.delta_forward_s + times.delta_backward_s
    slots = StageSlots.of(model.tasks, batch)
    tied_s = slots.outside_passes().tied_s
    exposed_s = rest_of(busy_s, np.sum([*found.values(), tied_s], axis=0))
    link = share_of_link(slots, batch.micro_batches)
    found["data_parallel_s"] = tied_s + link * exposed_s
    found["copies_s"] = (1 - link) * exposed_s
    found["products_flop"] = in_passes(kernels.products_flop)
    found["attention_flop"] = in_passes(kernels.attention_flop)
    return np.stack([found[name] for name in NAMES])


def _exchanged(seconds: TaskSeconds) -> tuple[dict[str, Values], Values]:
    """Seconds (T, S) that one forward and one backward pass of layers waits for exchanges, by
    their part, and those for which it waits for anything else."""
    overlaps = seconds.model.template.overlaps_tensor_backward
    found = {
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
    return found, rest_of(waited_s, np.sum([*found.values()], axis=0))


def split_parts(model: StageTimeModel, batch: StageBatch) -> Values:
    """Seconds by which the ``NAMES`` of each candidate (names, C) grow if gradients of weights are
    passes of their own: they no longer hide exchanges, and reductions run beside them alone."""
    seconds = model.tasks.seconds({name: batch.value(name) for name in task_columns()})
    weights_s, less_s = split_seconds(model, batch)
    longer_s = np.maximum(weights_s - less_s, 0.0)
    waits_s = (model.tasks.types.counts(batch.columns) * seconds.hidden_s).sum(axis=0)
    found = dict.fromkeys(NAMES, np.zeros(len(batch)))
    found["tensor_exchange_s"] = batch.micro_batches * np.minimum(longer_s, waits_s)
    found["data_parallel_s"] = batch.micro_batches * np.maximum(longer_s - waits_s, 0.0)
    return np.stack([found[name] for name in NAMES])
