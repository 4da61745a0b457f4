"""Simulates days of a training run in which GPUs fail, one failure after another.

The closed form for such a run is ``mistlab.economy.failures``. Here every GPU draws its own
failures, and the work that they undo is counted as it happens, until the end of the run.
"""

from dataclasses import dataclass

import numpy as np

from mistlab.economy.failures import Reliability, TimeShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of a simulated training run with failures: the seconds spent on each activity, and
    the number of failures.
    """

    shares: TimeShares
    failures: int


@dataclass(slots=True)
class _Spent:
    """The seconds that a simulated run has spent on each activity so far."""

    work: float = 0.0
    checkpoints: float = 0.0
    work_done_again: float = 0.0
    detection: float = 0.0
    starting: float = 0.0


def played(
    reliability: Reliability, interval_s: float, seconds: float, draw: np.random.Generator
) -> Played:
    """Simulate one training run of a given duration, in which a checkpoint is written after every
    ``interval`` seconds of work.
    """
    failures = _failures(reliability, seconds, draw)
    spent, now_s, next_failure = _Spent(), 0.0, 0
    while now_s < seconds:
        fails_s = failures[next_failure] if next_failure < len(failures) else seconds
        fails = next_failure < len(failures)
        _run(spent, fails_s - now_s, reliability.checkpoint_s, interval_s, fails=fails)
        now_s = fails_s
        if fails:
            now_s, next_failure = _recovered(spent, reliability, failures, next_failure, seconds)
    whole = {name: getattr(spent, name) / seconds for name in _Spent.__slots__}
    return Played(shares=TimeShares(**whole), failures=len(failures))


def _failures(reliability: Reliability, seconds: float, draw: np.random.Generator) -> list[float]:
    """The times in seconds at which any of the GPUs fails, ascending."""
    rate = 1.0 / (reliability.gpu_hours_between_failures * 3600)
    numbers = draw.poisson(rate * seconds, size=reliability.gpus)
    moments: list[float] = np.sort(draw.uniform(0.0, seconds, size=int(numbers.sum()))).tolist()
    return moments


def _run(
    spent: _Spent, span_s: float, checkpoint_s: float, interval_s: float, *, fails: bool
) -> None:
    """Work and write checkpoints in turn until a given time; a failure ends that earlier, and the
    work since the last checkpoint is lost.
    """
    whole, rest_s = divmod(span_s, interval_s + checkpoint_s)
    spent.work += whole * interval_s
    spent.checkpoints += whole * checkpoint_s
    if fails:
        spent.work_done_again += rest_s
    else:
        spent.work += min(rest_s, interval_s)
        spent.checkpoints += max(0.0, rest_s - interval_s)


def _recovered(
    spent: _Spent,
    reliability: Reliability,
    failures: list[float],
    next_failure: int,
    seconds: float,
) -> tuple[float, int]:
    """Recover from a failure; returns when the run resumes, and the index of the next failure."""
    now_s = failures[next_failure]
    while True:
        noticed_s = min(seconds, now_s + reliability.detection_s)
        spent.detection += noticed_s - now_s
        # GPUs that fail before the first failure is noticed are replaced at the same time.
        while next_failure < len(failures) and failures[next_failure] <= noticed_s:
            next_failure += 1
        started_s = min(seconds, noticed_s + reliability.start_s)
        if next_failure < len(failures) and failures[next_failure] < started_s:
            spent.starting += failures[next_failure] - noticed_s
            now_s = failures[next_failure]
        else:
            spent.starting += started_s - noticed_s
            return started_s, next_failure
