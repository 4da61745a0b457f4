"""The event simulator: one iteration of a plan, played task by task.

It shares with the closed form the durations of single tasks and the slot table, and nothing else.
One rank stands for all of a stage, which are alike. Slots are no barriers here: tasks wait for what
they need (``simulators.pass_pattern``), and slow one another down while they run side by side
(``simulators.play``).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mistlab.cost.arithmetic import model_flop
from mistlab.cost.bounds import bounds_of
from mistlab.cost.iteration import iteration_figures
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.orders import Order
from mistlab.schedule.slot_kinds import LAYER_TYPES
from mistlab.schedule.slot_table import (
    NO_DEPARTURES,
    Action,
    Departures,
    Kind,
    Template,
    template_of,
)
from mistlab.values.errors import refuse
from mistlab.values.plan import Engine, Plan
from mistlab.values.prediction import Prediction, StagePrediction
from mistlab.values.stages import StageBatch
from mistlab.values.value import check_field
from mistlab.values.workload import Workload
from simulators.build import build_graph, build_stage
from simulators.graph import TaskGraph
from simulators.network import Use
from simulators.pass_pattern import Name, StageTasks
from simulators.play import ALONE, Factors, Times, play
from simulators.stage_times import PassTimes, pass_times
from simulators.symbolic import SymbolicPredictor
from simulators.variability import Quantiles, Variability

NAME = "events"

_EMBEDDING, _BLOCK, _CHECKPOINTED, _HEAD = range(len(LAYER_TYPES))
_COMPUTING: Mapping[Kind, str] = {"F": "forward", "B": "backward"}
# What goes with the size of a micro-batch.
_OF_MICRO_BATCH: frozenset[Kind] = frozenset({"F", "B", "A", "X"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """A task, where it ran, and from when to when, in seconds from the iteration's beginning."""

    action: Action
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """One iteration as it was played."""

    graph: TaskGraph
    times: Times

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def iteration_s(self) -> float:
        """Seconds until the last task has ended."""
        return max(self.times.ends_s, default=0.0)

    def tasks(self) -> Iterator[PlayedTask]:
        """All tasks, stage by stage, in the order of the slot table."""
        return map(self.task, range(len(self.graph)))

    def task(self, number: int) -> PlayedTask:
        """A task by its number in the graph."""
        return PlayedTask(
            action=self.graph.action(number),
            stream=self.graph.stream(number),
            start_s=self.times.starts_s[number],
            end_s=self.times.ends_s[number],
        )

    def busy_s(self) -> tuple[Mapping[str, float], ...]:
        """For each stage, how long each stream ran tasks."""
        sums = [0.0] * (len(STREAMS) * self.graph.stages)
        spans = zip(self.graph.lanes, self.times.starts_s, self.times.ends_s, strict=True)
        for lane, start, end in spans:
            sums[lane] += end - start
        return tuple(
            dict(zip(STREAMS, sums[lane : lane + len(STREAMS)], strict=True))
            for lane in range(0, len(sums), len(STREAMS))
        )


@dataclass(slots=True, kw_only=True)
class EventSimulator:
    """Plays plans of one workload on one cluster; compiles when it is first asked.

    As a predictor it takes memory, bounds, notes and the step's arithmetic from the closed form.
    """

    workload: Workload
    cluster: Cluster
    _symbolic: SymbolicPredictor | None = field(default=None, init=False)
    _models: dict[tuple[Engine, bool, Departures], TaskModel] = field(
        default_factory=dict, init=False
    )

    def simulate(
        self,
        plan: Plan,
        order: Order = "1f1b",
        *,
        departures: Departures = NO_DEPARTURES,
        variability: Variability | None = None,
        work: Sequence[float] | None = None,
    ) -> Simulation:
        """Play one iteration, with the first sample of a ``variability`` if there is one.

        ``work`` is how much there is to do for each micro-batch, 1 being a usual one: the time of
        its passes, of its sends and of its activations' swaps goes with it. ``departures`` are
        what a published run did otherwise than the plan's engine.
        """
        graph, factors = self._graph(plan, order, departures)
        if work is not None:
            graph = _worked(graph, plan, work)
        return _played(variability.disturbed(graph) if variability else graph, factors)

    def simulate_stage(self, plan: Plan, stage: int) -> Simulation:
        """Play one of a plan's stages without the others, as ``SymbolicPredictor.predict_stage``
        has it."""
        model = self._model(plan)
        stages, factors = stages_of(model, plan)
        graph = build_stage(stages, stage, model.template, plan.micro_batches)
        return _played(graph, factors)

    def monte_carlo(self, plan: Plan, variability: Variability, samples: int) -> Quantiles:
        """Play so many iterations, each with its own jitter, under 1F1B."""
        samples = check_field(Quantiles, "samples", samples)
        graph, factors = self._graph(plan, "1f1b")
        disturbed = (variability.disturbed(graph, sample) for sample in range(samples))
        played_s = [_played(one, factors).iteration_s for one in disturbed]
        return Quantiles.of(played_s, variability.seed)

    def _graph(
        self, plan: Plan, order: Order, departures: Departures = NO_DEPARTURES
    ) -> tuple[TaskGraph, list[Factors]]:
        model = self._model(plan, departures)
        stages, factors = stages_of(model, plan)
        return build_graph(stages, model.template, plan.micro_batches, order), factors

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> list[Prediction]:
        """What each plan costs, in order."""
        closed = self._closed_form().predict_many(plans)
        return [
            self._predicted(plan, one, self.simulate(plan))
            for plan, one in zip(plans, closed, strict=True)
        ]

    def prediction_of(self, plan: Plan, simulation: Simulation) -> Prediction:
        """What a plan costs whose iteration was played already."""
        return self._predicted(plan, self._closed_form().predict(plan), simulation)

    def _closed_form(self) -> SymbolicPredictor:
        if self._symbolic is None:
            self._symbolic = SymbolicPredictor(workload=self.workload, cluster=self.cluster)
        return self._symbolic

    def _predicted(self, plan: Plan, closed: Prediction, simulation: Simulation) -> Prediction:
        figures = iteration_figures(
            simulation.iteration_s,
            num_gpus=plan.num_gpus,
            flop=model_flop(self.workload),
            workload=self.workload,
            cluster=self.cluster,
            bounds=bounds_of(self.workload, self.cluster, plan.engine),
        )
        return replace(
            closed, **figures, predictor=NAME, stages=self._stages(plan, closed, simulation)
        )

    def _stages(
        self, plan: Plan, closed: Prediction, simulation: Simulation
    ) -> tuple[StagePrediction, ...]:
        """The stages' times as they were played; of a single micro-batch, which has no steady
        passes, beyond those of the closed form."""
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

    def _model(self, plan: Plan, departures: Departures = NO_DEPARTURES) -> TaskModel:
        key = plan.engine, plan.overlap_communication, departures
        if key not in self._models:
            template = template_of(
                plan.engine,
                overlap_communication=plan.overlap_communication,
                sends=departures.sends,
                runtime=departures.runtime,
            )
            self._models[key] = TaskModel.of(
                self.workload, self.cluster, plan.engine, template, departures.step_moved
            )
        return self._models[key]


