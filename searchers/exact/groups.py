"""Groups of pipelines with equal degrees and numbers of micro-batches, and lower bounds of their
iteration times from the least times of blocks alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from mistlab.core.arrays import Column, Floats, Ints
from mistlab.graph.library import graph_of
from mistlab.job.search import Problem
from mistlab.plan.dimensions import DIMENSIONS, names_of
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, TURNING, chunks_of, order_problem
from mistlab.schedule.placement import Placement
from mistlab.stages.plan_orders import moments_in
from mistlab.stages.stage_batch import StageBatch, StagesInOrder
from searchers.meshes import Mesh, Pipeline, allows, equal_stages, meshes, micro_batch_counts
from searchers.strategy import Ledger


def with_ends(batch: StageBatch, placement: Placement) -> StageBatch:
    """Mark which stages have the embedding and the head, for a given placement of the model's
    parts.
    """
    each = len(batch) // placement.num_stages
    stage = np.arange(len(batch)) // each
    return batch.with_columns(
        has_embedding=(stage == placement.first_stage).astype(np.int64),
        has_head=(stage == placement.last_stage).astype(np.int64),
    )


# The least time that a stage takes for one micro-batch, whatever its memory-saving strategy.
#
# It is the time of a stage that recomputes, shards and offloads nothing, since these never make a
# stage faster. The stage has the embedding and the head, so it sends nothing: sends slow the passes
# that overlap with them, more so in stages of few blocks. Dimensions that change the passes
# themselves are tried with every value, since some values may make computation faster.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The least seconds of one micro-batch on a mesh of GPUs, for a transformer block, and for
    embedding and head together.

    If kinds of blocks alternate, ``turns_s`` has the least seconds of each of the model's blocks,
    and ``block_s`` is their mean; otherwise ``turns_s`` is None.
    """

    block_s: float
    ends_s: float
    turns_s: tuple[float, ...] = ()

    @property
    def shortest_s(self) -> float:
        """The least seconds of a micro-batch in the cheapest transformer block."""
        return min(self.turns_s, default=self.block_s)

    def blocks_within(self, seconds: float, layers: int) -> int:
        """The largest number of blocks, up to ``layers``, with which a stage takes less than
        ``seconds`` for a micro-batch.
        """
        if self.turns_s:
            shortest_s = np.cumsum(np.sort(self.turns_s)[:layers])
            return int(np.searchsorted(shortest_s, seconds))
        if layers * self.block_s < seconds:
            return layers
        if self.block_s == math.inf:
            return 0
        return max(0, math.ceil(seconds / self.block_s) - 1)


def work_of(
    problem: Problem, space: SearchSpace, ledger: Ledger, meshes: Sequence[Mesh]
) -> dict[Mesh, LeastWork]:
    """For each mesh of GPUs, the least times of its blocks, embedding and head on the fastest
    nodes, from the times of stages with one and with two blocks.
    """
    turns = _turns(problem)
    of_groups = []
    for ranks in problem.cluster.ranks_of_groups:
        each = {
            first_block: _work_from(ranks.start, first_block, space, ledger, meshes)
            for first_block in dict.fromkeys(turns)
        }
        of_groups.append(_mean_work([each[first_block] for first_block in turns], problem))
    return {
        mesh: LeastWork(
            block_s=min(of_group[mesh].block_s for of_group in of_groups),
            ends_s=min(of_group[mesh].ends_s for of_group in of_groups),
            turns_s=tuple(
                map(min, zip(*(of_group[mesh].turns_s for of_group in of_groups), strict=True))
            ),
        )
        for mesh in meshes
    }


def _turns(problem: Problem) -> list[int]:
    """For each block of the repeating pattern of block kinds, the earliest block of the pattern
    that has the same kind and a next block of the same kind, so that both pairs cost the same.
    """
    pattern = graph_of(problem.workload).pattern
    pairs = list(zip(pattern, (*pattern[1:], pattern[0]), strict=True))
    return [pairs.index(pair) for pair in pairs]


def _mean_work(
    of_turns: Sequence[dict[Mesh, LeastWork]], problem: Problem
) -> dict[Mesh, LeastWork]:
    """The least time of an average block of the model, from the times of the blocks in its
    repeating pattern. Multiplied by the number of blocks, it is a lower bound of the time of all
    blocks in stages on one mesh.
    """
    turns, layers = len(of_turns), problem.workload.model.layers
    work = {}
    for mesh, work_of_mesh in of_turns[0].items():
        if turns == 1:
            work[mesh] = replace(work_of_mesh, ends_s=max(0.0, work_of_mesh.ends_s))
            continue
        block_s = np.array([of_turn[mesh].block_s for of_turn in of_turns])
        one_s = np.array([of_turn[mesh].ends_s for of_turn in of_turns]) + block_s
        # The time of a stage of two blocks, less that of a stage with the first block only, is the
        # time of the second block.
        before_s = np.roll(block_s, 1)
        each_s = before_s[np.arange(layers) % turns]
        work[mesh] = LeastWork(
            block_s=float(each_s.mean()),
            ends_s=max(0.0, float((one_s - before_s).min())),
            turns_s=tuple(each_s.tolist()),
        )
    return work


