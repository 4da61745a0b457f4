"""Checks a plan without a GPU for data races, unnoticed waits of the host, and deadlocks of
collectives, mostly on a small plan of the same structure.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import gcd, lcm

from mistlab.job.job import Job
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.model_parts import Experts
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.reduction.reduction_costs import Reduction
from mistlab.schedule.orders import REPEATING, is_order_path, repeat_of
from mistlab.stages.plan_orders import placement_of_plan
from runtime.checks.collectives.findings import CollectiveFinding, collective_findings
from runtime.checks.fake.fake_device import device_findings
from runtime.checks.fake.watch import WaitFinding
from runtime.checks.races.judge import Judge, RaceFinding
from runtime.checks.races.recorded_rank import ITERATIONS, trace_of
from runtime.comm.replicas import ReplicaRanks
from runtime.comm.topology import Topology
from runtime.engine.training import Training
from runtime.runnable import check_norms, check_runnable

# Makes a small plan of the same structure as a plan, which a CPU computes quickly.
#
# The small plan keeps everything that decides a rank's tasks, waits and messages: stages, degrees,
# ZeRO levels, offload ratios, precision and padding. Widths shrink. The numbers of blocks and
# micro-batches shrink too, but by even numbers in each model chunk and each period of the order of
# passes, because tasks alternate between two buffers.


MOST_BLOCKS = 6
MOST_BLOCKS_OF_CHUNK = 3
# The number of micro-batches in the small plan, beyond those that fill the pipeline.
MOST_BATCHES = 4
MOST_SEQUENCE = 16
# The most steps between the outer steps (DiLoCo) of two fragments, in the small plan.
MOST_DISTANCE = 2
HEAD_DIMS = (8, 16, 32, 64, 128)
PLAIN = Reduction()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlan:
    """A small workload and plan with the structure of a large plan, and notes on what was left
    out.
    """

    workload: Workload
    plan: Plan
    left_out: tuple[str, ...]


def small(workload: Workload, plan: Plan) -> SmallPlan:
    """A small plan with the same structure as the plan."""
    chunks = placement_of_plan(plan).chunks
    # An order file lists all micro-batches, so their number stays.
    batches = plan.micro_batches
    if not is_order_path(plan.order):
        batches = _few_batches(plan)
    shared = gcd(*(stage.micro_batch for stage in plan.stages))
    stages = tuple(_small_stage(stage, shared, chunks) for stage in plan.stages)
    left_out = []
    blocks, most_blocks = (max(one.layers for one in of) for of in (stages, plan.stages))
    if blocks != most_blocks:
        left_out.append(f"{blocks} blocks stand for {most_blocks} of a stage")
    if batches != plan.micro_batches:
        left_out.append(f"{batches} micro-batches stand for {plan.micro_batches}")
    degrees = lcm(*(stage.head_ranks for stage in plan.stages))
    parts = lcm(*(stage.token_parts for stage in plan.stages))
    first = stages[0]
    reduction = _small_reduction(workload.reduction)
    if reduction.every != workload.reduction.every:
        left_out.append(f"cycles of {reduction.every} steps stand for {workload.reduction.every}")
    small_workload = replace(
        workload,
        reduction=reduction,
        model=replace(
            _small_model(workload.model, degrees, sum(stage.layers for stage in stages)),
            experts=_small_experts(workload.model.experts, plan),
        ),
        sequence_length=min(workload.sequence_length, -(-MOST_SEQUENCE // parts) * parts),
        global_batch=first.micro_batch * first.data_parallel * batches,
    )
    return SmallPlan(
        workload=small_workload,
        plan=replace(plan, micro_batches=batches, stages=stages),
        left_out=tuple(left_out),
    )


def _small_reduction(how: Reduction) -> Reduction:
    """The reduction with the shortest averaging cycle that its fragments and delay allow: at most
    two steps per fragment.
    """
    if how.every == 1:
        return how
    distance = min(how.schedule.distance, MOST_DISTANCE)
    return replace(how, every=how.fragments * distance, delay=min(how.delay, distance - 1))


def _few_batches(plan: Plan) -> int:
    """The number of micro-batches of the small plan; in a periodic order of passes at least twice
    the number of stages, if the plan has as many.
    """
    repeat = repeat_of(plan.order, plan.num_stages)
    most = plan.num_stages + MOST_BATCHES
    if plan.order in REPEATING:
        most = 2 * plan.num_stages + repeat - 1
    return _at_most(plan.micro_batches, most, repeat)


def _small_stage(stage: StagePlan, shared: int, chunks: int) -> StagePlan:
    most = max(MOST_BLOCKS, MOST_BLOCKS_OF_CHUNK * chunks)
    layers = _at_most(stage.layers, most, 2 * chunks)
    counts = stage.counts
    if layers < stage.layers:
        # Some blocks of each way to save memory (such as recomputation) are kept, and some plain
        # ones.
        treated = layers // (1 + sum(count > 0 for count in counts.values()))
        counts = {
            name: {0: 0, stage.layers: layers}.get(count, treated) for name, count in counts.items()
        }
    changes = {**counts, "layers": layers, "micro_batch": stage.micro_batch // shared}
    return stage.with_values(changes)


def _small_model(model: ModelSpec, degrees: int, layers: int) -> ModelSpec:
    """The model with as few heads and as small widths as the tensor-parallel degrees allow."""
    heads = degrees if model.kv_heads == model.heads else 2 * degrees
    head_dim = next(
        (size for size in HEAD_DIMS if (size * model.rotary_fraction) % 2 == 0), model.head_dim
    )
    hidden = heads * head_dim
    vocab = -(-96 // degrees) * degrees
    return replace(
        model,
        layers=layers,
        heads=heads,
        kv_heads=degrees,
        head_dim=head_dim,
        hidden=hidden,
        ffn=2 * hidden,
        # The rotary scaling longrope is dropped: it has a factor for each pair of channels, and
        # affects no cost.
        rotary_scaling=None,
        # If the vocabulary is padded for the ranks, one more token makes the small vocabulary
        # padded too.
        vocab=vocab + (model.vocab % degrees > 0),
    )


def _small_experts(experts: Experts | None, plan: Plan) -> Experts | None:
    """The fewest and narrowest experts that all degrees allow; blocks with experts and blocks
    without are both kept.
    """
    if experts is None:
        return None
    ranks, parts, splits = (
        lcm(*(ranks_of(group, stage.degree) for stage in plan.stages))
        for group in ("experts", "expert tensor", "tensor")
    )
    count = max(2 * ranks, 2) if experts.count > ranks else ranks
    return replace(
        experts,
        router=replace(experts.router, groups=1, active_groups=1),
        count=count,
        active=min(experts.active, count),
        ffn=8 * parts,
        shared_ffn=8 * splits if experts.shared_ffn else 0,
        hidden=8 if experts.hidden else 0,
        dense_blocks=min(experts.dense_blocks, 1),
    )


def _at_most(count: int, most: int, step: int) -> int:
    """``count`` reduced to at most ``most``, in steps of ``step``.

    >>> _at_most(9, 6, 2), _at_most(5, 6, 2)
    (5, 5)
    """
    return count if count <= most else most - (most - count) % step


# Groups the ranks of a plan by the work that they do, and picks a rank of each group.


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A rank that stands for all ranks with the same kind of work: its position, and their
    number.
    """

    rank: int
    stage: int
    data: int
    context: int
    tensor: int
    stands_for: int

    def __str__(self) -> str:
        context = f", context {self.context}" if self.context else ""
        position = f"stage {self.stage}, data {self.data}{context}, tensor {self.tensor}"
        return f"rank {self.rank} ({position})"