def _played(graph: TaskGraph, factors: list[Factors]) -> Simulation:
    return Simulation(graph=graph, times=play(graph, factors))


def _as_played(
    stage: StagePrediction, played: PassTimes, steady_s: tuple[float, float]
) -> StagePrediction:
    """A stage with the times that its passes took; without any steady ones those are given."""
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


def _worked(graph: TaskGraph, plan: Plan, work: Sequence[float]) -> TaskGraph:
    """The graph with micro-batches that have more or less to do."""
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


def stages_of(model: TaskModel, plan: Plan) -> tuple[list[StageTasks], list[Factors]]:
    """What the tasks of each stage of a plan take, and how its streams slow one another down."""
    batch = StageBatch.of_plan(plan)
    seconds = model.seconds({name: batch.value(name) for name in task_columns()})
    types, networks = _layer_types(plan), _networks(seconds, batch)
    names = _names(model.template)
    stages, first_layer, ends = [], 0, (0, plan.num_stages - 1)
    for stage, of_stage in enumerate(types):
        stages.append(
            StageTasks(
                stage=stage,
                first_layer=first_layer,
                zero=plan.stages[stage].zero,
                seconds={name: _seconds(seconds, name, stage, of_stage) for name in names},
                send_s=float(seconds.send_s[stage]),
                networks=networks[stage],
                tied_s=float(seconds.tied_s[stage])
                if plan.num_stages > 1 and stage in ends
                else 0.0,
            )
        )
        first_layer += len(of_stage)
    return stages, _factors(seconds, plan.num_stages)


def _networks(seconds: TaskSeconds, batch: StageBatch) -> list[dict[Kind, tuple[Use, ...]]]:
    """The links across nodes that each stage's sends take, and what part of them.

    Even numbers are what nodes give out, odd ones what they take in. A stage's first rank stands
    for all of them.
    """
    shapes, links = seconds.shapes, seconds.model.links
    nodes = (batch.first_rank // seconds.model.cluster.gpus_per_node).tolist()
    found: list[dict[Kind, tuple[Use, ...]]] = [{} for _ in nodes]
    for stage, crosses in enumerate(shapes.crosses_to_next[:-1].tolist()):
        if crosses:
            here, there = nodes[stage], nodes[stage + 1]
            part, back = (
                links.part_of_network(int(shapes.senders_of_node[sender]))
                for sender in (stage, stage + 1)
            )
            found[stage]["F"] = ((2 * here, part), (2 * there + 1, part))
            found[stage + 1]["B"] = ((2 * there, back), (2 * here + 1, back))
    return found


def _layer_types(plan: Plan) -> list[list[int]]:
    """The types of each stage's layers, in order."""
    types = [
        [_BLOCK] * (stage.layers - stage.checkpointed_layers)
        + [_CHECKPOINTED] * stage.checkpointed_layers
        for stage in plan.stages
    ]
    types[0].insert(0, _EMBEDDING)
    types[-1].append(_HEAD)
    return types


def _names(template: Template) -> list[Name]:
    """The kinds of tasks in a slot table."""
    rows = [row for phase in template.phases.values() for row in phase]
    return list(dict.fromkeys((row.kind, row.direction) for row in rows))


def _seconds(seconds: TaskSeconds, name: Name, stage: int, types: Sequence[int]) -> list[float]:
    """What tasks of a name take in a stage, by layer."""
    kind, direction = name
    of_type = seconds.alone(kind, direction or "")[:, stage]
    if kind in _COMPUTING:
        of_type = of_type + seconds.tensor_s[_COMPUTING[kind]][:, stage]
    of_type_s: list[float] = of_type.tolist()
    return [of_type_s[layer_type] for layer_type in types]


def _factors(seconds: TaskSeconds, stages: int) -> list[Factors]:
    model = seconds.model
    found: list[Factors] = [ALONE] * stages
    if model.template.depth == 0 and model.cluster.hardware.interference is None:
        return found
    for rows, factors in seconds.factors():
        for stage in np.flatnonzero(rows).tolist():
            found[stage] = factors.tolist()
    return found
