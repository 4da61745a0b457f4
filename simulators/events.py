"""The event simulator: runs every task of a plan's iteration in simulated time; a single task takes
as long as in the closed form.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mistlab.core.values import check_field, refuse
from mistlab.cost.confidence import bounds_of, iteration_figures
from mistlab.cost.kernels import model_flop, of_ranks
from mistlab.cost.links import groups_of, mean_peak_flop_per_s, peculiar_s
from mistlab.cost.order_times import task_models
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns, weight_gradients_s
from mistlab.engines.engine import ENGINES, Engine, HostTime
from mistlab.job.prediction import Prediction, StagePrediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.placement import HERE, PREVIOUS, Placement
from mistlab.schedule.slots import Action, Kind, Template
from mistlab.schedule.stage_passes import StagePasses
from mistlab.stages.plan_orders import passes_of_plan
from mistlab.stages.stage_batch import StageBatch, batch_of_parts
from mistlab.stages.stage_shape import parts_of_plan
from simulators.averaging_cycle import played_asynchronous_s, played_cycle_s
from simulators.build import Name, StageTasks, build_graph, build_stage
from simulators.graph import LANES, TaskGraph
from simulators.link_uses import links_of_sends
from simulators.play import ALONE, Factors, PassTimes, Times, pass_times, play
from simulators.symbolic import SymbolicPredictor, as_they_are
from simulators.variability import Quantiles, Variability

# Computes how long the tasks of each part of the model take, for the event simulator.
#
# A part is a chunk of a stage; a stage without chunks is one part.


_COMPUTING: Mapping[Kind, str] = {"F": "forward", "B": "backward"}
# The kinds of tasks that compute: forward, backward, and weight gradients.
_COMPUTED: tuple[Kind, ...] = ("F", "B", "W")


def tasks_of_parts(
    models: Sequence[TaskModel], plan: Plan, passes: Sequence[StagePasses], cluster: Cluster
) -> tuple[list[StageTasks], list[Factors]]:
    """The seconds of the tasks of each part of the model, and how much the streams of each stage
    slow one another down; ``models`` has the task times for each group of equal nodes.
    """
    batch = StageBatch.of_plan(plan)
    columns = {name: batch.value(name) for name in task_columns()}
    group_of = groups_of(cluster, batch.first_rank).tolist()
    of_group = {group: models[group].seconds(columns) for group in dict.fromkeys(group_of)}
    of_stages = [of_group[group] for group in group_of]
    placement, model = passes[0].placement, models[0]
    later_s = peculiar_s(batch.value, cluster)
    parts = parts_of_plan(plan, placement)
    of_parts = model.types.of_stages(batch_of_parts([plan], placement).value)
    networks, names = links_of_sends(of_stages, batch, placement), _names(model.template)
    awaits = model.host is not None and model.host.waits_for_sends
    is_awaited = awaits and plan.num_stages > 1 and plan.order == DEFAULT_ORDER
    tied_ends = plan.num_stages > 1 and not placement.ends_meet
    # The first and the last stage reduce the gradient of a tied embedding table together; both take
    # the first stage's time for that.
    first = placement.first_stage
    tied_s = float(of_stages[first].tied_s[first]) if tied_ends else 0.0
    averages = model.workload.averages_weights
    tasks = []
    for number, (part, types, uses) in enumerate(zip(parts, of_parts, networks, strict=True)):
        stage = part.stage
        seconds = of_stages[stage]
        of_name = {name: _seconds(seconds, name, stage, types) for name in names}
        host = _host_of(model, batch, stage)
        issues, late_s = _issues(model, host, types), float(later_s[stage])
        is_held = late_s > 0 or is_awaited
        if passes[stage].splits_backward:
            of_name |= _split(seconds, of_name["B", None], stage, types)
        is_end = part.has_embedding or part.has_head
        tasks.append(
            StageTasks(
                stage=stage,
                first_layer=part.first_layer,
                zero=plan.stages[stage].zero,
                seconds=of_name,
                send_s=_send_s(of_stages, placement, number),
                networks=uses,
                tied_s=tied_s if is_end else 0.0,
                averaged_s=float(seconds.averaged_s()[types, stage].sum()) if averages else 0.0,
                # If hosts wait for sends, the slowdown ``pace`` represents late hosts; then no
                # issue times (``issues``) are simulated.
                issues={} if is_awaited else issues,
                pace=_pace(model, issues, of_name, types, late_s) if is_held else 1.0,
            )
        )
    return tasks, _factors(of_stages)


def _split(
    seconds: TaskSeconds, whole: Sequence[float], stage: int, types: Sequence[int]
) -> dict[Name, list[float]]:
    """Splits the times of ``whole`` backward passes into the times for input gradients (B) and for
    weight gradients (W).

    Once split, tensor-parallel ranks wait for messages that GEMMs of weight gradients hid in whole
    passes.
    """
    weights, hidden = weight_gradients_s(seconds)[:, stage], seconds.hidden_s[:, stage]
    of_weights = [float(weights[layer_type]) for layer_type in types]
    of_inputs = [
        both - float(weights[layer_type]) + float(hidden[layer_type])
        for both, layer_type in zip(whole, types, strict=True)
    ]
    return {("B", None): of_inputs, ("W", None): of_weights}


def _host_of(model: TaskModel, batch: StageBatch, stage: int) -> HostTime | None:
    """How fast the host of a stage issues kernels; with context parallelism each rank launches more
    kernels.
    """
    if model.host is None:
        return None
    ranks, way = (batch.value(name)[[stage]] for name in ("context_parallel", "context_exchange"))
    (forward_s,), (backward_s,) = of_ranks(model.host, ranks, way)
    return replace(model.host, forward_s=float(forward_s), backward_s=float(backward_s))


def _pace(
    model: TaskModel,
    issues: Mapping[Kind, Sequence[float]],
    of_name: Mapping[Name, Sequence[float]],
    types: Sequence[int],
    later_s: float,
) -> float:
    """The least factor by which passes take longer than their computation, if the host never runs a
    pass ahead and issues each block ``later_s`` late.
    """
    if not issues:
        return 1.0
    blocks = sum(model.types.names[one] in model.types.of_blocks for one in types)
    issued_s = sum(map(sum, issues.values())) + blocks * later_s
    computed_s = sum(sum(seconds) for (kind, _), seconds in of_name.items() if kind in _COMPUTED)
    return max(1.0, issued_s / computed_s)


def _issues(
    model: TaskModel, host: HostTime | None, types: Sequence[int]
) -> dict[Kind, list[float]]:
    """The seconds that the host takes to issue the forward and the backward pass of each layer;
    empty if passes never wait for the host.
    """
    if host is None:
        return {}
    names = [model.types.names[one] for one in types]
    blocks = [name in model.types.of_blocks for name in names]
    again = [name not in model.types.kinds for name in names]
    return {
        "F": [host.forward_s if is_block else host.end_s for is_block in blocks],
        "B": [
            host.backward_s + host.forward_s * is_again if is_block else host.end_s
            for is_block, is_again in zip(blocks, again, strict=True)
        ],
    }


def _send_s(of_stages: Sequence[TaskSeconds], placement: Placement, part: int) -> float:
    """The seconds of a send from one part of the model to the next."""
    stage, step = placement.stages[part], placement.goes_to(part)
    if step == HERE:
        return 0.0
    seconds = of_stages[stage]
    return float((seconds.receive_s if step == PREVIOUS else seconds.send_s)[stage])


def _names(template: Template) -> list[Name]:
    """The kind and direction of every task in a table of time slots."""
    rows = [row for phase in template.phases.values() for row in phase]
    return list(dict.fromkeys((row.kind, row.direction) for row in rows))


def _seconds(seconds: TaskSeconds, name: Name, stage: int, types: Sequence[int]) -> list[float]:
    """The seconds, layer by layer, of a stage's tasks of one kind and direction."""
    kind, direction = name
    of_type = seconds.alone(kind, direction or "")[:, stage]
    if kind in _COMPUTING:
        of_type = of_type + seconds.tensor_s[_COMPUTING[kind]][:, stage]
    of_type_s: list[float] = of_type.tolist()
    return [of_type_s[layer_type] for layer_type in types]


