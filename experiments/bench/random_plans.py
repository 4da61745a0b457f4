"""Plans on which predictors are compared: most are drawn at random, some are proposed by searchers.

Plans are drawn problem by problem (a model on a cluster), so that plans of one problem can be
ranked. The problems are the default problem of the commands and, for each calibrated hardware of
the catalogue, a cluster of one node, of a few nodes and of many. Within a problem, plans are spread
evenly over the engines' search spaces and, as far as such plans fit, over pipelines with one
micro-batch, with fewer micro-batches than stages, with as many, and with more. Half of the plans
should be close to the memory limit, if a few draws find such plans; they recompute the fewest
blocks with which they still fit.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np

from experiments.bench.bench import answer_of
from experiments.bench.problem import problem_of
from experiments.cli.commandline import PROBLEM
from mistlab import catalog
from mistlab.cost.kernels import rough_state_bytes
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Offload, Plan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from mistlab.schedule.placement import spread_shares
from searchers.meshes import Pipeline, divisors, equal_pipelines, only
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

Choice = TypeVar("Choice")

# Numbers of nodes in three groups (small, medium, large); each kind of hardware gets a problem with
# one number of each group.
NODES = ((1,), (2, 4), (8, 16, 32, 64))
# The search spaces from which plans are drawn, each with whether communication may overlap with
# computation.
SPACES = (
    *(("mist", True), ("mist", True), ("+checkpointing", True), ("wide", True), ("aceso", True)),
    *((name, overlap) for name in ("megatron", "deepspeed") for overlap in (True, False)),
)
# The searchers that propose plans; each searches the space that has its name.
PROPOSING = ("mist", "aceso", "megatron", "deepspeed")
# The share of the plans that searchers propose.
PROPOSED = 0.1
PROPOSING_BUDGET = Budget(evaluations=100)
# The least and the greatest share of the GPUs' memory that a model's weights, gradients and
# optimizer states may take.
LEAST_HELD, MOST_HELD = 0.05, 0.5
# The most blocks times micro-batches that a plan may have: with more, the event simulator would
# take over a second.
MOST_BLOCKS = 3000
MOST_TRIES = 2000
# The number of draws after which a plan that fits is accepted even if it is not close to the memory
# limit.
TRIES_TO_BE_CLOSE = 50
# A plan is close to the memory limit if its fullest GPU uses at least this share of its memory.
CLOSE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlan:
    """A random plan that fits, with its prediction, the searcher that proposed it (if any), and the
    number of failed draws before it.
    """

    job: Job
    prediction: Prediction
    proposed_by: str | None = None
    is_default: bool = False
    missed: int = 0

    @property
    def is_close(self) -> bool:
        """Whether the plan's fullest GPU uses at least the share ``CLOSE`` of its memory."""
        allocator = self.job.cluster.hardware.allocator
        assert allocator is not None
        room = self.job.cluster.memory_bytes - allocator.outside_bytes
        return self.prediction.peak_reserved_bytes >= CLOSE * room

    @property
    def strata(self) -> frozenset[str]:
        """The properties of the plan by which reports group plans, such as "several stages"."""
        plan, cluster = self.job.plan, self.job.cluster
        nodes = "1 node" if cluster.nodes == 1 else "2 to 4 nodes"
        if not plan.overlap_communication:
            engine = f"{plan.engine}, nothing overlapped"
        else:
            engine = plan.engine
        has = {
            "several stages": plan.num_stages > 1,
            "uneven layers": len({stage.layers for stage in plan.stages}) > 1,
            "offloading": any(stage.offload != Offload() for stage in plan.stages),
            "ZeRO-2 or 3": any(stage.zero >= 2 for stage in plan.stages),
            "close to the memory limit": self.is_close,
            "the default problem": self.is_default,
            "proposed by a searcher": self.proposed_by is not None,
        }
        return frozenset(
            (
                *(name for name, true in has.items() if true),
                cluster.hardware.name,
                nodes if cluster.nodes <= 4 else "8 to 64 nodes",
                engine,
                micro_batches_words(plan.micro_batches, plan.num_stages),
            )
        )


def micro_batches_words(micro_batches: int, stages: int) -> str:
    """How the number of micro-batches compares with the number of stages, in words."""
    if micro_batches == 1:
        return "one micro-batch"
    if micro_batches < stages:
        return "fewer micro-batches than stages"
    return "as many as stages" if micro_batches == stages else "more micro-batches than stages"


def random_plans(count: int, seed: int) -> Iterator[RandomPlan]:
    """Draws ``count`` plans, about equally many for each problem; the same seed gives the same
    plans. Some are proposed by searchers.
    """
    problems = [*_problems(np.random.default_rng(seed))]
    shares = spread_shares(count, len(problems))
    for number, (problem, wanted) in enumerate(zip(problems, shares, strict=True)):
        draw = np.random.default_rng((seed, number))
        for plan in _of_problem(problem, wanted, draw):
            yield replace(plan, is_default=number == 0)


