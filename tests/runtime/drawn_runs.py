"""Random plans with all that the runtime trains, their trainings, and what the checks find."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import lcm

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.model_parts import Experts
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.reduction.reduction_text import reduction_named
from mistlab.schedule.orders import chunks_of
from runtime.checks.collectives.findings import collective_findings
from runtime.checks.fake.fake_device import device_findings
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import trace_of
from runtime.checks.sanitizer import unlike_ranks
from runtime.engine.training import Training
from runtime.runnable import check_norms, check_runnable
from tests.runtime.worlds import ON_HOST, OVERFLOWING, TRAINING, random_plan, ratios

TRAININGS = (
    TRAINING,
    replace(TRAINING, clip_norm=1.0),
    replace(OVERFLOWING, clip_norm=0.3),
    ON_HOST,
    replace(ON_HOST, clip_norm=1.0, loss_scale=1024.0),
)
# More blocks of a stage take the same turns in rings of two.
MOST_BLOCKS = 3
# How often degrees of experts are drawn before a plan goes without.
TRIES = 30
# Drawn for runs whose data-parallel ranks communicate less.
REDUCTIONS = (
    "gossip",
    "gossip:topology=ring",
    "gossip:topology=exponential",
    "local:every=4",
    "outer:every=4,fragments=2,delay=1",
    "outer:every=6,fragments=3,outer_bits=4",
    "outer:every=3,replicas=2",
    "server",
    "server:compressor=qsgd",
    "server:shards=2,compressor=top_k,share=0.1,feedback=double",
    "server:trimmed=1,liars=1",
    "server:asynchronous=true",
    "server:asynchronous=true,compressor=top_k,share=0.1",
    "all_reduce:compressor=top_k,share=0.1,feedback=memory",
    "all_reduce:compressor=power,rank=2,feedback=ef21",
    "all_reduce:compressor=sign,feedback=neolithic",
    "all_reduce:trimmed=1",
)
MOST_RANKS = 8
CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=MOST_RANKS)
# Drawn where a plan has several stages.
ORDERS = ("1f1b", "1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-2", "zb-v")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRun:
    """A workload, a plan of it, and how it is trained."""

    work: Workload
    plan: Plan
    training: Training
    serialises: bool

    @property
    def splits_tokens(self) -> bool:
        """Whether ranks have parts of sequences."""
        return any(one.sequence_parallel for one in self.plan.stages)

    @property
    def has_experts(self) -> bool:
        """Whether its blocks have experts."""
        return self.work.model.experts is not None

    @property
    def splits_sequences(self) -> bool:
        """Whether context-parallel ranks have parts of sequences."""
        return any(one.token_split.ranks > 1 for one in self.plan.stages)

    @property
    def ranks(self) -> list[int]:
        """A rank of each kind."""
        return [one.rank for one in unlike_ranks(self.plan, self.work.reduction)]

    def races(self, rank: int) -> list[str]:
        """Uses of memory that nothing orders."""
        traced = trace_of(self.work, self.plan, rank, self.training, serialises=self.serialises)
        return [str(one) for one in Judge(traced).findings()]

    def waits(self, rank: int) -> list[str]:
        """Places where the host would wait."""
        found = device_findings(
            self.work, self.plan, rank, self.training, serialises=self.serialises
        )
        return [str(one) for one in found]

    def collectives(self) -> Counter[str]:
        """Findings about collectives, by what is wrong."""
        training = self.training
        found = collective_findings(
            self.plan,
            self.work,
            clips=training.needs_norm,
            steps_on_host=training.steps_on_host,
        )
        return Counter(one.trouble for one in found)


def drawn_run(seed: int, *, most_ranks: int = 8) -> DrawnRun:
    """A run drawn by a seed; in two of five, ranks have parts of sequences."""
    draw = np.random.default_rng((seed, 35))
    work, plan = random_plan(seed, most_ranks=most_ranks)
    if draw.random() < 0.4:
        plan = _with_parts(plan, draw, most_ranks)
        # Heads of keys may be cut over tensor- and context-parallel ranks.
        work = replace(work, model=replace(work.model, kv_heads=work.model.heads))
    order = str(draw.choice(ORDERS)) if plan.num_stages > 1 else plan.order
    work, plan = _with_parts_of_today(*_ordered(work, plan, order), seed)
    return DrawnRun(
        work=work,
        plan=plan,
        training=TRAININGS[int(draw.integers(len(TRAININGS)))],
        serialises=bool(draw.random() < 0.1),
    )


def reducing_run(seed: int) -> DrawnRun:
    """A run drawn by a seed whose data-parallel ranks communicate less, each kind in turn."""
    draw = np.random.default_rng((seed, 37))
    how = reduction_named(REDUCTIONS[seed % len(REDUCTIONS)])
    while True:
        run = drawn_run(int(draw.integers(2**20)), most_ranks=MOST_RANKS)
        data, each = int(draw.choice([2, 3, 4])), int(draw.choice([1, 2]))
        stages = tuple(
            replace(
                one,
                data_parallel=data,
                micro_batch=each,
                zero=min(one.zero, how.most_sharded),
                offload=ratios(0.0, 0.0, 0.0, one.offload.activations),
            )
            for one in run.plan.stages
        )
        plan = replace(run.plan, stages=stages)
        if plan.num_gpus > MOST_RANKS:
            continue
        batch = data * each * plan.micro_batches
        try:
            work = replace(run.work, reduction=how, global_batch=batch)
            check_runnable(Job(workload=work, cluster=CLUSTER, plan=plan))
            check_norms(plan, work, run.training.norm_option)
        except InputError:
            continue
        return replace(run, work=work, plan=plan)


def _with_parts_of_today(work: Workload, plan: Plan, seed: int) -> tuple[Workload, Plan]:
    """The plan of a model that drops tokens, in one of four, and has experts, in one of two, of
    degrees that their ranks allow."""
    draw = np.random.default_rng((seed, 86))
    drops = {"dropout": 0.1, "attention_dropout": 0.0} if draw.random() < 0.25 else {}
    work = replace(work, model=replace(work.model, **drops))
    if draw.random() < 0.5:
        return work, plan
    experts = Experts(
        count=4,
        active=int(draw.integers(1, 4)),
        ffn=24,
        shared_ffn=int(draw.choice([0, 16])),
        dense_blocks=int(draw.integers(0, 3)),
    )
    given = asdict(work.model)
    kept = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings")
    model = ModelSpec.of(family="llama", **{name: given[name] for name in kept}, **drops)
    mixed = replace(work, model=replace(model, experts=experts))
    for _ in range(TRIES):
        degrees = [[int(draw.choice([1, 1, 2, 4])) for _ in range(2)] for _ in plan.stages]
        stages = tuple(
            replace(one, expert_parallel=parallel, expert_tensor_parallel=tensor)
            for one, (parallel, tensor) in zip(plan.stages, degrees, strict=True)
        )
        own = replace(plan, stages=stages)
        try:
            check_runnable(Job(workload=mixed, cluster=CLUSTER, plan=own))
        except InputError:
            continue
        return mixed, own
    return work, plan


def _with_parts(plan: Plan, draw: np.random.Generator, most_ranks: int) -> Plan:
    """The plan with sequences in two parts; with fewer data-parallel ranks where there were too
    many."""
    stages = []
    for one in plan.stages:
        data = one.data_parallel if most_ranks >= 4 * plan.num_stages else 1
        stages.append(
            replace(
                one,
                data_parallel=data,
                micro_batch=one.micro_batch * one.data_parallel // data,
                tensor_parallel=2,
                sequence_parallel=1,
            )
        )
    return replace(plan, stages=tuple(stages))


def _ordered(work: Workload, plan: Plan, order: str) -> tuple[Workload, Plan]:
    """The plan in an order, with as many blocks and micro-batches as it asks for."""
    chunks, stages = chunks_of(order), plan.num_stages
    layers = [min(max(one.layers, chunks + 1), MOST_BLOCKS) for one in plan.stages]
    batches = plan.micro_batches
    if order not in ("1f1b", "gpipe"):
        batches = lcm(stages, 2) * -(-max(batches, 2 * stages) // lcm(stages, 2))
    model = replace(work.model, layers=sum(layers))
    batch = work.global_batch // plan.micro_batches * batches
    return (
        replace(work, model=model, global_batch=batch),
        replace(
            plan,
            order=order,
            micro_batches=batches,
            stages=tuple(
                replace(
                    one,
                    layers=count,
                    checkpointed_layers=min(one.checkpointed_layers, count),
                )
                for one, count in zip(plan.stages, layers, strict=True)
            ),
        ),
    )


def findings(run: DrawnRun) -> Iterator[str]:
    """All that the three checks find, on a rank of each kind."""
    yield from (f"{what}: {count}" for what, count in run.collectives().items())
    for rank in run.ranks:
        yield from (f"rank {rank}: {one}" for one in (*run.races(rank), *run.waits(rank)))
