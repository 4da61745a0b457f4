"""Random plans in which pipelines often stall (queued sends, slow links, slow hosts, offloading),
on which predictors are compared.

Problems have slow networks between nodes, few micro-batches, hosts that are slower than their GPUs,
different kinds of GPUs, different kinds of blocks, or many stages. Plans of Mist's search space are
drawn choice by choice, and each stage gets its own parallel degrees and offload ratios. Plans of
today's engines have equal stages, and any pipeline schedule that the engine runs. V schedules, in
which a stage has chunks of both ends of the model, are drawn more often. Plans that are invalid or
do not fit are drawn again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.bench.random_plans import RandomPlan
from experiments.bench.wide_plans import equal_plan
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES, Precision
from mistlab.job.job import Job
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster, NodeGroup
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS
from mistlab.schedule.placement import spread_shares
from searchers.meshes import divisors
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor

# The engines of plans whose stages are all equal; an engine that is listed twice is drawn twice as
# often.
ENGINES_DRAWN = (
    *("megatron-core", "megatron-core", "mistlab", "mistlab", "megatron", "nanotron"),
    *("megatron-bridge", "megatron-fsdp", "fsdp", "deepspeed", "zero-bubble", "aceso"),
)
V_ORDERS = ("zb-v", "v-half", "v-min", "dualpipe-v")
# The most blocks times micro-batches that a plan may have: with more, the event simulator would
# take over half a second.
MOST_BLOCKS = 640
MOST_STAGES = 48
MOST_TRIES = 400
PROBLEMS_OF_A_REGIME = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One set of conditions under which pipelines stall, such as slow links: the models, hardware,
    schedules and batches from which its problems are drawn.

    The first of ``hardware`` is that of the first nodes, the others are of further nodes.
    ``by_choices`` is the share of plans that are drawn choice by choice from Mist's space. The
    other plans take their pipeline schedule from ``orders`` if their engine runs it (by default,
    one plan in three does), and a ZeRO level from ``levels``.
    """

    name: str
    models: Sequence[str]
    hardware: Sequence[Sequence[str]] = (("h100-80gb",), ("a100-40gb",), ("l4-24gb",))
    nodes: Sequence[int] = (1, 2, 4)
    gpus: Sequence[int] = (2, 4, 8)
    between_gbytes: Sequence[float | None] = (None,)
    within_gbytes: Sequence[float | None] = (None,)
    sequences: Sequence[int] = (512, 1024, 2048)
    batches: Sequence[int] = (8, 16, 32, 64)
    stages: Sequence[int] = (1, 2, 4, 8)
    by_choices: float = 0.4
    engines: Sequence[str] = ENGINES_DRAWN
    orders: Sequence[str] = tuple(ORDERS)
    levels: Sequence[int] = (0, 1, 2, 3)