def unlike_ranks(plan: Plan, how: Reduction = PLAIN) -> list[Unlike]:
    """One rank for each kind of work in a plan.

    Two ranks have the same kind if they agree in six things: the stage; whether they are first in
    their tensor, context and data groups; the sequences that they exchange with neighbouring
    stages; and whether they serve in a reduction or send false gradients. Only ranks of the first
    replica are considered, since the other replicas have the same kinds.
    """
    count = how.replicas_of(plan.data_ranks[0])
    replicas = ReplicaRanks(whole=plan, plan=plan.of_replica(count), count=count)
    topology = Topology(plan=replicas.plan)
    first: dict[object, int] = {}
    counts = Counter[object]()
    for stage in range(plan.num_stages):
        neighbours = topology.neighbours(stage)
        for rank in topology.ranks(stage):
            position = topology.place(rank)
            exchanged = tuple(
                tuple((t.begin, t.end) for t in topology.transfers(rank, to_stage=n, receives=way))
                for n in neighbours
                for way in (False, True)
            )
            first_in = position.data == 0, position.context == 0, position.tensor == 0
            among = position.data * replicas.plan.stages[stage].token_split.ranks + position.context
            reduces = how.kind == "server" and among < how.shards, among in how.liars
            kind = (stage, *first_in, exchanged, reduces)
            first.setdefault(kind, rank)
            counts[kind] += replicas.count
    return [
        _unlike(topology, rank, replicas.rank(0, rank), counts[kind])
        for kind, rank in first.items()
    ]


