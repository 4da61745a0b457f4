"""How long a report on one GPU takes, by estimate, run by run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from experiments.gpu_reports.report_plans import ReportPlan
from experiments.gpu_reports.report_rows import steps_of
from experiments.training.run_results import prediction_of
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.machine.hardware import Hardware, Line

# How long a run of a plan takes on one H100 besides its iterations, by estimate.
#
# None of the constants was measured on a GPU. They are high, since what is estimated must fit the
# time for which a machine is rented.


# Of iterations over predicted ones, and of those in strict mode over others.
SLOWER, STRICT = 1.2, 2.0
# One task after another, over tasks side by side.
SERIALISED = 1.5
# A process: interpreter, torch, the GPU's context, libraries.
PROCESS_S = 20.0
# A run: its model, rings, streams and groups, weights drawn on the device and copied, two readings
# of the clocks, what is said of it.
RUN_S = 4.0
# Pages are touched and registered; those that are pinned already are set to zero.
PIN_S_A_GIB, ZERO_S_A_GIB = 0.4, 0.1


def run_seconds(
    iterations_s: float, pinning_s: float, *, is_strict: bool, is_serialised: bool
) -> float:
    """Seconds of a run, from those of its iterations as predicted and those to pin memory."""
    slower = SLOWER * (STRICT if is_strict else 1) * (SERIALISED if is_serialised else 1)
    return RUN_S + pinning_s + slower * iterations_s


class PinnedMemory:
    """The memory that the running process has pinned; strict runs have a process of their own."""

    def __init__(self) -> None:
        self._gib = 0.0
        self._is_strict: bool | None = None

    def seconds(self, gib: float, *, is_strict: bool) -> float:
        """The time to start a process, if this run is the first of its kind, and to pin memory."""
        seconds = 0.0
        if is_strict != self._is_strict:
            self._is_strict, self._gib, seconds = is_strict, 0.0, PROCESS_S
        if gib > self._gib:
            self._gib = gib
            return seconds + PIN_S_A_GIB * gib
        return seconds + ZERO_S_A_GIB * gib


# How long a report takes on one H100, by estimate: before a machine is rented, and while it works.
#
# Seconds of iterations are predictions on the catalogue's `h100-80gb`. Its copies to and from the
# host were borrowed from a machine with a slower bus, so half of its datasheet's rate is taken
# instead. The other constants are estimates too, none was measured on a GPU: high ones, since what
# is estimated must fit the time that is rented.


REFERENCE = "h100-80gb"
LINK_SHARE, LINK_LATENCY_US = 0.5, 20.0
# All tables: two to three thousand short measurements, and processes for copies and streams.
PROFILE_S = 240.0
# The end of a call: fits, predictions, the page.
CALL_S = 20.0

PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one step of a report: a plan by its name, or the profile."""

    name: str
    seconds: float


def estimates(plans: Sequence[ReportPlan], *, profiles: bool = True) -> list[Estimate]:
    """Each step in the order in which it runs."""
    first = [plan for plan in plans if plan.comes_first]
    others = [plan for plan in plans if not plan.comes_first]
    hardware = reference_hardware()
    pinned = PinnedMemory()
    found = [_run(plan, hardware, pinned) for plan in first]
    found += [Estimate(name=PROFILE, seconds=PROFILE_S)] if profiles else []
    return found + [_run(plan, hardware, pinned) for plan in others]


def total_s(steps: Iterable[Estimate], minutes: float) -> float:
    """Seconds of all steps in calls of so many minutes."""
    seconds = sum(step.seconds for step in steps)
    calls = max(1, -(-seconds // (60 * minutes - CALL_S)))
    return seconds + calls * CALL_S


def reference_hardware() -> Hardware:
    """The catalogue's H100, with copies by its datasheet."""
    hardware = catalog.hardware(REFERENCE)
    assert hardware.transfers is not None
    rate = LINK_SHARE * hardware.node.host_link_gbytes_per_s
    line = Line(latency_us=LINK_LATENCY_US, gbytes_per_s=rate, smallest_mib=1.0, largest_mib=1024.0)
    groups = tuple(
        replace(group, host_to_device=line, device_to_host=line)
        for group in hardware.transfers.groups
    )
    return replace(hardware, transfers=replace(hardware.transfers, groups=groups))


def _run(plan: ReportPlan, hardware: Hardware, pinned: PinnedMemory) -> Estimate:
    job = plan.job(hardware)
    prediction = prediction_of(job, plan.stage)
    (stage,) = prediction.stages
    seconds = run_seconds(
        steps_of(plan) * prediction.iteration_s,
        pinned.seconds(stage.host_bytes / GIB_BYTES, is_strict=plan.is_check),
        is_strict=plan.is_check,
        is_serialised=plan.is_serialised,
    )
    return Estimate(name=plan.name, seconds=seconds)
