"""Moves: changes of one stage's plan that trade one resource for another, as Aceso's primitives do.

Each move gives plans in which a stage uses less of a resource. Most of these plans use more of
another resource, or more on other stages. The caller checks which plans the space allows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from mistlab.values.dimensions import DIMENSIONS, OFFLOADS, counts_of_blocks, names_of
from mistlab.values.mesh import dimensions_of_axes, ranks_of
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.space import SearchSpace
from searchers.meshes import other_names
from searchers.savings import alike

Resource = Literal["compute", "communication", "memory", "host"]
Move = Callable[[Plan, int, SearchSpace], Iterator[Plan]]
# Savings that ranks of a group share: the more of them, the higher the level.
_LEVELS = tuple(name for name in names_of("savings") if DIMENSIONS[name].shared_by)


def moves(plan: Plan, stage: int, resource: Resource, space: SearchSpace) -> Iterator[Plan]:
    """Plans in which the stage uses less of the resource."""
    for move in _MOVES[resource]:
        yield from move(plan, stage, space)


def _with_stages(plan: Plan, changes: Mapping[int, StagePlan]) -> Plan:
    return replace(plan, stages=tuple(changes.get(i, s) for i, s in enumerate(plan.stages)))


def _saving(plan: Plan, stage: int, changed: StagePlan, space: SearchSpace) -> Plan:
    """The plan with one stage's savings changed, or all stages' where they must be alike."""
    if space.unequal_stages:
        return _with_stages(plan, {stage: changed})
    largest = _resized(changed, max(other.layers for other in plan.stages))
    return replace(plan, stages=tuple(alike(largest, other.layers) for other in plan.stages))


def _recompute(sign: int) -> Move:
    """Recompute more or fewer blocks, or treat them in another way: by one, by a quarter or half of
    those that can be, or all."""

    def move(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
        own = plan.stages[stage]
        counts = {name: own.degree(name) for name in counts_of_blocks()}
        for name, count in counts.items():
            most = own.layers - sum(counts.values()) if sign > 0 else count
            for step in sorted({1, most // 4, most // 2, most} - {0}):
                if step <= most:
                    changed = own.with_values({name: count + sign * step})
                    yield _saving(plan, stage, changed, space)

    return move


def _shard(sign: int) -> Move:
    """Take a higher or a lower ZeRO level."""

    def move(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
        own = plan.stages[stage]
        for name in _LEVELS:
            for level in space.listed(name) or ():
                if (level - own.value(name)) * sign > 0:
                    yield _saving(plan, stage, own.with_values({name: level}), space)

    return move


def _offload(sign: int) -> Move:
    """Keep more or less of one kind of state in host memory."""

    def move(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
        own = plan.stages[stage]
        for name in OFFLOADS:
            ratios = space.listed(name) or ()
            now = ratios.index(own.value(name))
            others = ratios[now + 1 :] if sign > 0 else ratios[:now][::-1]
            # The next ratio, and the last.
            for ratio in dict.fromkeys([*others[:1], *others[-1:]]):
                yield _saving(plan, stage, own.with_values({name: ratio}), space)

    return move


def _change(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """Take another value of a choice that is no level of sharding and no ratio of offloading,
    whatever it trades."""
    own = plan.stages[stage]
    for name in names_of("savings"):
        if name in (*_LEVELS, *OFFLOADS):
            continue
        for value in space.listed(name) or ():
            if value != own.value(name):
                yield _saving(plan, stage, own.with_values({name: value}), space)


def _change_mesh(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """Take another value of a dimension of the mesh that is no degree, such as sequence
    parallelism."""
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
    """Let all stages run their passes in another order."""
    del stage
    for order in space.orders:
        if order != plan.order:
            yield replace(plan, order=order)


def _give_layers(plan: Plan, stage: int, _: SearchSpace) -> Iterator[Plan]:
    """Give blocks to a neighbour, or through the stages between to the first or the last stage."""
    own, last = plan.stages[stage], plan.num_stages - 1
    for place in sorted({stage - 1, stage + 1, 0, last} - {stage, -1, plan.num_stages}):
        other = plan.stages[place]
        for step in sorted({1, 2, own.layers // 4} - {0}):
            if step < own.layers:
                smaller = _resized(own, own.layers - step)
                larger = _resized(other, other.layers + step)
                yield _with_stages(plan, {stage: smaller, place: larger})


def _resized(stage: StagePlan, layers: int) -> StagePlan:
    """The stage with other blocks, of which it treats as many in each way, or all if it treated
    all."""
    for name in counts_of_blocks():
        if stage.value(name) == stage.layers:
            return stage.with_values({"layers": layers, name: layers})
    return alike(stage, layers)


def _micro_batch(factor: float) -> Move:
    """Make the micro-batches of all stages larger or smaller, and fewer or more."""

    def move(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
        del stage, space
        count = plan.micro_batches / factor
        sizes = [own.micro_batch * factor for own in plan.stages]
        if all(map(_is_count, (count, *sizes))):
            stages = tuple(
                replace(own, micro_batch=int(size))
                for own, size in zip(plan.stages, sizes, strict=True)
            )
            yield replace(plan, micro_batches=int(count), stages=stages)

    return move


def _split(tensor: float) -> Move:
    """Take more tensor and less data parallelism on the same GPUs, or the reverse. Where all stages
    change, the number of micro-batches may change to match."""

    def move(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
        if space.unequal_meshes:
            own = plan.stages[stage]
            for changed in _remeshed(own, own.data_parallel / tensor, own.tensor_parallel * tensor):
                yield _with_stages(plan, {stage: changed})
            return
        for count in (plan.micro_batches, plan.micro_batches * tensor):
            stages = [
                changed
                for own in plan.stages
                for changed in _remeshed(
                    replace(own, micro_batch=own.micro_batch * plan.micro_batches),
                    own.data_parallel / tensor,
                    own.tensor_parallel * tensor,
                    micro_batches=count,
                )
            ]
            if len(stages) == plan.num_stages and _is_count(count):
                yield replace(plan, micro_batches=int(count), stages=tuple(stages))

    return move


def _take_gpus(plan: Plan, stage: int, space: SearchSpace) -> Iterator[Plan]:
    """Take GPUs from another stage: as many as the stage has, or half of the other's."""
    if not space.unequal_meshes:
        return
    own = plan.stages[stage]
    for place, other in enumerate(plan.stages):
        for taken in sorted({own.num_gpus, other.num_gpus // 2}):
            if place != stage and 0 < taken < other.num_gpus:
                for larger in _resized_mesh(own, own.num_gpus + taken):
                    for smaller in _resized_mesh(other, other.num_gpus - taken):
                        yield _with_stages(plan, {stage: larger, place: smaller})


def _resized_mesh(stage: StagePlan, gpus: int) -> Iterator[StagePlan]:
    """The stage on ``gpus`` GPUs: with other data parallelism, or with other tensor parallelism."""
    yield from _remeshed(stage, gpus / stage.tensor_parallel, stage.tensor_parallel)
    yield from _remeshed(stage, stage.data_parallel, gpus / stage.data_parallel)


def _remeshed(
    stage: StagePlan, data: float, tensor: float, *, micro_batches: float = 1
) -> Iterator[StagePlan]:
    """The stage with other degrees, and with its sequences in ``micro_batches``, if all numbers are
    whole."""
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
        *(_recompute(-1), _give_layers, _take_gpus, _micro_batch(2), _split(2), _split(0.5)),
        *(_change, _change_mesh, _reorder),
    ),
    "communication": (
        *(_offload(-1), _shard(-1), _split(0.5), _split(2)),
        *(_micro_batch(2), _micro_batch(0.5), _give_layers, _take_gpus, _change),
        *(_change_mesh, _reorder),
    ),
    "memory": (
        *(_recompute(1), _shard(1), _offload(1), _micro_batch(0.5)),
        *(_split(2), _split(0.5), _give_layers, _take_gpus, _change),
        *(_change_mesh, _reorder),
    ),
    "host": (_offload(-1), _shard(1), _give_layers, _change),
}