def _work_from(
    first_rank: int, first_block: int, space: SearchSpace, ledger: Ledger, meshes: Sequence[Mesh]
) -> dict[Mesh, LeastWork]:
    """The least time on each mesh of the block after ``first_block``, on the nodes that begin at
    rank ``first_rank``.
    """
    names = [name for name in names_of("savings") if DIMENSIONS[name].changes_passes]
    ways = [
        dict(zip(names, values, strict=True))
        for values in product(*(space.listed(name) or () for name in names))
    ]
    layers = np.repeat([1, 2], len(meshes))
    columns = {name: np.tile([mesh.value(name) for mesh in meshes], 2) for name in names_of("mesh")}
    batches = [
        StageBatch(
            layers=layers,
            **columns,
            **way,
            has_embedding=1,
            has_head=1,
            first_rank=first_rank,
            first_block=first_block,
        )
        for way in ways
    ]
    costs = ledger.stage_costs(StageBatch.joined(batches), engine=space.engine)
    # Host time is left out: where the host runs ahead of the GPU, a micro-batch takes only as long
    # as the GPU computes.
    both_s = costs.seconds.forward_s + costs.seconds.backward_s
    stable_s = both_s.reshape(len(ways), -1).min(axis=0)
    one_s, two_s = stable_s.reshape(2, -1)
    block_s = two_s - one_s
    return {
        mesh: LeastWork(block_s=float(block), ends_s=float(ends))
        for mesh, block, ends in zip(meshes, block_s, one_s - block_s, strict=True)
    }


# Divides the pipelines of a search space into groups that are searched separately.


