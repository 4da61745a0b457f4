"""Finds the nearest job that a target framework can express, and tells which choices are lost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mistlab.core.values import FieldError, shown
from mistlab.engines.engine import ENGINES as ALL_ENGINES
from mistlab.engines.engine import Precision, names_for_plans
from mistlab.export.given import Remark, changes, changes_of_workloads
from mistlab.export.rules import as_replicas, highest, with_plan, with_values, with_workload
from mistlab.export.target import NARROW, Row, Target
from mistlab.job.job import Job
from mistlab.plan.dimension import Dimension
from mistlab.plan.dimensions import DIMENSIONS, dimensions_of_axes, ranks_of
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import Workload
from mistlab.reduction.reduction_costs import PLAIN_REDUCTION
from mistlab.schedule.orders import DEFAULT_ORDER, is_order_path

# The engine that accepts every plan: an export changes jobs under it, and gives them the target's
# engine at the end.
ANY_PLAN = "mistlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The nearest job that a target framework can express, with remarks on the choices that were
    lost on the way.
    """

    job: Job
    remarks: tuple[Remark, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the target framework can express every choice of the plan."""
        return not any(remark.kind in ("lost", "approximated") for remark in self.remarks)


def nearest(job: Job, target: Target) -> Nearest:
    """Find the nearest job that a target framework can express."""
    wanted = job
    remarks: list[Remark] = []
    workload = _sayable_workload(job.workload, target)
    sayable = under_any_engine(replace(job, workload=workload))
    remarks += _workload_remarks(wanted, workload, target)
    job = canonical(sayable)
    named = with_plan(job, order=DEFAULT_ORDER) if is_order_path(job.plan.order) else job
    remarks += changes(job, named, f"{target.title} takes no order from a file")
    job = named
    for name in axes_without_row(target):
        spread = canonical(as_replicas(job, name))
        because = (
            f"{target.title} has no {DIMENSIONS[name].noun} ranks here: they become data-parallel "
            "replicas"
        )
        remarks += changes(job, spread, because)
        job = spread
    kept = job
    job = without(kept, [name for name in DIMENSIONS if name not in target.said])
    remarks += changes(kept, job, f"the export to {target.title} cannot express it")
    for row in target.rows:
        changed = canonical(row.nearest(job))
        remarks += changes(job, changed, f"{target.title} {row.because}")
        job = changed
    overlaps = wanted.plan.overlap_communication or target.always_overlaps
    engines = target.engines_for(wanted)
    job = with_engine(job, engines, overlaps=overlaps, precision=workload.precision)
    remarks += _precision_remark(workload.precision, job)
    remarks += _overlap_remark(wanted, job, target)
    remarks += _idle_remark(wanted, job, target)
    remarks += _engine_remark(wanted, job, target)
    remarks += [Remark(kind="noted", choice=target.name, text=note) for note in target.notes(job)]
    return Nearest(job=job, remarks=tuple(remarks))


def axes_without_row(target: Target) -> list[str]:
    """List the parallel degrees that the target framework cannot express at all."""
    return [name for name in dimensions_of_axes() if name not in target.said]


def under_any_engine(job: Job) -> Job:
    """Return the job under the engine that accepts every plan, with 16-bit GEMMs instead of 8- or
    4-bit ones.
    """
    plan = replace(job.plan, engine=ANY_PLAN, overlap_communication=True)
    return replace(job, workload=_with_wide_products(job.workload), plan=plan)


def _with_wide_products(workload: Workload) -> Workload:
    is_narrow = workload.precision in NARROW
    return replace(workload, precision="bf16") if is_narrow else workload


def _sayable_workload(workload: Workload, target: Target) -> Workload:
    """Return the workload without settings that the target framework's file cannot hold; no file
    holds how a router balances load.
    """
    if workload.precision not in target.precisions:
        workload = _with_wide_products(workload)
        if workload.precision == "tf32":
            workload = replace(workload, precision="fp32")
    if workload.optimizer not in target.optimizers:
        workload = replace(workload, optimizer="adamw")
    if not _says_sums(workload, target):
        workload = replace(workload, gradients="usual")
    if not target.drops_tokens:
        workload = replace(workload, expert_capacity=None, expert_padding=False)
    return replace(workload, expert_imbalance=1.0, reduction=PLAIN_REDUCTION)


def _says_sums(workload: Workload, target: Target) -> bool:
    engines = [ALL_ENGINES[name] for name in target.engines]
    return target.says_sums and any(
        not engine.sums_problem(workload.precision, workload.gradients)
        for engine in engines
        if workload.precision in engine.memory
    )


def with_engine(
    job: Job, engines: Sequence[str], *, overlaps: bool, precision: Precision | None = None
) -> Job:
    """Return the job under the first of ``engines`` that can run it, or under the engine that runs
    every plan. Communication overlaps, and GEMMs have ``precision``, as far as the engine supports
    it.
    """
    narrow = (precision,) if precision in NARROW else ()
    for products in (*narrow, job.workload.precision):
        workload = replace(job.workload, precision=products)
        for engine in engines:
            if engine not in names_for_plans():
                continue
            for overlap in (overlaps, True):
                plan = replace(job.plan, engine=ANY_PLAN)
                try:
                    plan = replace(plan, engine=engine, overlap_communication=overlap)
                    return replace(job, workload=workload, plan=plan)
                except FieldError:
                    continue
    return under_any_engine(job)


def canonical(job: Job, *, shares_experts: bool = True) -> Job:
    """Return the job with defaults for all choices that have no effect, such as the ZeRO level
    where each state is on a single rank.

    Experts' states are shared by other ranks than all else: on one replica, by those that divide
    layers. Frameworks for which that is not so (``shares_experts``) share with replicas alone.
    """
    has_experts = shares_experts and job.workload.model.experts is not None
    stages = []
    for stage in job.plan.stages:
        idle = {
            name: row.default
            for name, row in DIMENSIONS.items()
            if row.shared_by and _is_alone(row, stage, has_experts=has_experts)
        }
        stages.append(stage.with_values(idle) if idle else stage)
    return replace(job, plan=replace(job.plan, stages=tuple(stages)))


def _is_alone(row: Dimension, stage: StagePlan, *, has_experts: bool) -> bool:
    """Whether every group of ranks that a choice concerns, experts' groups included, is a single
    rank.
    """
    groups = [row.shared_by]
    if has_experts and row.experts_shared_by:
        groups.append(row.experts_shared_by)
    return all(ranks_of(group, stage.degree) == 1 for group in groups)


def without(job: Job, names: Sequence[str]) -> Job:
    """Return the job with defaults for the named plan dimensions."""
    defaults = {name: DIMENSIONS[name].default for name in names}
    stages = [stage.with_values(defaults) if names else stage for stage in job.plan.stages]
    return replace(job, plan=replace(job.plan, stages=tuple(stages)))


def _workload_remarks(wanted: Job, workload: Workload, target: Target) -> Iterator[Remark]:
    because = f"the export to {target.title} cannot express it"
    yield from changes_of_workloads(wanted.workload, workload, because)


def _precision_remark(wanted: Precision, job: Job) -> Iterator[Remark]:
    """Yield a remark if no engine supports low-precision GEMMs together with the plan's other
    choices.
    """
    now = job.workload.precision
    if wanted in NARROW and now != wanted:
        text = f"{wanted} -> {now}: no engine predicts {wanted} GEMMs with the plan's other choices"
        yield Remark(kind="approximated", choice="precision", text=text)


def _overlap_remark(wanted: Job, job: Job, target: Target) -> Iterator[Remark]:
    was, now = wanted.plan.overlap_communication, job.plan.overlap_communication
    if was != now:
        engine = f"engine {job.plan.engine}, which predicts it,"
        always = target.title if target.always_overlaps else engine
        yield Remark(
            kind="approximated",
            choice="overlap_communication",
            text=f"{shown(was)} -> {shown(now)}: {always} always overlaps communication",
        )


def _idle_remark(wanted: Job, job: Job, target: Target) -> Iterator[Remark]:
    """Yield a remark if the exported plan leaves GPUs idle that the user's plan uses."""
    was, now = wanted.plan.num_gpus, job.plan.num_gpus
    if now < was:
        text = f"{was} -> {now} GPUs: no degrees that {target.title} can express use all {was}"
        yield Remark(kind="approximated", choice="cluster", text=text)


def _engine_remark(wanted: Job, job: Job, target: Target) -> Iterator[Remark]:
    engine, wished = job.plan.engine, target.engines_for(wanted)
    if engine not in wished[:1]:
        text = f"{engine} predicts the plan, as the closest to {target.title}"
        yield Remark(kind="noted", choice="engine", text=text)
    elif engine != wanted.plan.engine:
        text = f"{wanted.plan.engine} -> {engine}, which predicts plans as {target.title} runs them"
        yield Remark(kind="noted", choice="engine", text=text)


# What targets do with the workload's choice of the weights that are trained: a file that holds the
# model trains all of them, and one that does not leaves the choice to the training script.


def _trains_all(job: Job) -> Job:
    return with_workload(job, train="all", adapter_rank=None, adapter_targets="all", base="16bit")


TRAINS_ALL = (
    Row(
        choices=("train", "adapter_rank", "adapter_targets", "base"),
        nearest=_trains_all,
        because="trains all weights by this file: for adapters export to a recipe, such as trl, "
        "axolotl or automodel",
    ),
    Row(
        choices=("states",),
        nearest=lambda job: with_workload(job, states="mixed"),
        because="keeps 32-bit states by this file: for 16 bits export to a recipe, such as "
        "torchtune or automodel",
    ),
)
WHOLE_LOSS = Row(
    choices=("loss",),
    nearest=lambda job: with_workload(job, loss="whole"),
    because="computes the logits of all tokens at once by this file: for a loss in chunks export "
    "--to torchtitan, or to a recipe, such as torchtune or trl",
)


def notes_on_training(job: Job) -> Iterator[str]:
    """Tell what a training script has to do for a plan that trains adapters or keeps 16-bit states,
    which the exported file does not hold.
    """
    work = job.workload
    if work.train == "adapters":
        further = " and feed-forward networks" if work.adapter_targets == "all" else ""
        yield (
            f"the training script has to train adapters of rank {work.rank} on linear layers of "
            f"attention{further}, with frozen weights of {work.base.removesuffix('bit')} bits: by "
            "itself it trains all weights"
        )
    if work.states == "16bit":
        yield "the training script has to keep weights, gradients and moments in 16 bits"
    if work.loss == "chunked":
        yield (
            "the training script has to compute the loss in chunks (use_liger_kernel: true of "
            "transformers, loss_type: chunked_nll of TRL): by itself it computes the logits of all "
            "tokens at once"
        )


# Rules for targets built on PyTorch's FSDP2.
#
# FSDP2 shards weights, gradients and optimizer states. For the backward pass it gathers weights
# again (like ZeRO-3) or keeps those gathered for the forward pass (like ZeRO-2). Without FSDP2,
# replicas all-reduce whole gradients. Offloading moves weights, gradients and optimizer states to
# the host together.


STATES = ("offload_weights", "offload_gradients", "offload_optimizer")
# The engines that predict targets built on FSDP2: FSDP's own first, then this package's, which also
# runs plans that FSDP's cannot.
ENGINES = ("fsdp", "mistlab")
# The engines that predict frameworks which fine-tune Hugging Face's models: engines with these
# models' own operators come before those with the same sharding.
_OF_TUNERS = {"fsdp": "trainer", "deepspeed": "deepspeed-trainer"}


def of_tuners(engines: Sequence[str]) -> tuple[str, ...]:
    """Return the engines that predict a framework for fine-tuning, the best first, from those that
    predict how it shards.

    >>> of_tuners(("fsdp", "mistlab"))
    ('trainer', 'fsdp', 'mistlab')
    """
    pairs = ((_OF_TUNERS.get(name, ""), name) for name in engines)
    return tuple(name for pair in pairs for name in pair if name)


def sharded(job: Job) -> Job:
    """Give all stages of a job ZeRO level 0, 2 or 3. ZeRO-1 becomes ZeRO-2, and so does 0 where
    states are offloaded; a single replica shards nothing.
    """
    level = int(highest(job, "zero"))
    if level == 1 or (level == 0 and offloads(job)):
        level = 2
    return canonical(with_values(job, {"zero": level}), shares_experts=False)


def states_offloaded(job: Job) -> Job:
    """Make a job offload weights, gradients and optimizer states together, or none of them."""
    return with_values(job, dict.fromkeys(STATES, float(offloads(job))))


def offloads(job: Job) -> bool:
    """Whether a stage of the job offloads weights, gradients or optimizer states."""
    return any(highest(job, name) > 0 for name in STATES)


def wholly_sharded(job: Job) -> Job:
    """Give a job ZeRO level 2 or 3, for a framework that always trains under FSDP2."""
    job = sharded(job)
    level = job.plan.stages[0].zero or 2
    return canonical(with_values(job, {"zero": level}), shares_experts=False)


# Rules that several frameworks built on FSDP2 share.
WHOLLY_SHARDED = Row(
    choices=("zero",), nearest=wholly_sharded, because="always shards by FSDP2, as ZeRO-2 or 3"
)
SHARDED = Row(
    choices=("zero",), nearest=sharded, because="shards by FSDP2, as ZeRO-2 or 3, or not at all"
)
OFFLOADED = Row(choices=STATES, nearest=states_offloaded, because="offloads all states or none")


def fewest_replicas(job: Job) -> Job:
    """Give all stages as many replicas of the sharded states as the stage with the fewest; 1 if
    nothing is sharded.
    """
    first, *_ = stages = job.plan.stages
    fewest = min(stage.state_replicas for stage in stages) if first.zero else 1
    return with_values(job, {"state_replicas": math.gcd(fewest, first.data_parallel)})


REPLICAS_OF_STATES = Row(
    choices=("state_replicas",),
    nearest=fewest_replicas,
    because="has one number of replicas for all states",
)
