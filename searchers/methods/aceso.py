"""A search like Aceso's: it changes the slowest stage of a plan step by step; each change uses less
of one resource and more of another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from mistlab.cost.memory import room_of_plan
from mistlab.job.prediction import Prediction, StagePrediction
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS, dimensions_of_axes, names_of, ranks_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from searchers.meshes import equal_pipelines, even_layers, orders_of, other_names, pipelines
from searchers.methods.scores import Score, score_of
from searchers.savings import Members, alike, bare_stage
from searchers.strategy import Ending, Ledger

# The moves of the search: changes of one stage that use less of one resource (compute,
# communication, memory) and more of another, like Aceso's primitives.
#
# A move returns several plans in which a stage uses less of a resource. Most of these plans use
# more of another resource, or more on other stages. The caller checks which of the plans the search
# space allows.


Resource = Literal["compute", "communication", "memory", "host"]
Move = Callable[[Plan, int, SearchSpace], Iterator[Plan]]
# Dimensions in which a higher value shards more states over a group of ranks, such as the ZeRO
# level.
_LEVELS = tuple(name for name in names_of("savings") if DIMENSIONS[name].shared_by)


def moves(plan: Plan, stage: int, resource: Resource, space: SearchSpace) -> Iterator[Plan]:
    """The plans that are one move away from ``plan``, in which stage number ``stage`` uses less of
    ``resource``.
    """
    for move in _MOVES[resource]:
        yield from move(plan, stage, space)


def _with_stages(plan: Plan, changes: Mapping[int, StagePlan]) -> Plan:
    return replace(plan, stages=tuple(changes.get(i, s) for i, s in enumerate(plan.stages)))


def _saving(plan: Plan, stage: int, changed: StagePlan, space: SearchSpace) -> Plan:
    """The plan with other memory savings for one stage, or for all stages if all must save memory
    in the same way.
    """
    if space.unequal_stages:
        return _with_stages(plan, {stage: changed})
    largest = changed.resized(max(other.layers for other in plan.stages))
    return replace(plan, stages=tuple(alike(largest, other.layers) for other in plan.stages))


def _recompute(sign: int, plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: recompute more or fewer blocks, by one, a quarter, a half or all of those that can be
    changed.
    """
    chosen = plan.stages[stage]
    counts = chosen.counts
    for name, count in counts.items():
        most = chosen.layers - sum(counts.values()) if sign > 0 else count
        for step in sorted({1, most // 4, most // 2, most} - {0}):
            if step <= most:
                changed = chosen.with_values({name: count + sign * step})
                yield _saving(plan, stage, changed, space)


def _shard(sign: int, plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: set the stage's ZeRO level (or another sharding level) to each higher or each lower
    one.
    """
    chosen = plan.stages[stage]
    for name in _LEVELS:
        for level in space.listed(name) or ():
            if (level - chosen.value(name)) * sign > 0:
                yield _saving(plan, stage, chosen.with_values({name: level}), space)


def _offload(sign: int, plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: offload more or less of one kind of state (such as weights or gradients) to host
    memory.
    """
    chosen = plan.stages[stage]
    for name in OFFLOADS:
        ratios = space.listed(name) or ()
        now = ratios.index(chosen.value(name))
        others = ratios[now + 1 :] if sign > 0 else ratios[:now][::-1]
        # Two ratios are tried: the nearest in this direction, and the farthest.
        for ratio in dict.fromkeys([*others[:1], *others[-1:]]):
            yield _saving(plan, stage, chosen.with_values({name: ratio}), space)


def _change(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: set a memory saving that is neither a ZeRO level nor an offload ratio to each of its
    other values.
    """
    chosen = plan.stages[stage]
    for name in names_of("savings"):
        if name in (*_LEVELS, *OFFLOADS):
            continue
        for value in space.listed(name) or ():
            if value != chosen.value(name):
                yield _saving(plan, stage, chosen.with_values({name: value}), space)


def _change_mesh(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: change a dimension of the mesh that is not a parallel degree, such as sequence
    parallelism.
    """
    for name in other_names():
        if name in dimensions_of_axes():
            continue
        for value in space.listed(name) or ():
            if value != plan.stages[stage].value(name):
                changes = {name: value}
                if space.unequal_meshes:
                    yield _with_stages(plan, {stage: plan.stages[stage].with_values(changes)})
                else:
                    stages = tuple(own.with_values(changes) for own in plan.stages)
                    yield replace(plan, stages=stages)


def _reorder(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: change the pipeline schedule of the plan."""
    del stage
    for order in space.orders:
        if order != plan.order:
            yield replace(plan, order=order)


def _give_layers(plan: Plan, stage: int, _: SearchSpace) -> Iterator[Plan]:
    """A move: give blocks to a neighbouring stage, or to the first or the last stage."""
    giver, last = plan.stages[stage], plan.num_stages - 1
    for taker in sorted({stage - 1, stage + 1, 0, last} - {stage, -1, plan.num_stages}):
        other = plan.stages[taker]
        for step in sorted({1, 2, giver.layers // 4} - {0}):
            if step < giver.layers:
                smaller = giver.resized(giver.layers - step)
                larger = other.resized(other.layers + step)
                yield _with_stages(plan, {stage: smaller, taker: larger})


def _micro_batch(factor: float, plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: make the micro-batches of all stages larger and fewer, or smaller and more."""
    del stage, space
    count = plan.micro_batches / factor
    sizes = [own.micro_batch * factor for own in plan.stages]
    if all(map(_is_count, (count, *sizes))):
        stages = tuple(
            replace(stage_plan, micro_batch=int(size))
            for stage_plan, size in zip(plan.stages, sizes, strict=True)
        )
        yield replace(plan, micro_batches=int(count), stages=stages)


def _split(tensor: float, plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: trade data parallelism for tensor parallelism on the same GPUs, or the reverse. If
    all stages change, the number of micro-batches may change too.
    """
    if space.unequal_meshes:
        chosen = plan.stages[stage]
        for changed in _remeshed(
            chosen, chosen.data_parallel / tensor, chosen.tensor_parallel * tensor
        ):
            yield _with_stages(plan, {stage: changed})
        return
    for count in (plan.micro_batches, plan.micro_batches * tensor):
        stages = [
            changed
            for stage_plan in plan.stages
            for changed in _remeshed(
                replace(stage_plan, micro_batch=stage_plan.micro_batch * plan.micro_batches),
                stage_plan.data_parallel / tensor,
                stage_plan.tensor_parallel * tensor,
                micro_batches=count,
            )
        ]
        if len(stages) == plan.num_stages and _is_count(count):
            yield replace(plan, micro_batches=int(count), stages=tuple(stages))


def _take_gpus(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """A move: take GPUs from another stage, as many as this stage has, or half of the other stage's
    GPUs.
    """
    if not space.unequal_meshes:
        return
    taker = plan.stages[stage]
    for giver, other in enumerate(plan.stages):
        for taken in sorted({taker.num_gpus, other.num_gpus // 2}):
            if giver != stage and 0 < taken < other.num_gpus:
                for larger in _resized_mesh(taker, taker.num_gpus + taken):
                    for smaller in _resized_mesh(other, other.num_gpus - taken):
                        yield _with_stages(plan, {stage: larger, giver: smaller})


def _resized_mesh(stage: StagePlan, gpus: int) -> Iterator[StagePlan]:
    """The stage on ``gpus`` GPUs: once with another data-parallel degree, and once with another
    tensor-parallel degree.
    """
    yield from _remeshed(stage, gpus / stage.tensor_parallel, stage.tensor_parallel)
    yield from _remeshed(stage, stage.data_parallel, gpus / stage.data_parallel)


def _remeshed(
    stage: StagePlan, data: float, tensor: float, *, micro_batches: float = 1
) -> Iterator[StagePlan]:
    """The stage with other parallel degrees and another number of micro-batches; an empty list
    unless all sizes divide evenly.
    """
    micro_batch = stage.micro_batch * stage.data_parallel / (data * micro_batches)
    if all(map(_is_count, (data, tensor, micro_batch))):
        changed = replace(
            stage,
            data_parallel=int(data),
            tensor_parallel=int(tensor),
            micro_batch=int(micro_batch),
        )
        alone = {
            name: DIMENSIONS[name].default
            for name in other_names()
            if (group := DIMENSIONS[name].shared_by) and ranks_of(group, changed.degree) == 1
        }
        yield changed.with_values(alone)


def _is_count(number: float) -> bool:
    return number >= 1 and number == int(number)


_MOVES: Mapping[Resource, tuple[Move, ...]] = {
    "compute": (
        *(partial(_recompute, -1), _give_layers, _take_gpus),
        *(partial(_micro_batch, 2), partial(_split, 2), partial(_split, 0.5)),
        *(_change, _change_mesh, _reorder),
    ),
    "communication": (
        *(partial(_offload, -1), partial(_shard, -1), partial(_split, 0.5), partial(_split, 2)),
        *(partial(_micro_batch, 2), partial(_micro_batch, 0.5), _give_layers, _take_gpus, _change),
        *(_change_mesh, _reorder),
    ),
    "memory": (
        *(partial(_recompute, 1), partial(_shard, 1), partial(_offload, 1)),
        *(partial(_micro_batch, 0.5), partial(_split, 2), partial(_split, 0.5)),
        *(_give_layers, _take_gpus, _change, _change_mesh, _reorder),
    ),
    "host": (partial(_offload, -1), partial(_shard, 1), _give_layers, _change),
}


# Improves plans at their bottlenecks, after Aceso (Liu et al., EuroSys 2024).
#
# The bottleneck of a plan is the stage that exceeds its memory or, if all stages fit, the slowest
# stage, together with the scarcest resource of that stage. A move uses less of this resource and
# more of another. Where no single move improves a plan, a sequence of moves may: each move relieves
# the bottleneck that the previous one left. Where a sequence ends, the next best move is tried.
#
# Aceso's paper has moves of operators, micro-batch size, degrees and recomputation. Here ZeRO
# levels and offloading are moves too.


# The limits on the number of moves in a row, tried one after another.
HOPS = (1, 2, 3, 5, 7)
# From how many of the plans that a move leads to, the best first, a further move is tried.
WAYS = 3


def aceso(
    problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
) -> Ending:
    """Improve plans at their bottlenecks, starting from pipelines of every number of stages, until
    no sequence of moves improves them.
    """
    del draw  # This search draws no random numbers.
    relief = Relief(problem=problem, space=space, ledger=ledger)
    starts = list(initial_plans(problem, space))
    relief.predict(starts)
    starts.sort(key=relief.promise)
    # The best starting plan of each number of stages is improved first, then the others.
    leaders = {plan.num_stages: plan for plan in reversed(starts)}
    plans = list(dict.fromkeys([*leaders.values(), *starts]))
    for hops in HOPS:
        plans = list(dict.fromkeys(relief.relieved(plan, hops) for plan in plans))
        plans.sort(key=relief.score)
    return Ending()


def initial_plans(problem: Problem, space: SearchSpace) -> Iterator[Plan]:
    """The plans to start from: pipelines of equal stages that save no memory, each with the first
    of the space's schedules that it can run.
    """
    for pipeline in list(equal_pipelines(problem, space)) or [next(pipelines(problem, space))]:
        layers = even_layers(problem.workload.model.layers, pipeline.num_stages)
        count = pipeline.micro_batches
        stages = tuple(
            bare_stage(mesh, own, space) for mesh, own in zip(pipeline.meshes, layers, strict=True)
        )
        for order in orders_of(space, pipeline.num_stages, count, min(layers))[:1]:
            yield Plan(engine=space.engine, micro_batches=count, stages=stages, order=order)


@dataclass(slots=True, kw_only=True)
class Relief:
    """The plans that the search has predicted so far, and for each plan how many moves were
    followed from it.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    members: Members = field(init=False)
    known: dict[Plan, Prediction] = field(default_factory=dict, init=False)
    followed: dict[Plan, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.members = Members(problem=self.problem, space=self.space)

    def predict(self, plans: Sequence[Plan]) -> None:
        """Predict those plans that have no prediction yet. Raises ``BudgetSpentError``."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.known]
        self.known |= zip(new, self.ledger.predict(new), strict=True)

    def score(self, plan: Plan) -> Score:
        """The score of a plan that was predicted: the memory that it lacks and its iteration
        time.
        """
        return score_of(plan, self.known[plan], self.problem.cluster)

    def promise(self, plan: Plan) -> float:
        """A plan's time, made longer by the memory that it lacks, since the next move may save that
        memory.
        """
        score = self.score(plan)
        return score.iteration_s * (1 + score.excess)

    def relieved(self, plan: Plan, hops: int) -> Plan:
        """The last of a sequence of plans, each better than the one before and at most ``hops``
        moves away from it.
        """
        self.followed = {}
        while (better := self._better(plan, self.score(plan), hops)) is not None:
            plan = better
        return plan

    def _better(self, plan: Plan, target: Score, hops: int) -> Plan | None:
        """A plan with a better score than ``target``, at most ``hops`` moves away; None if none is
        found.
        """
        if self.followed.get(plan, 0) >= hops:
            return None
        self.followed[plan] = hops
        for stage, resource in bottlenecks(plan, self.known[plan], self.problem.cluster):
            ways = [way for way in moves(plan, stage, resource, self.space) if way in self.members]
            self.predict(ways)
            ways.sort(key=self.promise)
            better = next((way for way in ways if self.score(way) < target), None)
            if better is not None:
                return better
            for way in ways[:WAYS]:
                further = self._better(way, target, hops - 1)
                if further is not None:
                    return further
        return None


def bottlenecks(plan: Plan, prediction: Prediction, cluster: Cluster) -> list[tuple[int, Resource]]:
    """The bottlenecks of a plan, worst first: stages, each with the resource that it needs most
    of.
    """
    if not prediction.fits:
        return _short_of_memory(plan, prediction, cluster)
    ranked: list[tuple[int, Resource]] = []
    for stage in _slowest(plan, prediction):
        times = prediction.stages[stage]
        waiting_s = plan.micro_batches * times.exposed_communication_s + _once_s(times)
        computing_s = _whole_s(plan, times) - waiting_s
        resources: tuple[Resource, Resource] = ("compute", "communication")
        ranked += [(stage, r) for r in (resources if computing_s >= waiting_s else resources[::-1])]
    return ranked


def _short_of_memory(
    plan: Plan, prediction: Prediction, cluster: Cluster
) -> list[tuple[int, Resource]]:
    """The stage whose GPUs lack the most memory; if all stages fit, the stage with the most bytes
    in host memory.
    """
    stages = prediction.stages
    reserved = np.array([stage.peak_reserved_bytes for stage in stages])
    excess = reserved - room_of_plan(cluster, plan)
    fullest = int(np.argmax(excess))
    if excess[fullest] > 0:
        return [(fullest, "memory")]
    return [(max(range(len(stages)), key=lambda stage: stages[stage].host_bytes), "host")]


def _slowest(plan: Plan, prediction: Prediction) -> list[int]:
    """The two stages that take the longest over all micro-batches."""
    stages = prediction.stages
    order = sorted(range(len(stages)), key=lambda stage: -_whole_s(plan, stages[stage]))
    return order[:2]


def _whole_s(plan: Plan, stage: StagePrediction) -> float:
    return plan.micro_batches * stage.stable_s + _once_s(stage)


def _once_s(stage: StagePrediction) -> float:
    return max(0.0, stage.delta_forward_s) + max(0.0, stage.delta_backward_s)
