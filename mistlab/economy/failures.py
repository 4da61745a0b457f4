"""The time that a training run loses to failures, in closed form: each GPU fails independently of
the others, at a constant rate.

N GPUs, each of which fails every m seconds on average, have together L = N/m failures a second (a
Poisson process). A run works for an interval T, then writes a checkpoint, which takes C, and so on.
A failure undoes what was done since the last checkpoint. It is noticed after a time D. Then the run
restarts and reads the checkpoint, which takes R together; if a GPU fails meanwhile, that failure is
noticed after D again, and the restart begins anew. Expected times are:

- From a failure to the end of R: X = e^(L R) D + (e^(L R) - 1) / L.
- To get through T + C, with failures: E = (e^(L (T + C)) - 1) (1/L + X).

The share of time that is work is T / E. It is largest where (1 - L T) e^(L (T + C)) = 1, whatever X
is (Daly 2006 has the same for D = 0); about T = sqrt(2 C / L).
"""

import math
from dataclasses import dataclass, field

from mistlab.core.values import Checked, bounded
from mistlab.economy.bill import gpu_hours_of

# The number of Newton iterations that find the best checkpoint interval; each doubles the number of
# correct digits.
STEPS = 60
# If more than this many failures are expected while a checkpoint is written, the best interval
# between checkpoints is practically the mean time between failures.
HOPELESS = 25.0
# The largest exponent x for which a float can hold e^x.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability(Checked):
    """How often GPUs fail, and how long a failure and a checkpoint take."""

    gpus: int = field(metadata=bounded(minimum=1))
    gpu_hours_between_failures: float = field(metadata=bounded(above=0))
    checkpoint_s: float = field(metadata=bounded(above=0))
    detection_s: float = field(metadata=bounded(minimum=0))
    restart_s: float = field(metadata=bounded(minimum=0))
    reload_s: float = field(metadata=bounded(minimum=0))

    @property
    def failures_per_s(self) -> float:
        """The number of failures per second among all GPUs of the run."""
        return self.gpus / (self.gpu_hours_between_failures * 3600)

    @property
    def start_s(self) -> float:
        """The seconds from the detection of a failure until training goes on."""
        return self.restart_s + self.reload_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """The shares of a run's time by cause: lasting work, writing checkpoints, repeated work,
    detection of failures, restarts; they sum to one.
    """

    work: float
    checkpoints: float
    work_done_again: float
    detection: float
    starting: float

    @property
    def lost(self) -> float:
        """The share of a run's time that is not lasting work."""
        return 1.0 - self.work


def best_interval_s(reliability: Reliability) -> float:
    """The interval between checkpoints that maximises the share of a run's time spent on lasting
    work.
    """
    rate, written = reliability.failures_per_s, reliability.checkpoint_s
    # The interval T solves, with x = L T and checkpoints of C seconds: (1 - x) e^(x + L C) = 1,
    # that is x + ln(1 - x) + L C = 0, for 0 < x < 1. The left side is decreasing and concave, so
    # Newton's iterations from the right end converge to the root from above.
    extra = rate * written
    if extra > HOPELESS:
        return 1.0 / rate
    x = 1.0 - math.exp(-1.0 - extra)
    for _ in range(STEPS):
        x -= (x + math.log1p(-x) + extra) * (x - 1.0) / x
    return x / rate


def shares_of(reliability: Reliability, interval_s: float) -> TimeShares | None:
    """The shares of a run's time by cause, given the interval between checkpoints; None if failures
    are so frequent that practically no interval completes.
    """
    rate, start_s = reliability.failures_per_s, reliability.start_s
    written_s, noticed_s = reliability.checkpoint_s, reliability.detection_s
    exponent = rate * (interval_s + written_s + start_s)
    if exponent > LARGEST_EXPONENT:
        return None
    # The expected number of failures before an interval completes, without those that happen during
    # restarts.
    failures = math.expm1(rate * (interval_s + written_s))
    tries = math.exp(rate * start_s)
    detection_s = failures * tries * noticed_s
    starting_s = failures * math.expm1(rate * start_s) / rate
    running_s = failures / rate
    all_s = running_s + detection_s + starting_s
    return TimeShares(
        work=interval_s / all_s,
        checkpoints=written_s / all_s,
        work_done_again=(running_s - interval_s - written_s) / all_s,
        detection=detection_s / all_s,
        starting=starting_s / all_s,
    )


def intervals_in(reliability: Reliability, interval_s: float, seconds: float) -> float:
    """The expected number of checkpoint intervals that a run completes in this many seconds; below
    one it makes no progress.
    """
    shares = shares_of(reliability, interval_s)
    return 0.0 if shares is None else shares.work * seconds / interval_s


def lost_gpu_hours(reliability: Reliability, shares: TimeShares, seconds: float) -> float:
    """The GPU hours that a run of this many seconds spends on anything but lasting work."""
    return shares.lost * gpu_hours_of(reliability.gpus, seconds)


def failures_in(reliability: Reliability, seconds: float) -> float:
    """The expected number of failures of all GPUs in this many seconds."""
    return reliability.failures_per_s * seconds