# Stands for an impossible number of blocks: so negative that its sum with the blocks of other
# stages is negative too.
NONE = -(1 << 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All pipelines with a given number of micro-batches whose stages each use one of the given
    meshes of GPUs.

    ``num_stages`` is None if meshes have different sizes, so that pipelines may have any number of
    stages. ``order`` is the pipeline schedule.
    """

    micro_batches: int
    meshes: tuple[Mesh, ...]
    num_stages: int | None
    order: str = DEFAULT_ORDER

    def equal_pipelines(self, problem: Problem) -> Iterator[Pipeline]:
        """The pipelines of the group in which all stages have the same mesh."""
        for mesh in self.meshes:
            num_stages = equal_stages(mesh, problem)
            if num_stages and self._allows(num_stages):
                yield Pipeline(micro_batches=self.micro_batches, meshes=(mesh,) * num_stages)

    def _allows(self, num_stages: int) -> bool:
        return self.num_stages in (None, num_stages)

    @property
    def has_unequal_sizes(self) -> bool:
        """Whether stages of the group's pipelines may have different numbers of GPUs."""
        return len({mesh.num_gpus for mesh in self.meshes}) > 1

    @property
    def has_formula(self) -> bool:
        """Whether the iteration time of these pipelines has a closed form, as it has for schedule
        1F1B.
        """
        return self.order == DEFAULT_ORDER

    @property
    def fewest_blocks(self) -> int:
        """The fewest blocks that a stage may have: one for each of its chunks (parts of the
        model).
        """
        return chunks_of(self.order)

    @property
    def turns(self) -> bool:
        """Whether the first stage has both the embedding and the head, since the model's chunks go
        through the stages forth and back, in a V.
        """
        return self.order in TURNING

    def held(self, after: int) -> int:
        """The number of micro-batches whose activations a stage with ``after`` stages behind it
        holds at least, in all of its chunks together.
        """
        if self.has_formula:
            return min(self.micro_batches, after + 1)
        if self.num_stages is None:
            return 1
        moments = moments_in(self.order, self.num_stages, self.micro_batches)
        return moments[self.num_stages - 1 - after].least_held

    def number(self, after: int) -> int:
        """The number of the stage that has ``after`` stages behind it; 0 under schedules in which a
        stage's cost does not depend on its number.
        """
        return 0 if self.has_formula or self.num_stages is None else self.num_stages - 1 - after

    def in_order(self, stage: Ints) -> StagesInOrder | None:
        """Stages with these numbers, in the form that the predictor takes for schedules other than
        1F1B; None under schedules in which a stage's cost does not depend on its number.
        """
        if self.has_formula or self.num_stages is None:
            return None
        return StagesInOrder(
            order=self.order,
            num_stages=self.num_stages,
            micro_batches=self.micro_batches,
            stage=stage,
        )

    def least_s(self, problem: Problem, work: Mapping[Mesh, LeastWork]) -> float:
        """A lower bound in seconds of the iteration times of all pipelines of the group, from the
        least times of blocks.

        The slowest stage takes at least an even share of the work, for each micro-batch. To this
        the time of the stages after it is added, except the part that the slowest stage can
        overlap: at most half the passes of the micro-batches that it runs ahead (their forwards or
        their backwards). The bound is never below the slowest stage's time for all micro-batches.
        """
        layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
        ends_s = min(work[mesh].ends_s * mesh.num_gpus for mesh in self.meshes)
        slowest_s = (self.least_gpu_s(work, layers) + ends_s) / gpus
        stages = self.num_stages or min(layers, gpus)
        ahead = min(self.micro_batches, stages) - 1
        through_s = self.least_stages_s(work, layers) + ends_s / self.largest
        hidden_s = min(through_s, (1 + ahead / 2) * slowest_s)
        return self.micro_batches * slowest_s + through_s - hidden_s

    def least_of_orders_s(
        self, problem: Problem, work: Mapping[Mesh, LeastWork], space: SearchSpace
    ) -> float:
        """A lower bound in seconds of the iteration times of the group's pipelines under any
        schedule that the space allows, from the least times of blocks.
        """
        if space.orders == (DEFAULT_ORDER,) and self.has_formula:
            return self.least_s(problem, work)
        return self.least_in_any_order_s(problem, work)

    def least_in_any_order_s(self, problem: Problem, work: Mapping[Mesh, LeastWork]) -> float:
        """A lower bound in seconds of the iteration times of the group's pipelines under any
        schedule at all: the slowest stage computes at least an even share of the blocks for each
        micro-batch.
        """
        layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
        ends_s = min(work[mesh].ends_s * mesh.num_gpus for mesh in self.meshes)
        return self.micro_batches * (self.least_gpu_s(work, layers) + ends_s) / gpus

    def least_gpu_s(self, work: Mapping[Mesh, LeastWork], layers: int) -> float:
        """The least GPU-seconds that one micro-batch takes in any ``layers`` blocks of the
        model.
        """
        each_s = self._turns_gpu_s(work)
        if each_s is not None:
            return float(np.sort(each_s)[:layers].sum())
        return float(_of_blocks(layers, self._block_gpu_s(work)))

    def front_gpu_s(self, work: Mapping[Mesh, LeastWork], layers: int) -> Floats:
        """The least GPU-seconds of one micro-batch in the model's first n blocks, for n = 0, 1, 2,
        ...
        """
        each_s = self._turns_gpu_s(work)
        if each_s is not None:
            return np.concatenate([[0.0], np.cumsum(each_s)])
        return _of_blocks(np.arange(layers + 1), self._block_gpu_s(work))

    def other_stages_s(
        self, work: Mapping[Mesh, LeastWork], first: Column | int, count: Column | int, layers: int
    ) -> Column:
        """The least seconds of one micro-batch in all stages but one, if that stage has ``count``
        blocks from block ``first`` on.
        """
        if self._turns_gpu_s(work) is None:
            return _of_blocks(layers - np.asarray(count), self.least_stages_s(work, 1))
        front_s = self.front_gpu_s(work, layers)
        if front_s[-1] == np.inf:
            # A block does not fit in memory on any mesh, so there are no such stages.
            return np.full(np.broadcast(first, count).shape, np.inf)
        own_s = front_s[np.asarray(first) + count] - front_s[first]
        return np.asarray((front_s[-1] - own_s) / self.largest)

    def _block_gpu_s(self, work: Mapping[Mesh, LeastWork]) -> float:
        """The least GPU-seconds of one micro-batch in a block, for models whose blocks are all
        equal.
        """
        return min(work[mesh].block_s * mesh.num_gpus for mesh in self.meshes)

    def _turns_gpu_s(self, work: Mapping[Mesh, LeastWork]) -> Floats | None:
        """The least GPU-seconds of one micro-batch in each block of the model; None if all blocks
        are equal.
        """
        if not work[self.meshes[0]].turns_s:
            return None
        each_s = [np.array(work[mesh].turns_s) * mesh.num_gpus for mesh in self.meshes]
        return np.asarray(np.min(each_s, axis=0))

    def least_stages_s(self, work: Mapping[Mesh, LeastWork], layers: int) -> float:
        """The least seconds of one micro-batch in stages that together have ``layers`` blocks."""
        return self.least_gpu_s(work, layers) / self.largest

    def most_blocks(
        self, problem: Problem, work: Mapping[Mesh, LeastWork], each_s: float
    ) -> list[int]:
        """The most blocks that stages on n GPUs can have together, for n = 0, 1, 2, ..., if each
        stage takes less than ``each_s`` for a micro-batch; negative where no meshes add up to
        exactly n GPUs.
        """
        layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
        of_size: dict[int, int] = {}
        for mesh in self.meshes:
            most = work[mesh].blocks_within(each_s, layers)
            if most:
                of_size[mesh.num_gpus] = max(most, of_size.get(mesh.num_gpus, 0))
        return _most_blocks(tuple(of_size.items()), gpus)

    @property
    def largest(self) -> int:
        """The number of GPUs of the largest mesh that stages of these pipelines may have."""
        return max(mesh.num_gpus for mesh in self.meshes)


def _of_blocks(layers: Column | int, each_s: float) -> Floats:
    """The seconds of a micro-batch in these numbers of blocks; zero for no blocks, even if a single
    block would not fit in memory.
    """
    layers = np.asarray(layers)
    return np.multiply(layers, each_s, out=np.zeros(layers.shape), where=layers != 0)


# Cached: every stage asks for the same result, which takes long to compute for thousands of GPUs.
@lru_cache(maxsize=16)
def _most_blocks(of_size: tuple[tuple[int, int], ...], gpus: int) -> list[int]:
    """The most blocks that stages on n GPUs can have together, for n = 0, 1, 2, ..., given the most
    that one stage on each number of GPUs can have.
    """
    most = [0]
    for number in range(1, gpus + 1):
        ways = [own + most[number - size] for size, own in of_size if size <= number]
        most.append(max(ways, default=NONE))
    return most


def groups_of(
    problem: Problem, space: SearchSpace, *, equal_sizes: bool = False
) -> Iterator[Group]:
    """The groups of all pipelines of a search space; with ``equal_sizes``, only of pipelines whose
    stages have equally many GPUs.
    """
    for micro_batches in micro_batch_counts(problem, space):
        choices = meshes(problem, space, micro_batches)
        if space.unequal_meshes and not equal_sizes:
            together = [(tuple(choices), count) for count in _stage_counts(problem, space)]
        else:
            together = [
                (alike, problem.cluster.num_gpus // size)
                for size in sorted(
                    {mesh.num_gpus for mesh in choices if equal_stages(mesh, problem)}
                )
                for alike in _alike(space, [mesh for mesh in choices if mesh.num_gpus == size])
            ]
        for alike, count in together:
            group = Group(micro_batches=micro_batches, meshes=alike, num_stages=count)
            if alike and (count is None or _is_pipeline(problem, space, alike, count)):
                yield group


def groups_in_orders(problem: Problem, space: SearchSpace) -> Iterator[Group]:
    """The groups of pipelines for each schedule of a search space other than 1F1B. All pipelines of
    such a group have the same number of stages, since a stage's memory for activations depends on
    it.
    """
    orders = [order for order in space.orders if order != DEFAULT_ORDER]
    for group in groups_of(problem, space):
        for order in orders:
            for num_stages in _stages_in_order(problem, group, order):
                yield replace(group, order=order, num_stages=num_stages)


def _stages_in_order(problem: Problem, group: Group, order: str) -> Iterator[int]:
    """The numbers of stages with which the pipelines of a group can run a pipeline schedule."""
    layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
    smallest = min(mesh.num_gpus for mesh in group.meshes)
    most = min(layers // chunks_of(order), gpus // smallest)
    counts = range(2, most + 1) if group.num_stages is None else (group.num_stages,)
    for count in counts:
        if count > 1 and not order_problem(order, count, group.micro_batches, layers // count):
            yield count


def _alike(space: SearchSpace, choices: list[Mesh]) -> list[tuple[Mesh, ...]]:
    """The sets of meshes that the stages of one pipeline may use: a set of one mesh each, unless
    stages may differ.
    """
    return [tuple(choices)] if space.unequal_meshes else [(mesh,) for mesh in choices]


def _is_pipeline(
    problem: Problem, space: SearchSpace, choices: tuple[Mesh, ...], num_stages: int
) -> bool:
    sizes = [mesh.num_gpus for mesh in choices]
    gpus = problem.cluster.num_gpus
    return (
        allows(space.pipeline, num_stages)
        and num_stages <= problem.workload.model.layers
        and min(sizes) * num_stages <= gpus <= max(sizes) * num_stages
    )


def _stage_counts(problem: Problem, space: SearchSpace) -> list[int | None]:
    """The numbers of stages that pipelines may have; None if any number is allowed."""
    if space.layers_off_balance is None and space.pipeline is None:
        return [None]
    return list(range(1, problem.cluster.num_gpus + 1))