def _unlike(topology: Topology, inner: int, rank: int, count: int) -> Unlike:
    position = topology.place(inner)
    return Unlike(
        rank=rank,
        stage=position.stage,
        data=position.data,
        context=position.context,
        tensor=position.tensor,
        stands_for=count,
    )


# Finds data races, unnoticed waits of the host, and deadlocked collectives in a plan's run on GPUs,
# without a GPU.


# Rough times on one core: the seconds to build a rank, and the seconds for a layer's pass.
SECONDS_A_RANK, SECONDS_A_PASS = 0.3, 0.012


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanitizer:
    """The checks of a job: its small plan, and the ranks of the small plan that are run."""

    job: Job
    small: SmallPlan
    ranks: tuple[Unlike, ...]
    training: Training
    serialises: bool = False

    @classmethod
    def of(cls, job: Job, training: Training, *, serialises: bool = False) -> "Sanitizer":
        """The checks of a job; raises an error if the runtime cannot run the job."""
        check_runnable(job)
        check_norms(job.plan, job.workload, training.norm_option)
        made = small(job.workload, job.plan)
        ranks = tuple(unlike_ranks(made.plan, made.workload.reduction))
        return cls(job=job, small=made, ranks=ranks, training=training, serialises=serialises)

    @property
    def expected_s(self) -> float:
        """A rough estimate of the seconds that the checks of all ranks take."""
        plan = self.small.plan
        layers = sum(plan.stages[one.stage].layers + 1 for one in self.ranks)
        passes = layers * 2 * plan.micro_batches * ITERATIONS
        return len(self.ranks) * SECONDS_A_RANK + passes * SECONDS_A_PASS

    def collectives(self) -> tuple[CollectiveFinding, ...]:
        """Collectives of the whole plan that do not match over all ranks, or that deadlock."""
        return collective_findings(
            self.job.plan,
            self.job.workload,
            clips=self.training.needs_norm,
            steps_on_host=self.training.steps_on_host,
        )

    def waits(self, rank: int) -> tuple[WaitFinding, ...]:
        """Points of an iteration at which a rank's host would wait for its GPU, or would fail."""
        return device_findings(
            self.small.workload,
            self.small.plan,
            rank,
            self.training,
            serialises=self.serialises,
        )

    def races(self, rank: int) -> tuple[RaceFinding, ...]:
        """Data races of a rank: memory accesses of its streams that nothing orders, each pair
        once.
        """
        trace = trace_of(
            self.small.workload,
            self.small.plan,
            rank,
            self.training,
            serialises=self.serialises,
        )
        first: dict[object, RaceFinding] = {}
        for finding in Judge(trace).findings():
            deeds = (finding.first, finding.second)
            first.setdefault((finding.kind, *((d.task, d.actor) for d in deeds)), finding)
        return tuple(first.values())