SMALL = ("gpt3-1.3b", "llama3.2-1b", "gpt3-2.7b", "llama-1.3b")
REGIMES = (
    Regime(
        name="slow links",
        models=SMALL,
        nodes=(2, 4),
        between_gbytes=(0.5, 1.0, 2.0),
        within_gbytes=(None, 32.0),
        stages=(2, 4, 8),
        by_choices=0.25,
        orders=(DEFAULT_ORDER,),
    ),
    Regime(
        name="ZeRO on slow links",
        models=SMALL,
        nodes=(1, 2, 4),
        between_gbytes=(0.5, 1.0, 2.0),
        within_gbytes=(None, 16.0),
        by_choices=0.3,
        orders=(DEFAULT_ORDER,),
        levels=(1, 2, 3),
    ),
    Regime(
        name="hosts",
        models=("gpt3-350m", "gpt3-1.3b", "llama3.2-1b", "llama3.2-3b"),
        hardware=(("h100-80gb",), ("b200-180gb",), ("h200-141gb",)),
        within_gbytes=(None, 32.0),
        sequences=(256, 512, 1024, 2048),
        by_choices=0.0,
        engines=("megatron-core", "megatron-bridge", "nanotron", "fsdp-eager", "megatron-fsdp"),
    ),
    Regime(
        name="V orders across nodes",
        models=("gpt3-2.7b", "llama3-8b", "gpt3-13b"),
        hardware=(("a100-40gb",), ("h100-80gb",), ("a100-80gb",)),
        nodes=(2, 4, 8),
        gpus=(1, 4, 8),
        batches=(16, 32, 64),
        sequences=(1024, 2048),
        stages=(2, 4, 8),
        by_choices=0.0,
        engines=("mistlab", "mistlab", "zero-bubble"),
        orders=V_ORDERS,
    ),
    Regime(
        name="offloaded weights and gradients",
        models=("gpt3-2.7b", "gpt3-7b", "llama-7b", "falcon-2.7b"),
        hardware=(("v100-32gb",), ("a100-40gb",), ("l4-24gb",), ("h100-80gb",)),
        batches=(8, 16, 32),
        by_choices=1.0,
    ),
    Regime(
        name="heterogeneous GPUs",
        models=("gpt3-1.3b", "gpt3-2.7b", "llama-7b"),
        hardware=(("a100-40gb", "l4-24gb"), ("h100-80gb", "a100-80gb"), ("v100-32gb", "l4-24gb")),
        nodes=(1, 2),
        gpus=(4, 8),
        batches=(16, 32, 64),
        stages=(2, 4, 8),
        by_choices=0.6,
    ),
    Regime(
        name="hybrids",
        models=("nemotron-h-8b", "nemotron-3-nano", "qwen3-next-80b-a3b"),
        hardware=(("h100-80gb",), ("b200-180gb",)),
        nodes=(2, 4),
        gpus=(8,),
        batches=(16, 32),
        by_choices=0.3,
    ),
    Regime(
        name="tens of stages",
        models=("gpt3-22b", "llama3-70b", "gpt3-13b"),
        hardware=(("a100-80gb",), ("h100-80gb",), ("a100-40gb",)),
        nodes=(4, 8),
        gpus=(4, 8),
        stages=(16, 32),
        batches=(16, 32, 64),
        sequences=(1024, 2048),
        by_choices=0.2,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrainedPlan(RandomPlan):
    """A random plan under one of the conditions in which pipelines stall."""

    regime: str

    @property
    def strata(self) -> frozenset[str]:
        """The properties of the plan by which reports group plans, such as the conditions under
        which its pipeline stalls.
        """
        plan = self.job.plan
        has = {
            "in a V": plan.order in V_ORDERS,
            "another order": plan.order not in (DEFAULT_ORDER, *V_ORDERS),
            "up to four micro-batches": plan.micro_batches <= 4,
        }
        names = [name for name, true in has.items() if true]
        usual = super(StrainedPlan, self).strata
        return usual | {*names, self.regime, f"engine {plan.engine}"}


def strained_strata() -> Mapping[str, float]:
    """The properties by which reports group plans, each with the least share of plans that must
    have it.
    """
    names = ("several stages", "offloading", "ZeRO-2 or 3", "up to four micro-batches")
    engines = dict.fromkeys(f"engine {name}" for name in dict.fromkeys(ENGINES_DRAWN))
    return {
        **dict.fromkeys((one.name for one in REGIMES), 0.08),
        **dict.fromkeys(names, 0.1),
        **dict.fromkeys(("in a V", "another order"), 0.05),
        **dict.fromkeys(engines, 0.0),
    }


def strained_plans(
    count: int, seed: int, regimes: Sequence[Regime] = REGIMES
) -> Iterator[StrainedPlan]:
    """Draws ``count`` plans, about equally many for each set of conditions (``Regime``); the same
    seed gives the same plans.
    """
    problems = [(regime, number) for number in range(PROBLEMS_OF_A_REGIME) for regime in regimes]
    shares = spread_shares(count, len(problems))
    for index, ((regime, number), wanted) in enumerate(zip(problems, shares, strict=True)):
        if not wanted:
            continue
        draw = np.random.default_rng((seed, index))
        drawing = _OfRegime(regime, number, draw)
        for _ in range(wanted):
            plan = drawing.fitting()
            if plan is not None:
                yield plan


class _OfRegime:
    """Draws plans for one problem of a ``Regime``; bandwidths and batches differ from plan to
    plan.
    """

    def __init__(self, regime: Regime, number: int, draw: np.random.Generator) -> None:
        self.regime, self.draw = regime, draw
        self.model = catalog.model(regime.models[number % len(regime.models)])
        names = regime.hardware[number % len(regime.hardware)]
        self.hardware = [catalog.hardware(name) for name in names]
        self.sequence = int(draw.choice(regime.sequences))
        kinds = {one.gpu.peak_tflops.bf16 is None for one in self.hardware}
        self.precision: Precision = "fp16" if any(kinds) else "bf16"
        self.chooser = Chooser(lambda _, options: int(draw.integers(options)))

    def fitting(self) -> StrainedPlan | None:
        """A valid plan that fits in memory; None if a few draws find none."""
        for missed in range(MOST_TRIES):
            problem = self._problem()
            try:
                plan = self._plan(problem)
                if plan is None:
                    continue
                job = Job(workload=problem.workload, cluster=problem.cluster, plan=plan)
                predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
                if predictor.fits(plan):
                    prediction = predictor.predict(plan)
                    return StrainedPlan(
                        job=job, prediction=prediction, missed=missed, regime=self.regime.name
                    )
            except InputError:
                continue
        return None

    def _problem(self) -> Problem:
        regime, first = self.regime, self.hardware[0]
        further = [NodeGroup(hardware=one, nodes=1) for one in self.hardware[1:]]
        nodes = int(self.draw.choice(regime.nodes))
        gpus = min(one.node.gpus for one in self.hardware)
        cluster = Cluster(
            hardware=first,
            nodes=nodes + len(further),
            gpus_per_node=min(gpus, int(self.draw.choice(regime.gpus))),
            inter_node_gbytes_per_s=self._any(regime.between_gbytes),
            intra_node_gbytes_per_s=self._any(regime.within_gbytes),
            others=tuple(further),
        )
        workload = Workload(
            model=self.model,
            sequence_length=self.sequence,
            global_batch=int(self.draw.choice(regime.batches)),
            attention="flash",
            precision=self.precision,
        )
        return Problem(workload=workload, cluster=cluster)

    def _any(self, choices: Sequence[float | None]) -> float | None:
        return choices[int(self.draw.integers(len(choices)))]

    def _plan(self, problem: Problem) -> Plan | None:
        if self.draw.random() < self.regime.by_choices:
            return self._by_choices(problem)
        return self._equal(problem)

    def _by_choices(self, problem: Problem) -> Plan | None:
        """A plan of Mist's search space in which each stage makes its own choices; few
        micro-batches are as likely as many.
        """
        workload = problem.workload
        most = max(1, MOST_BLOCKS // workload.model.layers)
        counts = [count for count in divisors(workload.global_batch) if count <= most]
        space = replace(space_of("mist"), micro_batches=(int(self.draw.choice(counts)),))
        return chosen_plan(problem, space, self.chooser)

    def _equal(self, problem: Problem) -> Plan | None:
        """A plan whose stages all have the same parallel degrees; None if the drawn numbers do not
        divide evenly.
        """
        regime, draw = self.regime, self.draw
        engine = str(draw.choice([*regime.engines]))
        stages = int(draw.choice(regime.stages))
        plan = equal_plan(problem, engine, stages, regime.levels, draw)
        if plan is None or plan.micro_batches * problem.workload.model.layers > MOST_BLOCKS:
            return None
        return replace(plan, order=self._order(engine, stages))

    def _order(self, engine: str, stages: int) -> str:
        """A pipeline schedule of the ``Regime`` that the engine can run. Two of three plans get the
        default one, unless the regime lists schedules.
        """
        row, wanted = ENGINES[engine], self.regime.orders
        runs = [one for one in wanted if row.takes_orders or one in (DEFAULT_ORDER, *row.orders)]
        is_usual = len(wanted) == len(ORDERS) and self.draw.random() < 2 / 3
        if stages == 1 or is_usual or not runs:
            return DEFAULT_ORDER
        return str(self.draw.choice(runs))
