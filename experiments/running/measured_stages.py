"""The times of a stage's passes in a measured iteration, named as in a prediction."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from mistlab.schedule.slot_table import Action

if TYPE_CHECKING:
    from runtime.session import MeasuredTask

# A layer's optimizer step is part of the first forward pass.
_PASSES = {"F": "forward", "S": "forward", "B": "backward"}


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
    """Seconds of each forward and each backward pass, by micro-batch."""
    spans: dict[str, dict[int, list[tuple[float, float]]]] = {
        "forward": defaultdict(list),
        "backward": defaultdict(list),
    }
    for task in tasks:
        if task.lane == "compute" and isinstance(task.task, Action):
            of_kind = spans[_PASSES[task.task.kind]]
            of_kind[task.task.micro_batch].append((task.start_s, task.end_s))
    forwards, backwards = (
        [_lasting_s(of_pass) for _, of_pass in sorted(passes.items())] for passes in spans.values()
    )
    return forwards, backwards


def _lasting_s(spans: list[tuple[float, float]]) -> float:
    return max(end for _, end in spans) - min(start for start, _ in spans)
