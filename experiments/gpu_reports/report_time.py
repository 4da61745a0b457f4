"""How long a report takes on one H100, by estimate: before a machine is rented, and while it works.

Seconds of iterations are predictions on the catalogue's `h100-80gb`. Its copies to and from the
host were borrowed from a machine with a slower bus, so half of its datasheet's rate is taken
instead. The other constants are estimates too, none was measured on a GPU: high ones, since what is
estimated must fit the time that is rented.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from experiments.gpu_reports.report_plans import ReportPlan
from experiments.gpu_reports.report_rows import steps_of
from experiments.training.run_results import prediction_of
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.cost.run_seconds import PinnedMemory, run_seconds
from mistlab.machine.hardware import Hardware, Line

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
