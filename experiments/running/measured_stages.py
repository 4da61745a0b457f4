"""The times of a stage's passes in a measured iteration, named as in a prediction.

As in a prediction, the times of a micro-batch in several chunks add up, and gradients of weights
count as part of its backward pass.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING

from mistlab.schedule.slots import Action

if TYPE_CHECKING:
    from runtime.session import MeasuredTask

# A layer's optimizer step is part of the first forward pass.
_PASSES = {"F": "F", "S": "F", "B": "B", "W": "W"}


def stage_times(tasks: Iterable["MeasuredTask"]) -> Mapping[str, float]:
    """Fields of a ``StageMeasurement``; none without a steady pass, of a single micro-batch.

    A pass lasts from the start of its first task that computes to the end of its last.
    """
    forwards, backwards = _pass_seconds(tasks)
    if len(forwards) < 2:
        return {}
    first_s, *steady_forwards = forwards
    *steady_backwards, last_s = backwards
    forward_s, backward_s = median(steady_forwards), median(steady_backwards)
    return {
        "stable_s": forward_s + backward_s,
        "delta_forward_s": first_s - forward_s,
        "delta_backward_s": last_s - backward_s,
    }


def _pass_seconds(tasks: Iterable["MeasuredTask"]) -> tuple[list[float], list[float]]:
    """Seconds of each micro-batch's forward passes, and of its backward passes."""
    seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for kind, micro_batch, lasting_s in _passes(tasks):
        of_way = seconds[kind == "F"]
        of_way[micro_batch] = of_way.get(micro_batch, 0.0) + lasting_s
    forwards, backwards = ([of for _, of in sorted(way.items())] for way in seconds.values())
    return forwards, backwards


def _passes(tasks: Iterable["MeasuredTask"]) -> Iterator[tuple[str, int, float]]:
    """Kind, micro-batch and seconds of each pass: its tasks follow one another, layer by layer."""
    running: tuple[str, int] | None = None
    begin_s = end_s = 0.0
    layer: int | None = None
    for one in tasks:
        task = one.task
        if one.lane != "compute" or not isinstance(task, Action):
            continue
        assert task.layer is not None
        key = _PASSES[task.kind], task.micro_batch
        computes = task.kind != "S"
        jumps = computes and layer is not None and abs(task.layer - layer) > 1
        if key != running or jumps:
            if running is not None:
                yield *running, end_s - begin_s
            running, begin_s, layer = key, one.start_s, None
        end_s = one.end_s
        layer = task.layer if computes else layer
    if running is not None:
        yield *running, end_s - begin_s
