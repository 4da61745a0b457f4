"""The event simulator, which plays one iteration of a plan task by task.

It shares with the closed form only the durations of single tasks and the slot table. One rank
stands for all ranks of a stage, which are alike. Slots are no barriers here: a task waits for the
tasks that it needs (``simulators.pass_pattern``), and tasks that run side by side slow one another
down (``simulators.play``).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mistlab.cost.arithmetic import model_flop
from mistlab.cost.bounds import bounds_of
from mistlab.cost.figures_at import mean_peak_flop_per_s
from mistlab.cost.iteration import iteration_figures
from mistlab.cost.tasks import TaskModel
from mistlab.cost.unlike_nodes import task_models
from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.plan_orders import passes_of_plan
from mistlab.schedule.slot_table import Action, Kind
from mistlab.values.errors import refuse
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, StagePrediction
from mistlab.values.stages import StageBatch
from mistlab.values.value import check_field
from mistlab.values.workload import Workload
from simulators.build import build_graph, build_stage
from simulators.graph import LANES, TaskGraph
from simulators.part_tasks import tasks_of_parts
from simulators.play import Factors, Times, play
from simulators.stage_times import PassTimes, pass_times
from simulators.symbolic import SymbolicPredictor, as_they_are
from simulators.variability import Quantiles, Variability

NAME = "events"

# Passes of layers that are played; a million take half a minute, and half a gibibyte.
MOST_TASKS = 10_000_000
# Kinds of tasks whose time is proportional to the size of a micro-batch.
_OF_MICRO_BATCH: frozenset[Kind] = frozenset({"F", "B", "W", "A", "X", "Y"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """A task, its lane, and its times in seconds from the iteration's beginning."""

    action: Action
    lane: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """One played iteration: the tasks and their times."""

    graph: TaskGraph
    times: Times

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def iteration_s(self) -> float:
        """Seconds until the last task has ended. If stages step apart: the longest time, over all
        stages, from a stage's first task to its last."""
        if not self.graph.steps_apart:
            return max(self.times.ends_s, default=0.0)
        return max(map(self._apart_s, range(self.graph.stages)))

    def _apart_s(self, stage: int) -> float:
        """Seconds of a stage's own iteration. It waits for its first micro-batch when the iteration
        before is over, and what it does meanwhile counts, but not the waiting."""
        graph, times = self.graph, self.times
        own = [task for task in range(len(graph)) if graph.stage(task) == stage]
        first_s = min(times.starts_s[task] for task in own if graph.lane(task) == "compute")
        before = [task for task in own if times.ends_s[task] <= first_s]
        begun_s = min((times.starts_s[task] for task in before), default=0.0)
        ready_s = max((times.ends_s[task] for task in before), default=0.0)
        return max(times.ends_s[task] for task in own) - first_s + ready_s - begun_s

    def tasks(self) -> Iterator[PlayedTask]:
        """All tasks, stage by stage, in the order of the slot table."""
        return map(self.task, range(len(self.graph)))

    def task(self, number: int) -> PlayedTask:
        """A task by its number in the graph."""
        return PlayedTask(
            action=self.graph.action(number),
            lane=self.graph.lane(number),
            start_s=self.times.starts_s[number],
            end_s=self.times.ends_s[number],
        )

    def busy_s(self) -> tuple[Mapping[str, float], ...]:
        """For each stage, the seconds that each lane ran tasks."""
        sums = [0.0] * (len(LANES) * self.graph.stages)
        spans = zip(self.graph.lanes, self.times.starts_s, self.times.ends_s, strict=True)
        for lane, start, end in spans:
            sums[lane] += end - start
        return tuple(
            dict(zip(LANES, sums[lane : lane + len(LANES)], strict=True))
            for lane in range(0, len(sums), len(LANES))
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DisturbedIteration:
    """The tasks of an iteration, and what disturbs them."""

    graph: TaskGraph
    factors: tuple[Factors, ...]
    by: Variability

    def __len__(self) -> int:
        return len(self.graph)

    def played_s(self, sample: int) -> float:
        """Seconds of the iteration with the jitter of a sample."""
        return _played(self.by.disturbed(self.graph, sample), self.factors).iteration_s


@dataclass(slots=True, kw_only=True)
class EventSimulator:
    """Plays plans of one workload on one cluster; compiles expressions at the first call.

    Its predictions take memory, bounds, notes and the arithmetic of the optimizer's step from the
    closed form. ``altered`` changes the times of tasks before they are played.
    """

    workload: Workload
    cluster: Cluster
    altered: Callable[[TaskModel], TaskModel] = as_they_are
    _symbolic: SymbolicPredictor | None = field(default=None, init=False)
    _models: dict[tuple[Engine, bool], tuple[TaskModel, ...]] = field(
        default_factory=dict, init=False
    )

    def simulate(
        self,
        plan: Plan,
        *,
        engine: Engine | None = None,
        variability: Variability | None = None,
        work: Sequence[float] | None = None,
    ) -> Simulation:
        """Play one iteration, with the first sample of ``variability`` if it is given.

        ``work`` has a factor for each micro-batch, on the times of its passes, its sends and its
        activations' swaps. ``engine`` plays the plan in place of the plan's own engine; no plan
        need be able to name it.
        """
        graph, factors = self._graph(plan, engine)
        if work is not None:
            graph = _with_work(graph, plan, work)
        return _played(variability.disturbed(graph) if variability else graph, factors)

    def simulate_stage(self, plan: Plan, stage: int) -> Simulation:
        """Play one stage of a plan without the others, like ``SymbolicPredictor.predict_stage``."""
        models, passes = self._of_groups(plan), passes_of_plan(plan)
        parts, factors = tasks_of_parts(models, plan, passes, self.cluster)
        graph = build_stage(parts, stage, models[0].template, passes)
        return _played(graph, factors)

    def monte_carlo(self, plan: Plan, variability: Variability, samples: int) -> Quantiles:
        """Play ``samples`` iterations, each with its own jitter."""
        samples = check_field(Quantiles, "samples", samples)
        iteration = self.disturbed(plan, variability)
        return Quantiles.of(map(iteration.played_s, range(samples)), variability.seed)

    def disturbed(self, plan: Plan, variability: Variability) -> DisturbedIteration:
        """An iteration that can be played again and again, each time with other jitter."""
        graph, factors = self._graph(plan)
        return DisturbedIteration(graph=graph, factors=tuple(factors), by=variability)

    def _graph(self, plan: Plan, engine: Engine | None = None) -> tuple[TaskGraph, list[Factors]]:
        _check_layers(plan)
        _check_tasks(plan)
        models, passes = self._of_groups(plan, engine), passes_of_plan(plan)
        parts, factors = tasks_of_parts(models, plan, passes, self.cluster)
        graph = build_graph(parts, models[0].template, passes)
        graph.steps_apart = (engine or ENGINES[plan.engine]).steps_apart
        return graph, factors

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> list[Prediction]:
        """The predicted cost of each plan, in order."""
        closed = self._closed_form().predict_many(plans)
        return [
            self._predicted(plan, one, self.simulate(plan))
            for plan, one in zip(plans, closed, strict=True)
        ]

    def prediction_of(self, plan: Plan, simulation: Simulation) -> Prediction:
        """The predicted cost of a plan, from an iteration that was played already."""
        return self._predicted(plan, self._closed_form().predict(plan), simulation)

    def _closed_form(self) -> SymbolicPredictor:
        if self._symbolic is None:
            self._symbolic = SymbolicPredictor(
                workload=self.workload, cluster=self.cluster, altered=self.altered
            )
        return self._symbolic

    def _predicted(self, plan: Plan, closed: Prediction, simulation: Simulation) -> Prediction:
        figures = iteration_figures(
            simulation.iteration_s,
            num_gpus=plan.num_gpus,
            flop=model_flop(self.workload),
            workload=self.workload,
            peak_flop_per_s=mean_peak_flop_per_s(
                self.cluster, self.workload.precision, 0, plan.num_gpus
            ),
            bounds=bounds_of(self.workload, self.cluster, plan.engine),
        )
        return replace(
            closed,
            **{
                **figures,
                "iteration_s_high": max(figures["iteration_s_high"], closed.iteration_s_high),
            },
            predictor=NAME,
            stages=self._stages(plan, closed, simulation),
        )

    def _stages(
        self, plan: Plan, closed: Prediction, simulation: Simulation
    ) -> tuple[StagePrediction, ...]:
        """The closed form's stages with the times that were played.

        A single micro-batch has no steady passes; then the closed form's steady times stand in.
        """
        steady = (
            self._closed_form()
            .stage_costs(
                StageBatch.of_plan(plan),
                engine=plan.engine,
                overlap_communication=plan.overlap_communication,
            )
            .seconds
        )
        passes_s = zip(steady.forward_s.tolist(), steady.backward_s.tolist(), strict=True)
        return tuple(
            _as_played(stage, played, of_stage)
            for stage, played, of_stage in zip(
                closed.stages,
                pass_times(simulation.graph, simulation.times),
                passes_s,
                strict=True,
            )
        )

    def _of_groups(self, plan: Plan, engine: Engine | None = None) -> tuple[TaskModel, ...]:
        """The tasks of stages in each group of nodes."""
        row, overlaps = engine or ENGINES[plan.engine], plan.overlap_communication
        if (row, overlaps) not in self._models:
            self._models[row, overlaps] = task_models(
                self.workload,
                self.cluster,
                row,
                overlap_communication=overlaps,
                altered=self.altered,
            )
        return self._models[row, overlaps]


def _check_layers(plan: Plan) -> None:
    """Refuse a plan with a stage that has no layer at all: neither blocks nor an end."""
    for number, stage in enumerate(plan.stages[:-1]):
        if not stage.layers:
            problem = (
                "0, and such a stage has nothing to play: leave the stage out, or predict the plan "
                "in closed form"
            )
            refuse(f"plan.stages[{number}].layers", problem)


def _check_tasks(plan: Plan) -> None:
    """Refuse a plan with more tasks than can be played in minutes."""
    tasks = 2 * plan.layers * plan.micro_batches
    if tasks > MOST_TASKS:
        problem = (
            f"{plan.micro_batches} of {plan.layers} layers are {tasks:,} passes of layers, more "
            f"than the {MOST_TASKS:,} that are played: give fewer, or predict in closed form"
        )
        refuse("plan.micro_batches", problem)


def _played(graph: TaskGraph, factors: Sequence[Factors]) -> Simulation:
    return Simulation(graph=graph, times=play(graph, factors))


def _as_played(
    stage: StagePrediction, played: PassTimes, steady_s: tuple[float, float]
) -> StagePrediction:
    """A stage with the played times; ``steady_s`` stands in if no steady passes were played."""
    forward_s, backward_s = played.steady_s or steady_s
    stable_s = forward_s + backward_s
    computing_s = stage.stable_s - stage.exposed_communication_s
    return replace(
        stage,
        stable_s=stable_s,
        delta_forward_s=played.forwards_s[0] - forward_s,
        delta_backward_s=played.backwards_s[-1] - backward_s,
        exposed_communication_s=max(0.0, stable_s - computing_s),
    )


def _with_work(graph: TaskGraph, plan: Plan, work: Sequence[float]) -> TaskGraph:
    """The graph with the times of each micro-batch's tasks multiplied by its factor."""
    if len(work) != plan.micro_batches:
        problem = f"has {len(work)} numbers for {plan.micro_batches} micro-batches: give one each"
        refuse("work", problem)
    for number, share in enumerate(work):
        if not (math.isfinite(share) and share > 0):
            refuse(f"work[{number}]", f"{share:g} is not positive: give how much there is to do")
    seconds = [
        alone * work[micro_batch] if kind in _OF_MICRO_BATCH else alone
        for alone, micro_batch, (kind, _, _) in zip(
            graph.seconds, graph.micro_batches, graph.labels, strict=True
        )
    ]
    return replace(graph, seconds=seconds)