def _problems(draw: np.random.Generator) -> Iterator[Problem]:
    """The problems (model and cluster) for which plans are drawn: the default one, and for each
    kind of hardware one with few, one with more and one with many nodes.
    """
    workload, cluster = problem_of(Namespace(**PROBLEM))
    yield Problem(workload=workload, cluster=cluster)
    for name in catalog.calibrated_names():
        hardware = catalog.hardware(name)
        for nodes in NODES:
            cluster = Cluster(
                hardware=hardware,
                nodes=int(draw.choice(nodes)),
                gpus_per_node=min(hardware.node.gpus, int(draw.choice([4, 8]))),
            )
            memory_bytes = cluster.memory_bytes * cluster.num_gpus
            # The models that are trained from scratch, whose sequence length may be chosen freely.
            plain = [
                replace(model, context=None)
                for model in map(catalog.model, catalog.model_names())
                if model.has_plain_blocks
            ]
            # Choose among the models whose weights, gradients and optimizer states take a plausible
            # share of GPU memory; if no model does, choose the largest model.
            models = [
                model
                for model in plain
                if LEAST_HELD <= rough_state_bytes(model) / memory_bytes <= MOST_HELD
            ] or [max(plain, key=rough_state_bytes)]
            model = models[draw.integers(len(models))]
            length = int(draw.choice([1024, 2048, 4096]))
            workload = Workload(
                model=model,
                sequence_length=min(length, model.learned_positions or length),
                global_batch=max(8, cluster.num_gpus * int(draw.choice([1, 2, 4, 8]))),
                attention="flash" if draw.random() < 0.75 else "math",
                precision="fp16",
            )
            yield Problem(workload=workload, cluster=cluster)


def _of_problem(problem: Problem, wanted: int, draw: np.random.Generator) -> Iterator[RandomPlan]:
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    proposed = [*islice(_proposed(problem, predictor), round(wanted * PROPOSED))]
    yield from proposed
    drawing = _Drawing(problem, predictor, draw)
    for number in range(wanted - len(proposed)):
        # Half of the plans should nearly fill the GPUs' memory: every second one.
        drawn = drawing.plan(close=number % 2 == 0)
        if drawn is not None:
            yield drawn


def _proposed(problem: Problem, predictor: SymbolicPredictor) -> Iterator[RandomPlan]:
    for name in PROPOSING:
        searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
        result = searcher.search(problem, _playable(problem, name), PROPOSING_BUDGET, 0)
        answer = answer_of(result)
        if answer is not None:
            plan, prediction = answer
            job = Job(workload=problem.workload, cluster=problem.cluster, plan=plan)
            yield RandomPlan(job=job, prediction=prediction, proposed_by=name)


def _playable(problem: Problem, name: str) -> SearchSpace:
    """The search space without those plans whose many micro-batches would take long to simulate."""
    workload = problem.workload
    most = max(1, MOST_BLOCKS // workload.model.layers)
    counts = tuple(count for count in divisors(workload.global_batch) if count <= most)
    return replace(space_of(name), micro_batches=counts)


class _Drawing:
    """Draws random plans for one problem."""

    def __init__(
        self, problem: Problem, predictor: SymbolicPredictor, draw: np.random.Generator
    ) -> None:
        self.problem = problem
        self.predictor = predictor
        self.draw = draw
        self.chooser = Chooser(lambda _, options: int(draw.integers(options)))
        self.spaces = {name: _playable(problem, name) for name, _ in SPACES}
        self.pipelines = {
            name: _by_kind([*equal_pipelines(problem, space)])
            for name, space in self.spaces.items()
        }

    def plan(self, *, close: bool) -> RandomPlan | None:
        """A plan that fits in memory; with ``close``, one that is close to the memory limit, if a
        few draws find one.
        """
        for missed in range(MOST_TRIES):
            plan = self._drawn()
            made = None if plan is None else self._fitting(plan, close=close)
            if made is None:
                continue
            close = close and missed < TRIES_TO_BE_CLOSE
            job = Job(workload=self.problem.workload, cluster=self.problem.cluster, plan=made[0])
            drawn = RandomPlan(job=job, prediction=made[1], missed=missed)
            if drawn.is_close or not close:
                return drawn
        return None

    def _drawn(self) -> Plan | None:
        """A random plan of one of the search spaces, or None if the drawn numbers do not divide
        evenly.
        """
        name, overlap = SPACES[self.draw.integers(len(SPACES))]
        space = self.spaces[name]
        if not space.unequal_meshes or self.draw.random() < 0.5:
            kinds = self.pipelines[name]
            if not kinds:
                return None
            by_stages = self._one_of([*kinds.values()])
            space = only(self._one_of(self._one_of([*by_stages.values()])), space)
        plan = chosen_plan(self.problem, space, self.chooser)
        return None if plan is None else replace(plan, overlap_communication=overlap)

    def _one_of(self, choices: Sequence[Choice]) -> Choice:
        return choices[int(self.draw.integers(len(choices)))]

    def _fitting(self, plan: Plan, *, close: bool) -> tuple[Plan, Prediction] | None:
        """The plan if it fits, otherwise None. With ``close``, it gets the fewest recomputed blocks
        with which it fits.
        """
        if not close:
            prediction = self.predictor.predict(plan)
            return (plan, prediction) if prediction.fits else None
        plans = [
            replace(
                plan,
                stages=tuple(
                    replace(stage, checkpointed_layers=round(share * stage.layers))
                    for stage in plan.stages
                ),
            )
            for share in np.linspace(0.0, 1.0, 9)
        ]
        predictions = self.predictor.predict_many(plans)
        fitting = [pair for pair in zip(plans, predictions, strict=True) if pair[1].fits]
        return fitting[0] if fitting else None


def _by_kind(pipelines: Sequence[Pipeline]) -> dict[str, dict[int, list[Pipeline]]]:
    """Groups pipelines by whether they have fewer or more micro-batches than stages, and then by
    their number of stages.
    """
    by_kind: dict[str, dict[int, list[Pipeline]]] = defaultdict(lambda: defaultdict(list))
    for pipeline in pipelines:
        kind = micro_batches_words(pipeline.micro_batches, pipeline.num_stages)
        by_kind[kind][pipeline.num_stages].append(pipeline)
    return by_kind
