"""The meshes of a search space: the parallel degrees and micro-batch sizes that a stage may have,
and its possible numbers of blocks, before memory savings are chosen.

A stage lies inside one node or fills whole nodes; ranks fill nodes in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt
from typing import Any, NamedTuple

from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimension import Setting, degree_problem
from mistlab.plan.dimensions import DIMENSIONS, names_of, num_gpus, ranks_of
from mistlab.plan.made_fields import Recomputation
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, order_problem
from mistlab.schedule.placement import even_shares


class Mesh(NamedTuple):
    """The mesh of one stage: its parallel degrees, and the micro-batch size of each data-parallel
    rank.

    ``others`` are values of the mesh's other dimensions, except default values.
    """

    data_parallel: int
    tensor_parallel: int
    micro_batch: int
    others: tuple[tuple[str, int], ...] = ()

    def value(self, name: str) -> int:
        """The mesh's value of a dimension, such as the tensor-parallel degree."""
        if name in _OWN:
            value: int = getattr(self, name)
            return value
        for other, number in self.others:
            if other == name:
                return number
        dimension = DIMENSIONS[name]
        assert dimension.part == "mesh"
        assert dimension.default is not None, "a field of each mesh"
        return int(dimension.default)

    def values(self) -> dict[str, int]:
        """The mesh's values of all its dimensions, by name."""
        named = {name: getattr(self, name) for name in _OWN}
        further = {name: DIMENSIONS[name].default for name in names_of("mesh") if name not in named}
        return {**named, **further, **dict(self.others)}

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of a stage with this mesh."""
        return _gpus(self)


_OWN = Mesh._fields[:-1]


@cache
def _gpus(mesh: Mesh) -> int:
    return num_gpus(mesh.value)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pipeline:
    """A pipeline before memory savings are chosen: the mesh (parallel degrees) of each stage, and
    the number of micro-batches.
    """

    micro_batches: int
    meshes: tuple[Mesh, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.meshes)

    def first_ranks(self) -> list[int]:
        """For each stage of the pipeline, the number of its first GPU (rank)."""
        ranks = [0]
        for mesh in self.meshes[:-1]:
            ranks.append(ranks[-1] + mesh.num_gpus)
        return ranks


def only(pipeline: Pipeline, space: SearchSpace) -> SearchSpace:
    """The part of a search space that has exactly this pipeline's meshes, which must all be
    equal.
    """
    mesh = pipeline.meshes[0]
    return replace(
        space.with_lists({name: (mesh.value(name),) for name in _OWN}),
        unequal_meshes=False,
        pipeline=(pipeline.num_stages,),
        micro_batches=(pipeline.micro_batches,),
    )


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def micro_batch_counts(problem: Problem, space: SearchSpace) -> list[int]:
    """The numbers of micro-batches in an optimizer step that a search space allows."""
    counts = divisors(problem.workload.global_batch)
    return [count for count in counts if allows(space.micro_batches, count)]


def meshes(problem: Problem, space: SearchSpace, micro_batches: int) -> list[Mesh]:
    """All meshes, on any number of GPUs, that a search space allows for a stage."""
    cluster = problem.cluster
    together, rest = divmod(problem.workload.global_batch, micro_batches)
    if rest:
        return []
    shares = [
        data
        for data in divisors(together)
        if allows(space.data_parallel, data)
        and allows(space.micro_batch, together // data)
        and not problem.workload.reduction.ranks_problem(data)
    ]
    return [
        mesh
        for tensor in _tensor_degrees(problem, space)
        for others in _other_degrees(space)
        # The condition that rejects most meshes and is cheapest to test comes first.
        for ranks in [Mesh(1, tensor, together, others).num_gpus]
        for data in shares
        if ranks * data <= cluster.num_gpus and _divides_nodes(ranks * data, cluster)
        for mesh in [Mesh(data, tensor, together // data, others)]
        if not others or (_has_effect(mesh) and _is_tried(problem, mesh, micro_batches))
    ]


def equal_pipelines(problem: Problem, space: SearchSpace) -> Iterator[Pipeline]:
    """All pipelines of the search space in which all stages have the same mesh."""
    for micro_batches in micro_batch_counts(problem, space):
        for mesh in meshes(problem, space, micro_batches):
            num_stages = equal_stages(mesh, problem)
            if num_stages and allows(space.pipeline, num_stages):
                yield Pipeline(micro_batches=micro_batches, meshes=(mesh,) * num_stages)


def equal_stages(mesh: Mesh, problem: Problem) -> int:
    """How many stages with this mesh use all GPUs of the cluster, each with at least one block. 0
    if no number of stages does, or if a stage would lie across nodes or across kinds of nodes.
    """
    cluster, gpus = problem.cluster, mesh.num_gpus
    num_stages, rest = divmod(cluster.num_gpus, gpus)
    lie_well = cluster.gpus_per_node % gpus == 0 or gpus % cluster.gpus_per_node == 0
    lie_well = lie_well and divides_groups(gpus, cluster)
    is_one = not rest and lie_well and num_stages <= problem.workload.model.layers
    return num_stages if is_one else 0


def pipelines(problem: Problem, space: SearchSpace) -> Iterator[Pipeline]:
    """All pipelines of the search space; there are very many if the meshes of stages may differ."""
    if not space.unequal_meshes:
        yield from equal_pipelines(problem, space)
        return
    for micro_batches in micro_batch_counts(problem, space):
        choices = meshes(problem, space, micro_batches)
        for chosen in _sequences(problem, choices, 0, problem.workload.model.layers, set()):
            if allows(space.pipeline, len(chosen)):
                yield Pipeline(micro_batches=micro_batches, meshes=chosen)


def orders_of(
    space: SearchSpace, num_stages: int, micro_batches: int, layers: int
) -> tuple[str, ...]:
    """The schedules of a search space that a pipeline can run, if its stages have at least
    ``layers`` blocks each. A pipeline of one stage has a single schedule, since its passes wait for
    no other stage.
    """
    if num_stages == 1:
        return (DEFAULT_ORDER,)
    can = [
        order
        for order in space.orders
        if not order_problem(order, num_stages, micro_batches, layers)
    ]
    return tuple(can) or (DEFAULT_ORDER,)


def allows(choices: tuple[int, ...] | None, value: int) -> bool:
    """Whether a list of allowed values includes a value; a list that is None includes all
    values.
    """
    return choices is None or value in choices


def lies_well(first_rank: int, num_gpus: int, cluster: Cluster) -> bool:
    """Whether a stage of ``num_gpus`` GPUs from ``first_rank`` on lies inside one node, or fills
    whole nodes of one kind.
    """
    gpus, place_in_node = cluster.gpus_per_node, first_rank % cluster.gpus_per_node
    if cluster.others and not cluster.in_one_group(first_rank, num_gpus):
        return False
    return place_in_node + num_gpus <= gpus or (place_in_node == 0 and num_gpus % gpus == 0)


def divides_groups(gpus: int, cluster: Cluster) -> bool:
    """Whether consecutive stages of ``num_gpus`` GPUs each lie on nodes of one kind."""
    return not any(one.start % gpus for one in cluster.ranks_of_groups)


def layer_counts(layers: int, num_stages: int, space: SearchSpace) -> range:
    """The numbers of blocks that a search space allows for a stage."""
    most = layers - num_stages + 1
    if space.layers_off_balance is None:
        return range(1, most + 1)
    share, off = layers // num_stages, space.layers_off_balance
    above = share + (layers % num_stages > 0) + off
    return range(max(1, share - off), min(most, above) + 1)


def even_layers(layers: int, num_stages: int) -> tuple[int, ...]:
    """Divides the model's blocks among stages as evenly as possible; the first stages get the
    remainder.
    """
    return even_shares(layers, num_stages)


def _sequences(
    problem: Problem,
    choices: Sequence[Mesh],
    first_rank: int,
    layers: int,
    dead_ends: set[tuple[int, int]],
) -> Iterator[tuple[Mesh, ...]]:
    """The possible sequences of meshes for all stages from rank ``first_rank`` on, each with at
    least one block. ``dead_ends`` caches the ranks and numbers of blocks from which there is none.
    """
    if first_rank == problem.cluster.num_gpus:
        yield ()
        return
    if layers == 0 or (first_rank, layers) in dead_ends:
        return
    is_dead = True
    for mesh in choices:
        after = first_rank + mesh.num_gpus
        if after <= problem.cluster.num_gpus and lies_well(
            first_rank, mesh.num_gpus, problem.cluster
        ):
            for others in _sequences(problem, choices, after, layers - 1, dead_ends):
                is_dead = False
                yield (mesh, *others)
    if is_dead:
        dead_ends.add((first_rank, layers))


def _tensor_degrees(problem: Problem, space: SearchSpace) -> list[int]:
    cluster = problem.cluster
    most = cluster.gpus_per_node if space.tensor_parallel_in_node else cluster.num_gpus
    degrees = range(1, most + 1) if space.tensor_parallel is None else space.tensor_parallel
    return [
        degree
        for degree in sorted(set(degrees))
        if degree <= most and not degree_problem(problem.workload.model, degree)
    ]


def mesh_of(stage: StagePlan) -> Mesh:
    """The mesh of a stage of a plan."""
    others = tuple(
        (name, value)
        for name in other_names()
        if (value := stage.degree(name)) != DIMENSIONS[name].default
    )
    return Mesh._make([*map(stage.degree, _OWN), others])


def other_names() -> list[str]:
    """The names of the mesh dimensions (such as sequence parallelism) that are not fields of
    ``Mesh``.
    """
    return [name for name in names_of("mesh") if name not in _OWN]


def _has_effect(mesh: Mesh) -> bool:
    """Whether each further dimension of the mesh, such as sequence parallelism, has an effect: the
    group of ranks that it concerns has more than one rank.
    """
    shared = (DIMENSIONS[name].shared_by for name, _ in mesh.others)
    return all(ranks_of(group, mesh.value) > 1 for group in shared if group)


def _is_tried(problem: Problem, mesh: Mesh, micro_batches: int) -> bool:
    """Whether ranks of the mesh can run its further dimensions, such as sequence parallelism, and
    whether a search should try this combination.
    """
    setting = Setting(
        degree=mesh.value,
        value=mesh.value,
        gpus=mesh.num_gpus,
        gpus_per_node=problem.cluster.gpus_per_node,
        workload=problem.workload,
        micro_batches=micro_batches,
    )
    rows = [DIMENSIONS[name] for name, _ in mesh.others]
    return all(row.is_tried is None or row.is_tried(setting) for row in rows) and not any(
        check(setting) for row in rows for check in row.checks.values()
    )


def _other_degrees(space: SearchSpace) -> list[tuple[tuple[str, int], ...]]:
    """All combinations of values for a mesh's further dimensions, such as sequence parallelism;
    default values are left out.
    """
    names = other_names()
    listed = (space.listed(name) or () for name in names)
    return [
        tuple(
            (name, int(value))
            for name, value in zip(names, values, strict=True)
            if value != DIMENSIONS[name].default
        )
        for values in product(*listed)
    ]


def _divides_nodes(gpus: int, cluster: Cluster) -> bool:
    return gpus <= cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0


# Chooses the parts of a large search space that are searched before all of it.
#
# A search of a large space starts with coarse choices in every dimension, so a budget may be spent
# before it has found the plan that a search of a smaller space finds at once. So smaller spaces are
# searched first: their plans belong to the large space, and prune much of the rest.


# Names of search spaces whose searches are fast, or soon prove their best plan.
FIRST = ("3d", "mist")
# The first of the spaces whose meshes have further choices, such as sequence parallelism. In its
# plans all stages save memory in the same way, so far fewer plans are evaluated than with different
# stages.
ALIKE = "moe"
# What a search space may allow for the number of recomputed blocks, from the fewest choices to the
# most.
_RECOMPUTED: tuple[Recomputation, ...] = ("all", "none_or_all", "any")


def parts_of(space: SearchSpace) -> Iterator[SearchSpace]:
    """The parts of a search space that are searched before the whole, smallest first; none if its
    stages have equal meshes, since the search of the whole is then fast.

    The last part combines a small space with all choices of the meshes' other dimensions, such as
    sequence parallelism. An earlier part has some of these choices with uniform stages, so that
    even a short budget covers them.
    """
    if not space.unequal_meshes:
        return
    # Every part gets the ZeRO level that the whole space gives a group of one rank: its lowest. The
    # level matters for such a rank if it offloads.
    lowest = min(space.zero)
    others_of_mesh = {name: space.lists[name] for name in other_names()}
    has_others = any(len(listed or ()) > 1 for listed in others_of_mesh.values())
    first, *others = FIRST
    smaller = [space_of(name) for name in (first, *[ALIKE] * has_others, *others)]
    spaces = [common(space, replace(one, zero=tuple({lowest, *one.zero}))) for one in smaller]
    last = spaces[-1]
    if last is not None:
        spaces.append(last.with_lists(others_of_mesh))
    earlier: list[SearchSpace] = []
    for part in spaces:
        if part is not None and replace(part, name="") not in earlier:
            earlier.append(replace(part, name=""))
            yield part


def as_in(plan: Plan, space: SearchSpace) -> Plan:
    """A plan found in a part of a search space, as a plan of the whole space. Choices without
    effect, such as the ZeRO level of a group of one rank, get the whole space's lowest value.
    """
    stages = []
    for stage in plan.stages:
        lowest = {
            name: min(space.listed(name) or (0,))
            for name in names_of("savings")
            if (group := DIMENSIONS[name].shared_by) and ranks_of(group, stage.degree) == 1
        }
        stages.append(stage.with_values(lowest) if lowest else stage)
    return replace(plan, stages=tuple(stages))


def common(space: SearchSpace, other: SearchSpace) -> SearchSpace | None:
    """The space of the plans that two search spaces have in common, the engine aside; None if they
    have none.
    """
    lists = {name: _both(listed, other.lists[name]) for name, listed in space.lists.items()}
    of_plans: dict[str, Any] = {
        name: _both(getattr(space, name), getattr(other, name)) for name in _OF_PLANS
    }
    if () in (*lists.values(), *of_plans.values()):
        return None
    off_balance = [
        one.layers_off_balance for one in (space, other) if one.layers_off_balance is not None
    ]
    flags: dict[str, Any] = {name: getattr(space, name) and getattr(other, name) for name in _FLAGS}
    return replace(
        space.with_lists(lists),
        **of_plans,
        recomputation=min(space.recomputation, other.recomputation, key=_RECOMPUTED.index),
        layers_off_balance=min(off_balance, default=None),
        **flags,
        tensor_parallel_in_node=space.tensor_parallel_in_node or other.tensor_parallel_in_node,
    )


def _both(
    listed: Sequence[float] | None, others: Sequence[float] | None
) -> tuple[float, ...] | None:
    """The values that are in both lists; None stands for a list of all values."""
    if listed is None or others is None:
        either = others if listed is None else listed
        return None if either is None else tuple(either)
    return tuple(value for value in listed if value in others)


# The fields of a search space that list the choices for whole plans.
_OF_PLANS = ("pipeline", "micro_batches", "orders")
# The fields of a search space that are true or false.
_FLAGS = ("unequal_stages", "unequal_meshes")
