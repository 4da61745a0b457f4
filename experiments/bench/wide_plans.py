"""Random plans over all dimensions of plans and many models, on which predictors are compared.

A problem is a recent model on nodes of A100, H100, H200 or B200. Its plans are of all engines in
turn, each with one of the pipeline schedules that the engine runs. They have context, sequence and
expert parallelism, several chunks a stage, blocks recomputed fully or in part, ZeRO, and offloading
where the engine supports it. Plans that are invalid or do not fit are drawn again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.bench.random_plans import RandomPlan
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES, names_for_plans
from mistlab.job.job import Job
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, ORDERS, SPLIT
from mistlab.schedule.placement import even_shares, spread_shares
from simulators.symbolic import SymbolicPredictor

# The models, each with the numbers of eight-GPU nodes for which plans are drawn.
MODELS = {
    "gpt3-7b": (1, 2),
    "llama3-8b": (1, 2, 4),
    "qwen3-14b": (2, 4),
    "llama3-70b": (8, 16),
    "mixtral-8x7b": (4, 8),
    "qwen3-30b-a3b": (2, 4),
    "gpt-oss-120b": (8, 16),
    "deepseek-v2": (16, 32),
}
HARDWARE = ("a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb")
GPUS_OF_A_NODE = 8
# The most blocks times micro-batches that a plan may have: with more, the event simulator would
# take over a second.
MOST_BLOCKS = 1000
MOST_TRIES = 400
FEWEST_OF_A_PROBLEM = 20
EIGHTHS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WidePlan(RandomPlan):
    """A random plan in which every dimension that a plan may have is drawn."""

    @property
    def strata(self) -> frozenset[str]:
        """The properties of the plan by which reports group plans, such as "context parallel"."""
        plan, stage = self.job.plan, self.job.plan.stages[0]
        experts = self.job.workload.model.experts is not None
        has = {
            "several stages": plan.num_stages > 1,
            "one stage": plan.num_stages == 1,
            "uneven layers": len({one.layers for one in plan.stages}) > 1,
            "1f1b": plan.order == DEFAULT_ORDER and plan.num_stages > 1,
            "interleaved": plan.order in INTERLEAVED,
            "zero bubble": plan.order in SPLIT,
            "gpipe": plan.order == "gpipe",
            "context parallel": stage.context_parallel > 1,
            "sequence parallel": stage.sequence_parallel > 0,
            "experts": experts,
            "expert parallel": stage.expert_parallel > 1,
            "blocks recomputed whole": stage.checkpointed_layers > 0,
            "attention's core recomputed": stage.core_recomputed_layers > 0,
            "ZeRO-2 or 3": stage.zero >= 2,
            "offloading": stage.offload != NO_OFFLOAD,
            "no offloading": stage.offload == NO_OFFLOAD,
            "fp8": self.job.workload.precision == "fp8",
        }
        names = [name for name, true in has.items() if true]
        return frozenset((*names, f"engine {plan.engine}", self.job.cluster.hardware.name))


def wide_strata() -> dict[str, float]:
    """The properties by which reports group plans; none of them needs a least share of the
    plans.
    """
    named = (
        *("several stages", "one stage", "uneven layers"),
        *("1f1b", "interleaved", "zero bubble", "gpipe"),
        *("context parallel", "sequence parallel", "experts", "expert parallel"),
        *("blocks recomputed whole", "attention's core recomputed"),
        *("ZeRO-2 or 3", "offloading", "no offloading", "fp8"),
        *(f"engine {name}" for name in names_for_plans()),
        *HARDWARE,
    )
    return dict.fromkeys(named, 0.0)


def wide_plans(count: int, seed: int) -> Iterator[WidePlan]:
    """Draws ``count`` plans, about equally many for each model and hardware; the same seed gives
    the same plans.

    If only a few plans are asked for, they are of fewer problems, since each problem's expressions
    take a second or two to compile.
    """
    problems = [*_problems(np.random.default_rng(seed))]
    problems = problems[:: -(-len(problems) * FEWEST_OF_A_PROBLEM // max(count, 1)) or 1]
    engines = names_for_plans()
    shares = spread_shares(count, len(problems))
    for number, (problem, wanted) in enumerate(zip(problems, shares, strict=True)):
        draw = np.random.default_rng((seed, number))
        predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
        without_plans: set[str] = set()
        for nth in range(wanted):
            # Each plan tries the engines in turn, starting with another engine than the plan
            # before; an engine for which no plan fits is skipped from then on.
            begin = (number + nth) % len(engines)
            for engine in (*engines[begin:], *engines[:begin]):
                if engine in without_plans:
                    continue
                plan = _fitting(problem, predictor, engine, draw)
                if plan is not None:
                    yield plan
                    break
                without_plans.add(engine)


def _problems(draw: np.random.Generator) -> Iterator[Problem]:
    for name, nodes in MODELS.items():
        for hardware in HARDWARE:
            cluster = Cluster(
                hardware=catalog.hardware(hardware),
                nodes=int(draw.choice(nodes)),
                gpus_per_node=GPUS_OF_A_NODE,
            )
            has_8_bits = cluster.hardware.gpu.peak_tflops.fp8 is not None
            workload = Workload(
                model=catalog.model(name),
                sequence_length=int(draw.choice([2048, 4096, 8192])),
                global_batch=cluster.num_gpus * int(draw.choice([1, 2, 4])),
                attention="flash",
                precision="fp8" if has_8_bits and draw.random() < 1 / 3 else "bf16",
            )
            yield Problem(workload=workload, cluster=cluster)


def _fitting(
    problem: Problem, predictor: SymbolicPredictor, engine: str, draw: np.random.Generator
) -> WidePlan | None:
    """A valid plan of an engine that fits in memory; None if a few draws find none."""
    if ENGINES[engine].precision_problem(problem.workload.precision):
        return None
    for missed in range(MOST_TRIES):
        plan = _drawn(problem, engine, draw)
        if plan is None:
            continue
        try:
            job = Job(workload=problem.workload, cluster=problem.cluster, plan=plan)
        except InputError:
            continue
        if predictor.fits(plan):
            prediction = predictor.predict(plan)
            return WidePlan(job=job, prediction=prediction, missed=missed)
    return None


def _drawn(problem: Problem, engine: str, draw: np.random.Generator) -> Plan | None:
    """A plan whose stages all have the same parallel degrees; None if the drawn numbers do not
    divide evenly.
    """
    row, workload = ENGINES[engine], problem.workload
    layers, gpus = workload.model.layers, problem.cluster.num_gpus
    most = max(1, MOST_BLOCKS // layers)

    def one_of(*choices: int) -> int:
        return int(draw.choice(choices))

    stages, tensor = one_of(1, 2, 4, 8), one_of(1, 2, 4, 8)
    context = one_of(1, 1, 2, 4)
    data, rest = divmod(gpus, stages * tensor * context)
    micro_batch = one_of(1, 1, 2, 4)
    if rest or not data or workload.global_batch % (data * micro_batch):
        return None
    micro_batches = workload.global_batch // (data * micro_batch)
    if micro_batches > most or stages * 2 > layers:
        return None
    several = ORDERS if row.takes_orders else (DEFAULT_ORDER, *row.orders)
    order = str(draw.choice([*several])) if stages > 1 else DEFAULT_ORDER
    ways = draw.random(3)
    stage = StagePlan(
        layers=1,
        data_parallel=data,
        tensor_parallel=tensor,
        context_parallel=context,
        micro_batch=micro_batch,
        sequence_parallel=one_of(0, 1) if tensor > 1 else 0,
        expert_parallel=one_of(1, 2, 4, 8) if workload.model.experts else 1,
        zero=one_of(*range(row.highest_zero_of(in_pipeline=stages > 1) + 1)),
        offload=_offload(draw) if row.offloads and ways[2] < 1 / 3 else NO_OFFLOAD,
    )
    blocks = [*even_shares(layers, stages)]
    if stages > 1 and draw.random() < 1 / 4:
        blocks[0] += 1
        blocks[-1] -= 1
    return Plan(
        engine=engine,
        micro_batches=micro_batches,
        order=order,
        stages=tuple(
            replace(
                stage,
                layers=count,
                checkpointed_layers=round(count * max(0.0, ways[0] * 1.5 - 0.5)),
                core_recomputed_layers=0,
            )
            if ways[1] < 2 / 3
            else replace(stage, layers=count, core_recomputed_layers=round(count * ways[0]))
            for count in blocks
        ),
    )


def _offload(draw: np.random.Generator) -> Offload:
    ratios = draw.integers(0, EIGHTHS // 2 + 1, 4) / EIGHTHS
    weights, gradients, optimizer, activations = map(float, ratios)
    return Offload(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
    )


def equal_plan(
    problem: Problem,
    engine: str,
    stages: int,
    levels: Sequence[int],
    draw: np.random.Generator,
) -> Plan | None:
    """A plan of an engine with equal parallel degrees on this many stages; None if the drawn
    numbers do not divide evenly. A quarter of the pipelines have one more block on the first stage,
    and one less on the last.
    """
    workload, cluster = problem.workload, problem.cluster
    layers = workload.model.layers
    tensor, micro_batch = int(draw.choice([1, 1, 2, 4])), int(draw.choice([1, 2, 4]))
    data, rest = divmod(cluster.num_gpus, stages * tensor)
    if rest or not data or stages > layers or workload.global_batch % (data * micro_batch):
        return None
    highest = ENGINES[engine].highest_zero_of(in_pipeline=stages > 1)
    stage = StagePlan(
        layers=1,
        data_parallel=data,
        tensor_parallel=tensor,
        micro_batch=micro_batch,
        sequence_parallel=int(draw.integers(2)) if tensor > 1 else 0,
        expert_parallel=int(draw.choice([1, 2, 4, 8])) if workload.model.experts else 1,
        zero=min(int(draw.choice(levels)), highest),
    )
    blocks = [*even_shares(layers, stages)]
    if stages > 1 and blocks[-1] > 1 and draw.random() < 1 / 4:
        blocks[0], blocks[-1] = blocks[0] + 1, blocks[-1] - 1
    share = max(0.0, draw.random() * 1.5 - 0.5)
    return Plan(
        engine=engine,
        micro_batches=workload.global_batch // (data * micro_batch),
        stages=tuple(
            replace(stage, layers=count, checkpointed_layers=round(count * share))
            for count in blocks
        ),
    )
