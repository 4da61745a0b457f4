"""Checks a report's runs: their losses must agree, GPU clocks must be steady, and machines must be
of one kind.

Strict runs of twins (plans that differ only in offloading or overlap) must have equal losses, and
equal gradient norms if they report any. Timed runs of twins need only have equal first losses:
fused attention adds up gradients in any order there (docs/decisions/0010-equal-losses.md). Runs of
one workload with different layouts on a node's GPUs must have losses that agree up to rounding: all
losses of strict runs, and the first loss of timed runs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.gpu_reports.report_plans import SERIALISED_NAME, PlanOfReport
from experiments.gpu_reports.report_rows import median_s
from experiments.speedup import same_training
from experiments.training.moved_clocks import moved_words
from experiments.training.plan_runs import Said
from mistlab.core.values import from_mapping
from mistlab.job.prediction import Clocks

# By what share losses may differ: more than twice the effect of rounding every query gradient
# twice, and less than the effect of a lost gradient (tests/runtime/test_equal_losses.py).
LOSS_TOLERANCE = 1e-4
# By what share losses may differ between parallel layouts, which add 16-bit numbers in different
# orders.
ROUNDING = same_training.ROUNDING["bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The time of a plan with overlapped tasks, and the time of the same plan with tasks one after
    another.
    """

    plan: str
    overlapped_s: float
    serialised_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Runs whose losses should agree but do not, and by how much they differ."""

    plans: tuple[str, ...]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The result of comparing runs. ``strict`` and ``timed`` are numbers of groups of plans that
    differ only in offloading or overlap; ``layouts`` is the number of plans compared with other
    parallel layouts; ``failed_checks`` lists checks whose run failed.
    """

    strict: int
    timed: int
    layouts: int
    differences: tuple[Difference, ...]
    failed_checks: tuple[Difference, ...]
    overlaps: tuple[Overlap, ...]
    moved_clocks: tuple[Difference, ...]
    machines: tuple[str, ...]


def checks_of(plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]) -> Checks:
    """Compare the losses and the GPU clocks of all runs so far."""
    checks = [plan for plan in plans if plan.is_check]
    timed = [plan for plan in plans if not plan.is_check]
    strict_twins, timed_twins = (_twins(some, outcomes) for some in (checks, timed))
    differences = [_difference(names, outcomes, is_strict=True) for names in strict_twins]
    differences += [_difference(names, outcomes, is_strict=False) for names in timed_twins]
    layouts = [*_layouts(plans, outcomes)]
    differences += [_apart(one, outcomes) for one in layouts]
    return Checks(
        strict=len(strict_twins),
        timed=len(timed_twins),
        layouts=sum(len(one) for one in layouts),
        differences=tuple(one for one in differences if one is not None),
        failed_checks=tuple(
            Difference(plans=(plan.name,), words=outcomes[plan.name]["error"])
            for plan in checks
            if "error" in outcomes.get(plan.name, {})
        ),
        overlaps=_overlaps(plans, outcomes),
        moved_clocks=_moved_clocks(outcomes),
        machines=tuple(sorted({words for one in outcomes.values() if (words := machine_of(one))})),
    )


def machine_of(outcome: Said) -> str:
    """The device and the software versions of a run, which must be equal for runs to be compared;
    empty if unknown.
    """
    of = outcome.get("environment", {})
    versions = (of.get("device"), of.get("torch"), of.get("cuda"))
    named = zip(("", "torch ", "CUDA "), versions, strict=True)
    return ", ".join(f"{name}{word}" for name, word in named if word)


def _twins(plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]) -> list[tuple[str, ...]]:
    """Groups of plans that have run and differ only in offloading or overlap."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for plan in plans:
        if "losses" in outcomes.get(plan.name, {}):
            groups[plan.twins].append(plan.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _layouts(
    plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]
) -> Iterator[list[PlanOfReport]]:
    """Groups of plans of one workload that have run and differ in their parallel layout, one plan
    for each layout.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], PlanOfReport]] = defaultdict(dict)
    for plan in plans:
        if "losses" in outcomes.get(plan.name, {}):
            groups[plan.trains].setdefault(plan.twins, plan)
    yield from ([*group.values()] for group in groups.values() if len(group) > 1)


def _apart(plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]) -> Difference | None:
    """The plans of a group whose losses differ from the median of the group by more than rounding;
    None if there are none.
    """
    steps = None if plans[0].is_check else 1
    losses = np.array([_numbers(outcomes[plan.name]["losses"])[:steps] for plan in plans])
    usual = np.median(losses, axis=0)
    drifts = np.abs(losses / usual - 1).max(axis=1)
    apart = [plan.name for plan, drift in zip(plans, drifts, strict=True) if not drift <= ROUNDING]
    if not apart:
        return None
    sentence = f"losses are {drifts.max():.1e} off those of other layouts"
    return Difference(plans=tuple(apart), words=sentence)


def _difference(
    names: tuple[str, ...], outcomes: Mapping[str, Said], *, is_strict: bool
) -> Difference | None:
    runs = [outcomes[name] for name in names]
    norms = {str(run.get("gradient_norms")) for run in runs}
    if is_strict:
        if len({str(run["losses"]) for run in runs}) > 1:
            return Difference(plans=names, words="losses differ in strict runs")
        return Difference(plans=names, words="gradients differ") if len(norms) > 1 else None
    first, *others = [_numbers(run["losses"]) for run in runs]
    if any(other[:1] != first[:1] for other in others):
        return Difference(plans=names, words="the first losses differ")
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    drifts = [abs(two / one - 1) for one, two in pairs]
    if all(drift <= LOSS_TOLERANCE for drift in drifts):
        return None
    return Difference(plans=names, words=f"losses differ by {max(drifts):.1e}")


def _numbers(losses: Sequence[float | None]) -> list[float]:
    """The losses of a run without missing ones: a stage that does not have the model's head has
    none.
    """
    return [loss for loss in losses if loss is not None]


def _overlaps(plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]) -> tuple[Overlap, ...]:
    """The plans that were timed both with and without overlap."""
    serialised = [plan.name for plan in plans if plan.is_serialised and not plan.is_check]
    pairs = [(name.removesuffix(f"-{SERIALISED_NAME}"), name) for name in serialised]
    return tuple(
        Overlap(
            plan=plan_name,
            overlapped_s=median_s(outcomes[plan_name]),
            serialised_s=median_s(outcomes[other]),
        )
        for plan_name, other in pairs
        if all("iteration_s" in outcomes.get(name, {}) for name in (plan_name, other))
    )


def _moved_clocks(outcomes: Mapping[str, Said]) -> tuple[Difference, ...]:
    moved = []
    for name, outcome in outcomes.items():
        clocks = [from_mapping(Clocks, reading) for reading in outcome.get("clocks", ())]
        warning = moved_words(clocks[0], clocks[-1]) if clocks else ""
        moved += [Difference(plans=(name,), words=warning)] if warning else []
    return tuple(moved)
