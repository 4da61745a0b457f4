"""The nearest job that a target can say, row by row, and what was lost on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mistlab.engines.table import names_for_plans
from mistlab.export.remarks import Remark, changes
from mistlab.export.target import Target
from mistlab.export.with_parts import with_plan, with_workload
from mistlab.schedule.orders import DEFAULT_ORDER, is_order_path
from mistlab.values.dimensions import DIMENSIONS
from mistlab.values.errors import FieldError
from mistlab.values.job import Job
from mistlab.values.mesh import ranks_of

# The engine that takes every plan. Jobs change under it, and get the target's engine at the end.
ANY_PLAN = "mistlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The nearest job that a target can say, and what became of the choices that it cannot say."""

    job: Job
    remarks: tuple[Remark, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the target says every choice of the plan."""
        return not any(remark.kind in ("lost", "approximated") for remark in self.remarks)


def nearest(job: Job, target: Target) -> Nearest:
    """The nearest job that a target can say."""
    wanted = job
    remarks: list[Remark] = []
    changed = _without_8_bits(job)
    remarks += changes(job, changed, f"the export to {target.title} has no row for it")
    remarks += _8_bits_remark(wanted, target)
    job = canonical(under_any_engine(changed))
    named = with_plan(job, order=DEFAULT_ORDER) if is_order_path(job.plan.order) else job
    remarks += changes(job, named, f"{target.title} takes no order from a file")
    job = without(named, [name for name in DIMENSIONS if name not in target.said])
    remarks += changes(named, job, f"the export to {target.title} has no row for it")
    for row in target.rows:
        changed = canonical(row.nearest(job))
        remarks += changes(job, changed, f"{target.title} {row.because}")
        job = changed
    overlaps = wanted.plan.overlap_communication or target.always_overlaps
    job = with_engine(job, target.engines_for(wanted.plan.engine), overlaps=overlaps)
    remarks += _overlap_remark(wanted, job, target)
    remarks += _engine_remark(wanted, job, target)
    remarks += [Remark(kind="noted", choice=target.name, text=note) for note in target.notes(job)]
    return Nearest(job=job, remarks=tuple(remarks))


def under_any_engine(job: Job) -> Job:
    """A job under the engine that takes every plan."""
    plan = replace(job.plan, engine=ANY_PLAN, overlap_communication=True)
    return replace(job, plan=plan)


def _without_8_bits(job: Job) -> Job:
    """The job with products of 16 bits at least, and with moments of 32 bits."""
    given = job.workload.precision
    precision = "bf16" if given in ("fp8", "fp4") else given
    return with_workload(job, precision=precision, optimizer="adamw")


def with_engine(job: Job, engines: Sequence[str], *, overlaps: bool) -> Job:
    """A job under the first of some engines that can run it, otherwise under the one that can run
    every plan; it overlaps communication or not, as far as the engine leaves the choice."""
    for engine in engines:
        if engine not in names_for_plans():
            continue
        for overlap in (overlaps, True):
            plan = replace(job.plan, engine=ANY_PLAN)
            try:
                plan = replace(plan, engine=engine, overlap_communication=overlap)
                return replace(job, plan=plan)
            except FieldError:
                continue
    return under_any_engine(job)


def canonical(job: Job) -> Job:
    """A job in which a choice that ranks share, such as a ZeRO level, has its default wherever a
    single rank has nobody to share with."""
    stages = []
    for stage in job.plan.stages:
        idle = {
            name: row.default
            for name, row in DIMENSIONS.items()
            if row.shared_by and ranks_of(row.shared_by, stage.degree) == 1
        }
        stages.append(stage.with_values(idle) if idle else stage)
    return replace(job, plan=replace(job.plan, stages=tuple(stages)))


def without(job: Job, names: Sequence[str]) -> Job:
    """A job with some dimensions at their defaults."""
    defaults = {name: DIMENSIONS[name].default for name in names}
    stages = [stage.with_values(defaults) if names else stage for stage in job.plan.stages]
    return replace(job, plan=replace(job.plan, stages=tuple(stages)))


def _8_bits_remark(wanted: Job, target: Target) -> Iterator[Remark]:
    if wanted.workload.precision == "fp8" and target.words_for_8_bits:
        text = f"add {target.words_for_8_bits} for 8-bit products: the plan itself has their cost"
        yield Remark(kind="noted", choice="precision", text=text)


def _overlap_remark(wanted: Job, job: Job, target: Target) -> Iterator[Remark]:
    was, now = wanted.plan.overlap_communication, job.plan.overlap_communication
    if was != now:
        always = target.title if target.always_overlaps else "what stands for it in predictions"
        yield Remark(
            kind="approximated",
            choice="overlap_communication",
            text=f"{was} -> {now}: {always} always overlaps",
        )


def _engine_remark(wanted: Job, job: Job, target: Target) -> Iterator[Remark]:
    engine, wished = job.plan.engine, target.engines_for(wanted.plan.engine)
    if engine not in wished[:1]:
        text = f"predictions are those of {engine}, which comes closest to {target.title} here"
        yield Remark(kind="noted", choice="engine", text=text)
    elif engine != wanted.plan.engine:
        text = f"{wanted.plan.engine} -> {engine}: {target.title}'s own schedule runs the plan"
        yield Remark(kind="noted", choice="engine", text=text)
