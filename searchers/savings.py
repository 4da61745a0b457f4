"""How the stages of a search space may save memory: lists of memory-saving strategies, tests
whether a plan belongs to the space, random plans, and the reason why a space is empty.

Axes: W ways to save memory, B ways to treat blocks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from mistlab.core.units import GIB_BYTES
from mistlab.job.search import Problem
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, counts_within, label_of, names_of
from mistlab.plan.named_spaces import SPACES
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from searchers.meshes import (
    Mesh,
    Pipeline,
    allows,
    equal_pipelines,
    equal_stages,
    even_layers,
    layer_counts,
    lies_well,
    mesh_of,
    meshes,
    micro_batch_counts,
    orders_of,
    other_names,
    pipelines,
)

# The memory-saving strategies of a stage: all combinations of the values that a search space
# allows.
#
# Axes of arrays: W strategies, B ways to keep fewer activations of a block (such as recomputation).


# A memory-saving strategy: a value for each dimension of ``names_of("savings")`` (ZeRO level and
# offload ratios).
SavingsRow = tuple[float, ...]
# In how many blocks a stage uses each way to keep fewer activations: a number for each of
# ``counts_of_blocks()`` (recomputed blocks, lean blocks, ...).
CountsRow = tuple[int, ...]
# A function that selects some of the allowed values of a dimension.
Thinner = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """A memory-saving strategy that all stages of a pipeline share: a value for each dimension of
    ``names_of("savings")``, and in how many blocks the largest stage uses each way to keep fewer
    activations, such as recomputation.
    """

    savings: SavingsRow
    counts: CountsRow

    def counts_within(self, layers: int) -> CountsRow:
        """In how many of ``layers`` blocks a stage uses each way to keep fewer activations, such as
        recomputation, under this strategy.
        """
        counts = dict(zip(counts_of_blocks(), self.counts, strict=True))
        return tuple(counts_within(counts, layers).values())


def way_of(plan: Plan) -> Way:
    """The memory-saving strategy of a plan in which all stages save memory in the same way."""
    largest = max(plan.stages, key=lambda stage: stage.layers)
    return Way(
        savings=tuple(largest.value(name) for name in names_of("savings")),
        counts=tuple(largest.counts.values()),
    )


def ways_alike(space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool) -> Iterator[Way]:
    """Every memory-saving strategy that all stages of a pipeline may share, if their meshes are
    equal and the largest stage has ``layers`` blocks.
    """
    for savings in product(*savings_choices(space, mesh, in_pipeline=in_pipeline)):
        for counts in counts_choices(space, layers):
            yield Way(savings=savings, counts=counts)


def savings_choices(
    space: SearchSpace, mesh: Mesh, *, in_pipeline: bool
) -> tuple[tuple[float, ...], ...]:
    """For each dimension of ``names_of("savings")``, the values that a stage may have."""
    return tuple(
        space.choices(name, layers=1, degree=mesh.value, in_pipeline=in_pipeline)
        for name in names_of("savings")
    )


def counts_choices(space: SearchSpace, layers: int, thinner: Thinner = tuple) -> list[CountsRow]:
    """In how many blocks a stage may use each way to keep fewer activations, such as recomputation,
    at most ``layers`` in all; one combination per row. ``thinner`` leaves out some of the numbers.
    """
    choices = (thinner(_counts_of(space, name, layers)) for name in counts_of_blocks())
    every = (tuple(map(int, counts)) for counts in product(*choices))
    return [counts for counts in every if sum(counts) <= layers]


def ways_to_save(
    space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool
) -> Iterator[StagePlan]:
    """Every stage with these blocks and this mesh, one for each memory-saving strategy."""
    names = saving_names()
    choices = (
        sorted({*space.choices(name, layers=layers, degree=mesh.value, in_pipeline=in_pipeline)})
        for name in names
    )
    for values in product(*choices):
        stage = dict(zip(names, values, strict=True))
        if sum(stage[name] for name in counts_of_blocks()) <= layers:
            yield stage_of(mesh, layers, stage)


def number_of_ways(space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool) -> int:
    """The number of memory-saving strategies for a stage with these blocks and this mesh."""
    ways = len({*counts_choices(space, layers)})
    for choices in savings_choices(space, mesh, in_pipeline=in_pipeline):
        ways *= len(choices)
    return ways


def saving_names() -> tuple[str, ...]:
    """The names of the dimensions that save memory, in the order of ``DIMENSIONS``."""
    return tuple(name for name in DIMENSIONS if name in (*names_of("savings"), *counts_of_blocks()))


def stage_of(mesh: Mesh, layers: int, saving: Mapping[str, float]) -> StagePlan:
    """A stage with these values of the dimensions that save memory; all other dimensions have their
    defaults.
    """
    return StagePlan.of_values({"layers": layers, **mesh.values(), **saving})


def bare_stage(mesh: Mesh, layers: int, space: SearchSpace) -> StagePlan:
    """A stage that saves as little memory as the search space allows."""
    least = {name: min(space.listed(name) or (0,)) for name in names_of("savings")}
    counts = {name: int(min(_counts_of(space, name, layers))) for name in counts_of_blocks()}
    return stage_of(mesh, layers, {**least, **counts})


def alike(largest: StagePlan, layers: int) -> StagePlan:
    """A stage of ``layers`` blocks that saves memory in the same way as the stage ``largest``,
    which has at least as many blocks.
    """
    return largest.with_values({"layers": layers, **counts_within(largest.counts, layers)})


def _counts_of(space: SearchSpace, name: str, layers: int) -> tuple[float, ...]:
    return space.choices(name, layers=layers, degree=_one, in_pipeline=False)


def _one(_: str) -> int:
    return 1


# Detects a search space with more memory-saving strategies than this machine's memory can list at
# once.
#
# An exhaustive search lists, for each stage, every combination of the space's ratios and levels.
# Ratios in steps of a thousandth instead of an eighth, for four kinds of state, take 250 million
# times the memory.


# The peak memory in bytes that listing one strategy takes, including the columns of its costs and
# times. Measured with llama-350m on two L4 and the searcher exact: 700 MiB for 331,776 strategies
# (ratios in 23rds), and 655 MiB for 320,000 strategies that all stages share (ratios in 19ths, no
# or all blocks recomputed).
WAY_BYTES = 2200


def ways_listed(space: SearchSpace) -> int:
    """How many memory-saving strategies a stage has, with its number of recomputed blocks left out
    of the count.
    """
    return prod(len(space.listed(name) or ()) for name in names_of("savings"))


def too_many_ways(problem: Problem, space: SearchSpace, room_bytes: int | None = None) -> str:
    """A message that says why the memory-saving strategies of a search space cannot all be listed
    in ``room_bytes`` of memory (by default the free memory of this machine); empty if they can.
    """
    ways = ways_listed(space)
    if not space.unequal_stages:
        ways *= len(counts_choices(space, problem.workload.model.layers))
    needed = ways * WAY_BYTES
    room = free_bytes() if room_bytes is None else room_bytes
    if needed <= room:
        return ""
    return (
        f"space {space.name} has {ways:,} ways to save memory on a stage: to list them takes about "
        f"{needed / GIB_BYTES:,.1f} GiB, and {room / GIB_BYTES:,.1f} GiB are free: give coarser "
        "ratios, or searcher mist, which goes from coarse to fine"
    )


def free_bytes() -> int:
    """The free memory of this machine in bytes; if the system does not report it, all of its
    memory.
    """
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024


# Tells whether a plan belongs to a search space.


def contains(problem: Problem, space: SearchSpace, plan: Plan) -> bool:
    """Whether the search space allows the plan for this problem."""
    return any(plan in Members(problem=problem, space=own) for own in space.of_engines)


@dataclass(slots=True, kw_only=True)
class Members:
    """The plans that a search space allows for one engine, with fast membership tests for many
    plans.
    """

    problem: Problem
    space: SearchSpace
    _meshes: dict[int, frozenset[Mesh]] = field(default_factory=dict, init=False)
    _savings: dict[tuple[int, Mesh, bool], Mapping[str, frozenset[float]]] = field(
        default_factory=dict, init=False
    )

    def __contains__(self, plan: Plan) -> bool:
        meshes_of = [mesh_of(stage) for stage in plan.stages]
        return (
            plan.engine == self.space.engine
            and plan.overlap_communication
            and self._allows_order(plan)
            and self._allows_meshes(plan, meshes_of)
            and self._allows_layers([stage.layers for stage in plan.stages])
            and all(
                self._allows_savings(stage, mesh, plan.num_stages > 1)
                for stage, mesh in zip(plan.stages, meshes_of, strict=True)
            )
            and (self.space.unequal_stages or _is_alike(plan))
        )

    def _allows_order(self, plan: Plan) -> bool:
        layers = min(stage.layers for stage in plan.stages)
        return plan.order in orders_of(self.space, plan.num_stages, plan.micro_batches, layers)

    def _allows_meshes(self, plan: Plan, chosen: Sequence[Mesh]) -> bool:
        space, cluster = self.space, self.problem.cluster
        first_rank = 0
        for mesh in chosen:
            if not lies_well(first_rank, mesh.num_gpus, cluster):
                return False
            first_rank += mesh.num_gpus
        return (
            first_rank == cluster.num_gpus
            and allows(space.pipeline, plan.num_stages)
            and (space.unequal_meshes or len(set(chosen)) == 1)
            and self._meshes_for(plan.micro_batches).issuperset(chosen)
        )

    def _meshes_for(self, micro_batches: int) -> frozenset[Mesh]:
        if micro_batches not in self._meshes:
            allowed = micro_batches in micro_batch_counts(self.problem, self.space)
            possible = meshes(self.problem, self.space, micro_batches) if allowed else ()
            self._meshes[micro_batches] = frozenset(possible)
        return self._meshes[micro_batches]

    def _allows_layers(self, chosen: list[int]) -> bool:
        layers = self.problem.workload.model.layers
        if sum(chosen) != layers:
            return False
        if self.space.layers_off_balance == 0:
            return tuple(chosen) == even_layers(layers, len(chosen))
        counts = layer_counts(layers, len(chosen), self.space)
        return all(count in counts for count in chosen)

    def _allows_savings(self, stage: StagePlan, mesh: Mesh, in_pipeline: bool) -> bool:
        allowed = self._savings_for(stage.layers, mesh, in_pipeline)
        return all(stage.value(name) in choices for name, choices in allowed.items())

    def _savings_for(
        self, layers: int, mesh: Mesh, in_pipeline: bool
    ) -> Mapping[str, frozenset[float]]:
        key = layers, mesh, in_pipeline
        if key not in self._savings:
            self._savings[key] = {
                name: frozenset(
                    self.space.choices(
                        name, layers=layers, degree=mesh.value, in_pipeline=in_pipeline
                    )
                )
                for name in saving_names()
            }
        return self._savings[key]


def _is_alike(plan: Plan) -> bool:
    largest = max(plan.stages, key=lambda stage: stage.layers)
    return all(stage == alike(largest, stage.layers) for stage in plan.stages)


# Explains why a search space has no plan for a problem, by trying changes that would give it one.
#
# Memory is not considered: a space whose plans do not fit in memory is not empty.


# Fields of a search space in which None allows every number that divides evenly.
OPEN = tuple(entry.name for entry in fields(SearchSpace) if entry.default is None)
# Factors by which the global batch is multiplied, one after another, to see whether the space would
# have plans then, if it has none for the next multiple of the GPUs.
MULTIPLES = (2, 3, 4, 5, 6, 7, 8)
# How many values of a list a message shows at most.
SHOWN = 6


def why_empty(problem: Problem, space: SearchSpace) -> str:
    """A message that says why the search space has no plan for the problem, and which single
    changes would give it one; empty if it has plans.

    >>> from searchers.savings import _listed
    >>> _listed((1, 2, 4, 8, 16, 32, 64))
    '1, 2, 4, 8, 16, 32, ...'
    """
    reasons = [_why_empty(problem, own) for own in space.of_engines]
    return reasons[0] if all(reasons) else ""


def _why_empty(problem: Problem, space: SearchSpace) -> str:
    if not _has_pipeline(problem, space):
        begin = (
            f"space {space.name} has no plan on {problem.cluster.num_gpus} GPUs for a global batch "
            f"of {problem.workload.global_batch}"
        )
        helps = [
            change
            for change, other_problem, other_space in _changes(problem, space)
            if _has_pipeline(other_problem, other_space)
        ]
        if helps:
            return f"{begin}: there is one {'; or '.join(helps)}"
        if problem.cluster.others and space.pipeline == (1,):
            return (
                f"{begin}: it has no pipelines, and a stage has GPUs of one kind: give one "
                "hardware name, or a space with pipelines, such as mist"
            )
        return f"{begin}, and no single change that was tried gives one"
    layers = problem.workload.model.layers
    if not any(counts_choices(space, own) for own in range(1, layers + 1)):
        lists = {name: listed for name in counts_of_blocks() if (listed := space.listed(name))}
        name = next(name for name, listed in lists.items() if 0 not in listed)
        return (
            f"space {space.name} lets no stage treat its blocks: recomputation "
            f"{space.recomputation} and {name} {_listed(lists[name])} leave no numbers that add up "
            f"to a stage's blocks: list 0 in {name}, or give recomputation any"
        )
    return ""


def _has_pipeline(problem: Problem, space: SearchSpace) -> bool:
    """Whether the search space has any pipeline; equal meshes are tried first, since they are found
    fastest.
    """
    candidates = chain(equal_pipelines(problem, space), pipelines(problem, space))
    return next(candidates, None) is not None


def _changes(problem: Problem, space: SearchSpace) -> Iterator[tuple[str, Problem, SearchSpace]]:
    """Single changes of the search space or of the problem that may give it a plan, each with its
    description.
    """
    for name in OPEN:
        listed = getattr(space, name)
        # A named space without pipelines is of programs that have none, and no other degree either
        # of which it lists 1 alone.
        is_rule = listed == (1,) and _lists_one_stage(space.name)
        # Nor have programs more that cannot divide frozen weights of few bits.
        opened = _with(space, name, None).holding(problem.workload.base)
        if listed is not None and not is_rule and opened != space:
            change = f"with another {name} than {_listed(listed)}"
            yield change, problem, opened
    for name in other_names():
        default = DIMENSIONS[name].default
        listed = space.listed(name) or ()
        if default not in listed:
            change = f"with {name} {default}, which is not among {_listed(listed)}"
            yield change, problem, _with(space, name, (default,))
    if space.tensor_parallel_in_node:
        change = "with tensor_parallel_in_node false"
        yield change, problem, replace(space, tensor_parallel_in_node=False)
    work, cluster = problem.workload, problem.cluster
    rounded_up = -(-work.global_batch // cluster.num_gpus) * cluster.num_gpus
    for batch in (rounded_up, *(times * work.global_batch for times in MULTIPLES)):
        other = replace(problem, workload=replace(work, global_batch=batch))
        if _has_pipeline(other, space):
            yield f"for a global batch of {batch}", other, space
            break
    for gpus in range(cluster.gpus_per_node - 1, 0, -1):
        other = replace(problem, cluster=replace(cluster, gpus_per_node=gpus))
        if _has_pipeline(other, space):
            yield f"on {gpus} GPUs of each node", other, space
            break


def _lists_one_stage(name: str) -> bool:
    return name in SPACES and SPACES[name].pipeline == (1,)


def _with(space: SearchSpace, name: str, listed: tuple[Any, ...] | None) -> SearchSpace:
    other: dict[str, Any] = {name: listed}
    return replace(space, **other)


def _listed(numbers: tuple[float, ...]) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:SHOWN])
    return f"{shown}, ..." if len(numbers) > SHOWN else shown


# Makes a plan from a sequence of named choices, for strategies that sample plans.
#
# ``chosen_plan`` asks for each choice by its name, and offers only options that leave a valid plan.
# A random generator, an Optuna trial or a policy chooses.


Option = TypeVar("Option")


class Chooser:
    """Makes the choices that determine a plan. ``index_of`` returns the index of the option to
    choose, given the name of a choice and its number of options.
    """

    def __init__(self, index_of: Callable[[str, int], int]) -> None:
        self._index_of = index_of

    def __call__(self, name: str, options: Sequence[Option]) -> Option:
        """The option that is chosen; ``index_of`` is not called if there is only one option."""
        return options[0] if len(options) == 1 else options[self._index_of(name, len(options))]


def chosen_plan(problem: Problem, space: SearchSpace, choose: Chooser) -> Plan | None:
    """The plan that the choices of a ``Chooser`` determine; None if they lead to no pipeline of the
    search space.
    """
    pipeline = _pipeline(problem, space, choose)
    if pipeline is None:
        return None
    layers = _layers(problem.workload.model.layers, pipeline.num_stages, space, choose)
    count = pipeline.num_stages
    if space.unequal_stages:
        both = enumerate(zip(pipeline.meshes, layers, strict=True))
        stages = [_stage(stage, mesh, own, count, space, choose) for stage, (mesh, own) in both]
    else:
        largest = _stage(0, pipeline.meshes[0], max(layers), count, space, choose)
        stages = [alike(largest, own) for own in layers]
    orders = orders_of(space, count, pipeline.micro_batches, min(layers))
    return Plan(
        engine=space.engine,
        micro_batches=pipeline.micro_batches,
        order=choose("order", orders),
        stages=tuple(stages),
    )


def _pipeline(problem: Problem, space: SearchSpace, choose: Chooser) -> Pipeline | None:
    micro_batches = choose("micro_batches", micro_batch_counts(problem, space))
    options = meshes(problem, space, micro_batches)
    chosen: list[Mesh] = []
    taken, gpus = 0, problem.cluster.num_gpus
    while taken < gpus:
        if chosen and not space.unequal_meshes:
            mesh = chosen[0]
        else:
            left = gpus - taken
            stages_left = problem.workload.model.layers - len(chosen)
            possible = [
                mesh
                for mesh in options
                if _leaves_a_plan(problem, space, mesh, taken, left, stages_left)
            ]
            if not possible:
                return None
            mesh = choose(f"mesh {len(chosen)}", possible)
        chosen.append(mesh)
        taken += mesh.num_gpus
    if space.pipeline is not None and len(chosen) not in space.pipeline:
        return None
    return Pipeline(micro_batches=micro_batches, meshes=tuple(chosen))


def _leaves_a_plan(
    problem: Problem, space: SearchSpace, mesh: Mesh, taken: int, left: int, stages_left: int
) -> bool:
    if not space.unequal_meshes:
        return equal_stages(mesh, problem) > 0
    if mesh.num_gpus > left or not lies_well(taken, mesh.num_gpus, problem.cluster):
        return False
    return mesh.num_gpus == left or stages_left > 1


def _layers(layers: int, num_stages: int, space: SearchSpace, choose: Chooser) -> tuple[int, ...]:
    if space.layers_off_balance == 0:
        return even_layers(layers, num_stages)
    counts = layer_counts(layers, num_stages, space)
    chosen: list[int] = []
    for stage in range(num_stages):
        left, after = layers - sum(chosen), num_stages - stage - 1
        possible = [
            count for count in counts if after * counts[0] <= left - count <= after * counts[-1]
        ]
        chosen.append(choose(f"layers {stage}", possible))
    return tuple(chosen)


def _stage(
    stage: int, mesh: Mesh, layers: int, num_stages: int, space: SearchSpace, choose: Chooser
) -> StagePlan:
    chosen: dict[str, float] = {}
    left, counts = layers, counts_of_blocks()
    for name in saving_names():
        choices = space.choices(name, layers=layers, degree=mesh.value, in_pipeline=num_stages > 1)
        if name in counts:
            choices = tuple(count for count in choices if count <= left)
        chosen[name] = choose(f"{label_of(name)} {stage}", choices)
        left -= int(chosen[name]) if name in counts else 0
    return stage_of(mesh, layers, chosen)