def _factors(of_stages: Sequence[TaskSeconds]) -> list[Factors]:
    of_each_stage: list[Factors] = [ALONE] * len(of_stages)
    for seconds in dict.fromkeys(of_stages):
        model = seconds.model
        if model.template.depth == 0 and model.cluster.hardware.interference is None:
            continue
        for rows, factors in seconds.factors():
            for stage in np.flatnonzero(rows).tolist():
                if of_stages[stage] is seconds:
                    of_each_stage[stage] = factors.tolist()
    return of_each_stage


# The event simulator, which runs one iteration of a plan task by task in simulated time.
#
# It shares with the closed form only the durations of single tasks and the table that assigns a
# layer's tasks to time slots. One rank stands for all ranks of a stage, which are equal. Time slots
# are not barriers here: a task waits only for the tasks that it depends on (``simulators.build``),
# and concurrent tasks slow one another down (``simulators.play``).


NAME = "events"

# The largest number of tasks that are simulated in an iteration; a million tasks take half a minute
# and half a gibibyte.
MOST_TASKS = 10_000_000
# The kinds of tasks whose time is proportional to the size of a micro-batch.
_OF_MICRO_BATCH: frozenset[Kind] = frozenset({"F", "B", "W", "A", "X", "Y"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTask:
    """A simulated task: what it does, its lane (the queue in which it runs), and its start and end
    in seconds from the beginning of the iteration.
    """

    action: Action
    lane: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """A simulated iteration: its tasks, and when each started and ended."""

    graph: TaskGraph
    times: Times

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def iteration_s(self) -> float:
        """The seconds until the last task ends. If each stage steps on its own: the longest time,
        over all stages, from a stage's first task to its last.
        """
        if not self.graph.steps_apart:
            return max(self.times.ends_s, default=0.0)
        return max(map(self._apart_s, range(self.graph.stages)))

    def _apart_s(self, stage: int) -> float:
        """The seconds that one stage's iteration takes, less its wait for the first micro-batch;
        work done during that wait counts.
        """
        graph, times = self.graph, self.times
        tasks = [task for task in range(len(graph)) if graph.stage(task) == stage]
        first_s = min(times.starts_s[task] for task in tasks if graph.lane(task) == "compute")
        before = [task for task in tasks if times.ends_s[task] <= first_s]
        begun_s = min((times.starts_s[task] for task in before), default=0.0)
        ready_s = max((times.ends_s[task] for task in before), default=0.0)
        return max(times.ends_s[task] for task in tasks) - first_s + ready_s - begun_s

    def tasks(self) -> Iterator[PlayedTask]:
        """All tasks of the iteration, stage by stage, in the order of their numbers."""
        return map(self.task, range(len(self.graph)))

    def task(self, number: int) -> PlayedTask:
        """The simulated task with this index in the task graph."""
        return PlayedTask(
            action=self.graph.action(number),
            lane=self.graph.lane(number),
            start_s=self.times.starts_s[number],
            end_s=self.times.ends_s[number],
        )

    def busy_s(self) -> tuple[Mapping[str, float], ...]:
        """For each stage, how many seconds each of its lanes (queues of tasks) is busy."""
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
    """The tasks of an iteration, with the variability by which their times change at random."""

    graph: TaskGraph
    factors: tuple[Factors, ...]
    by: Variability

    def __len__(self) -> int:
        return len(self.graph)

    def played_s(self, sample: int) -> float:
        """The seconds of the iteration after its tasks' times are changed by random sample number
        ``sample``.
        """
        return _played(self.by.disturbed(self.graph, sample), self.factors).iteration_s


@dataclass(slots=True, kw_only=True)
class EventSimulator:
    """An event simulator for the plans of one workload on one cluster; its first call compiles the
    cost expressions.

    Memory, bounds, notes and the work of the optimizer step in its predictions are taken from the
    closed form. ``altered`` changes the times of tasks before the simulation.
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
        """Simulate one iteration of a plan; if ``variability`` is given, with its first sample of
        random times.

        ``work`` has a factor for each micro-batch, by which the times of its passes, sends and
        activation swaps are multiplied. ``engine`` replaces the plan's engine, and may be one that
        plans cannot name. If weights are averaged only every few iterations, the simulated
        iteration has a proportional share of the averaging.
        """
        graph, factors = self._graph(plan, engine)
        if work is not None:
            graph = _with_work(graph, plan, work)
        return _played(variability.disturbed(graph) if variability else graph, factors)

    def of_work(self, plan: Plan) -> Callable[[Sequence[float]], float]:
        """A function that takes the relative ``work`` of each micro-batch, simulates an iteration
        of the plan, and returns its seconds.
        """
        graph, factors = self._graph(plan)
        return lambda work: _played(_with_work(graph, plan, work), factors).iteration_s

    def simulate_stage(self, plan: Plan, stage: int) -> Simulation:
        """Simulate one stage of a plan as if there were no other stages, as
        ``SymbolicPredictor.predict_stage`` predicts it.
        """
        models, passes = self._of_groups(plan), passes_of_plan(plan)
        parts, factors = tasks_of_parts(models, plan, passes, self.cluster)
        graph = build_stage(parts, stage, models[0].template, passes)
        return _played(graph, factors)

    def monte_carlo(self, plan: Plan, variability: Variability, samples: int) -> Quantiles:
        """Simulate ``samples`` iterations of a plan, each with its own random times; returns
        quantiles of their seconds.
        """
        samples = check_field(Quantiles, "samples", samples)
        iteration = self.disturbed(plan, variability)
        return Quantiles.of(map(iteration.played_s, range(samples)), variability.seed)

    def disturbed(self, plan: Plan, variability: Variability) -> DisturbedIteration:
        """An iteration of a plan that can be simulated several times with different random
        times.
        """
        graph, factors = self._graph(plan)
        return DisturbedIteration(graph=graph, factors=tuple(factors), by=variability)

    def _graph(
        self, plan: Plan, engine: Engine | None = None, averaged: float | None = None
    ) -> tuple[TaskGraph, list[Factors]]:
        """The task graph of an iteration in which replicas average the share ``averaged`` of their
        weights; by default the mean share per step.
        """
        _check_layers(plan)
        _check_tasks(plan)
        models, passes = self._of_groups(plan, engine), passes_of_plan(plan)
        parts, factors = tasks_of_parts(models, plan, passes, self.cluster)
        if self.workload.averages_weights:
            how = self.workload.reduction
            usual = 0.0 if how.delay else 1 / how.every
            share = usual if averaged is None else averaged
            parts = [replace(one, averaged_s=share * one.averaged_s) for one in parts]
        graph = build_graph(parts, models[0].template, passes)
        graph.steps_apart = (engine or ENGINES[plan.engine]).steps_apart
        return graph, factors

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan, from a simulated iteration."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> list[Prediction]:
        """The predicted cost of each plan, in order."""
        closed = self._closed_form().predict_many(plans)
        return [
            self._predicted(plan, prediction, self.simulate(plan))
            for plan, prediction in zip(plans, closed, strict=True)
        ]

    def prediction_of(self, plan: Plan, simulation: Simulation) -> Prediction:
        """The predicted cost of a plan whose iteration has been simulated."""
        return self._predicted(plan, self._closed_form().predict(plan), simulation)

    def _closed_form(self) -> SymbolicPredictor:
        if self._symbolic is None:
            self._symbolic = SymbolicPredictor(
                workload=self.workload, cluster=self.cluster, altered=self.altered
            )
        return self._symbolic

    def _predicted(self, plan: Plan, closed: Prediction, simulation: Simulation) -> Prediction:
        figures = iteration_figures(
            self._mean_s(plan, simulation),
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

    def _mean_s(self, plan: Plan, simulation: Simulation) -> float:
        """The mean seconds of a plan's iterations if replicas average their weights in only some of
        them.
        """
        how = self.workload.reduction
        if how.asynchronous:
            both_s, busy_s = self._closed_form().asynchronous_exchanges_s(plan)
            ranks = plan.data_ranks[0]
            return played_asynchronous_s(simulation.iteration_s, both_s, busy_s / ranks, ranks)
        if not self.workload.averages_weights or how.every == 1:
            return simulation.iteration_s
        alone_s = _played(*self._graph(plan, averaged=0.0)).iteration_s
        due_s = _played(*self._graph(plan, averaged=1 / how.fragments)).iteration_s
        return played_cycle_s(how, alone_s, due_s - alone_s) / how.every

    def _stages(
        self, plan: Plan, closed: Prediction, simulation: Simulation
    ) -> tuple[StagePrediction, ...]:
        """A plan's stages as the closed form predicts them, but with simulated times.

        With a single micro-batch no pass is steady; then the closed form's steady times are used.
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
        """The task times on each group of equal nodes, for a plan's engine; cached."""
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
    """Refuse a plan in which some stage has no layer at all: no block, no embedding and no head."""
    for number, stage in enumerate(plan.stages[:-1]):
        if not stage.layers:
            refuse(
                f"plan.stages[{number}].layers",
                "0, so that the stage has no task to simulate: leave the stage out, or predict the "
                "plan in closed form (--simulator symbolic)",
            )


def _check_tasks(plan: Plan) -> None:
    """Refuse a plan whose iteration has too many tasks to simulate within minutes."""
    tasks = 2 * plan.layers * plan.micro_batches
    if tasks > MOST_TASKS:
        refuse(
            "plan.micro_batches",
            f"{plan.micro_batches} through {plan.layers} layers are {tasks:,} passes of layers, "
            f"more than the {MOST_TASKS:,} that can be simulated: give fewer micro-batches, or "
            "predict in closed form (--simulator symbolic)",
        )


def _played(graph: TaskGraph, factors: Sequence[Factors]) -> Simulation:
    return Simulation(graph=graph, times=play(graph, factors))


def _as_played(
    stage: StagePrediction, played: PassTimes, steady_s: tuple[float, float]
) -> StagePrediction:
    """A predicted stage with simulated times in place of its own; ``steady_s`` is used if no steady
    pass was simulated.
    """
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
    """The task graph with the times of each micro-batch's tasks multiplied by that micro-batch's
    factor in ``work``.
    """
    if len(work) != plan.micro_batches:
        refuse(
            "work",
            f"has {len(work)} numbers for {plan.micro_batches} micro-batches: give one each",
        )
    for number, share in enumerate(work):
        if not (math.isfinite(share) and share > 0):
            refuse(f"work[{number}]", f"{share:g} is not positive: give a factor such as 1")
    seconds = [
        alone * work[micro_batch] if kind in _OF_MICRO_BATCH else alone
        for alone, micro_batch, (kind, _, _) in zip(
            graph.seconds, graph.micro_batches, graph.labels, strict=True
        )
    ]
    return replace(graph, seconds=seconds)
