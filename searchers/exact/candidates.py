"""Candidates for one pipeline stage as columns: the memory-saving strategies that no other strategy
dominates.

Axes: F candidates.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Column, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.cost.memory import host_room_at
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, names_of
from mistlab.plan.plan import StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import StageBatch, StageCosts, StageTimes
from searchers.exact.groups import Group, LeastWork
from searchers.meshes import Mesh
from searchers.savings import CountsRow, Way, counts_choices, savings_choices, stage_of
from searchers.strategy import Ledger

# The candidates for a stage as columns, one row for each: its memory-saving strategy and its times.
#
# Axes of arrays: F candidates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """Differences of time, and of host memory, below which two candidates count as equal;
    ``host_bytes`` is None if host memory does not matter.
    """

    steady_s: float = 0.0
    once_s: float = 0.0
    host_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options(ColumnSet):
    """Candidates for one stage that fit in the memory of their GPUs, one per row: their
    memory-saving strategies and their times.

    ``savings`` (F, 5) are the values of ``names_of("savings")``, ``counts`` (F, 1) the numbers of
    blocks of ``counts_of_blocks()``; ``host_bytes`` is the host memory of one rank.
    """

    savings: Column
    counts: Column
    times: StageTimes
    host_bytes: Column

    def __len__(self) -> int:
        return len(self.host_bytes)

    @property
    def stable_s(self) -> Column:
        """For each candidate, the seconds of a steady-state forward and backward pass of one
        micro-batch.
        """
        return self.times.forward_s + self.times.backward_s

    @property
    def once_s(self) -> Column:
        """For each candidate, the seconds that it adds once per iteration: its first and last
        micro-batch take longer than steady ones.
        """
        times = self.times
        within_s = times.within_forward_s + times.after_first_s + times.within_backward_s
        first_s = times.through_forward_s - times.forward_s
        return np.asarray(times.begin_s + first_s + within_s + times.end_s)

    def stage_plan(self, row: int, mesh: Mesh, layers: int) -> StagePlan:
        """The candidate at this index as a stage of a plan."""
        saving = {
            **dict(zip(names_of("savings"), self.savings[row].tolist(), strict=True)),
            **dict(zip(counts_of_blocks(), self.counts[row].tolist(), strict=True)),
        }
        return stage_of(mesh, layers, saving)


def fastest(options: Options, grain: Grain) -> Options:
    """The candidates that no other candidate dominates. One dominates another if none of its times
    is longer and, where host memory counts, it needs no more host memory.
    """
    times = options.times
    steady = (
        *(times.forward_s, times.backward_s),
        *_of_sends(times),
        *(times.through_forward_s, times.through_backward_s),
    )
    once = (
        *(times.begin_s, times.end_s, times.after_first_s),
        *(times.within_forward_s, times.within_backward_s),
    )
    columns = [
        *(_grains(column, grain.steady_s) for column in steady),
        *(_grains(one, grain.once_s) for one in (*once, *_of_hosts(times), *_of_left(times))),
    ]
    if grain.host_bytes is not None:
        columns.append(_grains(options.host_bytes, grain.host_bytes))
    return options.chosen(undominated(columns))


def compared_columns(options: Options, *, with_host: bool) -> list[Column]:
    """The columns in which a candidate must be no larger to dominate another: the latency of a
    micro-batch, the time of all passes, the last backward pass, first and last passes with
    overlapped work, host times, gradient reductions and sends.
    """
    times = options.times
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    columns = [
        *(times.through_forward_s, times.through_backward_s),
        *(times.forward_s, times.backward_s, times.backward_s + times.within_backward_s),
        *(first, last, first + times.begin_s, last + times.end_s, times.after_first_s),
        times.backward_s + times.within_backward_s + times.end_s,
        *_of_hosts(times),
        *_of_left(times),
        *_of_sends(times),
    ]
    return [*columns, options.host_bytes] if with_host else columns


def fastest_alone(options: Options, micro_batches: int, count: int) -> Options:
    """The ``count`` fastest candidates with distinct strategies for a stage that is the whole
    pipeline, so that only its iteration time counts.
    """
    issued_s = micro_batches * options.times.issued_s + options.times.issued_end_s
    seconds = np.maximum(micro_batches * options.stable_s + options.once_s, issued_s)
    in_order = np.argsort(seconds, kind="stable")
    first_of_each = np.unique(options.savings[in_order], axis=0, return_index=True)[1]
    return options.chosen(in_order[np.sort(first_of_each)[:count]])


def _of_left(times: StageTimes) -> list[Column]:
    """Further columns by which candidates are compared if the engine reduces weight gradients after
    a backward pass has sent its input gradient; no columns for other engines.
    """
    left = times.left_backward_s
    if not left.any():
        return []
    within, through = times.within_backward_s, times.through_backward_s + left
    gone = times.gone_backward_s
    return [through, through + within + times.end_s, gone, gone + within]


def _of_sends(times: StageTimes) -> list[Column]:
    """Further columns by which candidates are compared if their sends differ: a copy to the host
    that outlasts its pass delays the send.
    """
    late = times.first_send_late_s, times.end_send_late_s, times.end_return_late_s
    waits = times.round_late_s, times.queued_late_s, times.received_s
    held = times.held_forward_s, times.held_backward_s
    sends = times.point_to_point_s, *late, *waits, *held
    columns = [column for column in sends if (column != column[:1]).any()]
    return [*columns, times.forward_s - held[0]] if held[0].any() else columns


def _of_hosts(times: StageTimes) -> list[Column]:
    """Further columns by which candidates are compared if passes may wait for the host: the times
    that the host takes to issue them.
    """
    forward_s, backward_s = times.issued_forward_s, times.issued_backward_s
    if not backward_s.any():
        return []
    return [
        *(forward_s, forward_s + times.issued_forward_late_s),
        *(backward_s, backward_s + times.issued_backward_late_s),
        backward_s + times.issued_end_s,
    ]


def _grains(column: Column, grain: float) -> Column:
    return np.ceil(column / grain) if grain else column


def undominated(columns: Sequence[Column]) -> Rows:
    """The indices of the rows that no other row dominates. A row dominates another if it is not
    larger in any column; of equal rows the first is kept.
    """
    points = np.stack(columns, axis=1).astype(np.float64)
    # Sorted by sum and then by index, a row comes after every row that dominates it.
    left = np.lexsort((np.arange(len(points)), points.sum(axis=1)))
    kept = []
    while len(left):
        first, left = left[0], left[1:]
        kept.append(first)
        left = left[(points[left] < points[first]).any(axis=1)]
    return np.array(kept, dtype=np.intp)


# Finds the candidates for one stage: the memory-saving strategies on a mesh of GPUs that may be
# part of the best pipeline.
#
# Besides its strategy, a stage's cost depends only on how many micro-batches it has in flight, and
# on whether it has the embedding or the head. If all nodes are equal, only the rank of its first
# GPU inside a node matters; otherwise the kind of its nodes matters too.


# How many candidates for stages one call of the predictor evaluates at most.
TOGETHER = 1 << 19

# In a search that tries ratios from coarse to fine, candidates whose times differ by less than this
# share of an iteration count as equal.
FINEST = 2e-4
# For a pipeline of one stage, the number of its best candidates near whose offload ratios further
# ratios are tried.
BESIDE = 16

# For each dimension that saves memory (``names_of("savings")``: ZeRO level and offload ratios), the
# values that a stage may have.
Choices = Sequence[Sequence[float]]
# A table of memory-saving strategies has a row for each strategy and a column for each dimension of
# ``names_of("savings")``.


class StagePosition(NamedTuple):
    """All that a stage's cost depends on besides its memory-saving strategy: its mesh of GPUs, its
    number of blocks, and where in the pipeline and on the nodes it is.

    ``place_in_node`` is the first rank from which the stage costs the same (``Cluster.like_rank``).
    ``stage`` is the stage's number under pipeline schedules where it matters, otherwise 0.
    ``first_block`` is the beginning of the first range with the same kinds of blocks
    (``like_blocks``).
    """

    mesh: Mesh
    place_in_node: int
    layers: int
    in_flight: int
    is_first: bool
    is_last: bool
    stage: int = 0
    first_block: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the stage is the only one of its pipeline."""
        return self.is_first and self.is_last


@dataclass(slots=True, kw_only=True)
class Menus:
    """For each stage that the pipelines of a group may have, the candidates that may be part of the
    fastest pipeline.

    ``work`` has lower bounds of the times of the other stages. ``with_host``: slower candidates
    that need less host memory are kept too. ``coarse_to_fine``: ratios are first tried in steps of
    a half, and ``refine`` tries ever smaller steps near the best, which is much faster but may miss
    the best. ``way``: every stage uses this memory-saving strategy. ``even_hosts``: each rank may
    use only an even share of its node's host memory. ``pick``: a function that selects the
    candidates to keep, without regard to the upper bound.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]
    with_host: bool = False
    coarse_to_fine: bool = False
    way: Way | None = None
    even_hosts: bool = False
    pick: Callable[[Options], Options] | None = None
    _options: dict[StagePosition, Options] = field(default_factory=dict, init=False)

    def __getitem__(self, position: StagePosition) -> Options:
        """The candidates for a stage that ``prepare`` has evaluated."""
        return self._options[position]

    def prepare(self, positions: Iterable[StagePosition], limit_s: float) -> None:
        """Evaluate the candidates for these stages, and prune those that no pipeline faster than
        ``limit_s`` can contain; ``limit_s`` must not rise between calls.
        """
        alike: dict[tuple[bool, Choices], list[StagePosition]] = defaultdict(list)
        for position in sorted(set(positions) - self._options.keys()):
            alike[position.is_alone, self._choices(position)].append(position)
        for (is_alone, every), alike_positions in alike.items():
            choices = coarse(every, is_alone=is_alone) if self.coarse_to_fine else every
            strategies = np.array([*product(*choices)], dtype=np.float64)
            self._options |= zip(
                alike_positions, self._evaluated(alike_positions, strategies, limit_s), strict=True
            )

    def number_of_ways(self, position: StagePosition) -> int:
        """The number of ways in which a stage may save memory, whether it fits in memory or not."""
        return prod(map(len, self._choices(position))) * len(self._counts(position))

    def only(self, pick: Callable[[StagePosition, Options], Options]) -> "Menus":
        """A copy in which each stage has only those candidates that ``pick`` returns for it."""
        fewer = replace(self)
        fewer._options |= {
            position: pick(position, options) for position, options in self._options.items()
        }
        return fewer

    def refine(self, positions: Iterable[StagePosition], limit_s: float) -> None:
        """For the stages evaluated so far, also try ratios near the ratios of their best
        candidates, in ever smaller steps.
        """
        for of_mesh in _by_mesh(positions):
            self._refine(of_mesh, self._choices(of_mesh[0]), limit_s)

    def _refine(self, positions: Sequence[StagePosition], choices: Choices, limit_s: float) -> None:
        seen: set[tuple[float, ...]] = set()
        step = first_step(choices)
        gone_on: set[tuple[float, ...]] = set()
        while step:
            best = {
                strategy
                for position in positions
                for strategy in map(tuple, self._options[position].savings.tolist())
            } - gone_on
            gone_on |= best
            new = {near for one in best for near in neighbours(one, choices, step)} - seen
            if not new:
                step, gone_on = step // 2, set()
                continue
            seen |= new
            others = self._evaluated(positions, np.array(sorted(new)), limit_s)
            for position, other in zip(positions, others, strict=True):
                self.ledger.check_time()
                both = self._options[position].and_also(other)
                self._options[position] = self._fastest(position, both, limit_s)

    def _choices(self, position: StagePosition) -> Choices:
        if self.way is not None:
            return tuple((value,) for value in self.way.savings)
        return savings_choices(self.space, position.mesh, in_pipeline=not position.is_alone)

    def _counts(self, position: StagePosition) -> list[CountsRow]:
        if self.way is not None:
            return [self.way.counts_within(position.layers)]
        return counts_choices(self.space, position.layers)

    def _evaluated(
        self, positions: Sequence[StagePosition], strategies: Floats, limit_s: float
    ) -> list[Options]:
        """For each stage, the best candidates among these strategies, each tried with every allowed
        number of recomputed blocks.
        """
        best: list[Options | None] = [None] * len(positions)
        every = [self._counts(position) for position in positions]
        for part in _parts(positions, every, len(strategies)):
            rows = _Rows(part, strategies, self.group.micro_batches)
            costs = self.ledger.stage_costs(rows.batch(), engine=self.space.engine)
            for number, options in rows.options(costs, self.problem):
                self.ledger.check_time()
                hopeful = options.chosen(self._is_hopeful(positions[number], options, limit_s))
                before = best[number]
                both = hopeful if before is None else before.and_also(hopeful)
                best[number] = self._fastest(positions[number], both, limit_s)
        return [options for options in best if options is not None]

    def _is_hopeful(self, position: StagePosition, options: Options, limit_s: float) -> Bools:
        # Candidates are not pruned by the lower bound of iteration times if ``pick`` may compare
        # pipelines by another objective.
        if self.pick is None:
            hopeful = hopeful_s(self.problem, self.group, self.work, position, options) < limit_s
        else:
            hopeful = np.ones(len(options), dtype=bool)
        if self.even_hosts:
            cluster = self.problem.cluster
            room = host_room_at(cluster, np.array([position.place_in_node]))
            hopeful &= options.host_bytes * cluster.gpus_per_node <= room
        return np.asarray(hopeful)

    def _fastest(self, position: StagePosition, options: Options, limit_s: float) -> Options:
        if self.pick is not None:
            return self.pick(options)
        if position.is_alone:
            count = BESIDE if self.coarse_to_fine else 1
            return fastest_alone(options, self.group.micro_batches, count)
        finest_s = FINEST * limit_s if self.coarse_to_fine and limit_s < np.inf else 0.0
        host_bytes = None
        if self.with_host:
            share = FINEST if finest_s else 0.0
            host_bytes = share * self.problem.cluster.host_memory_bytes
        steady_s = finest_s / self.group.micro_batches
        return fastest(options, Grain(steady_s=steady_s, once_s=finest_s, host_bytes=host_bytes))


def hopeful_s(
    problem: Problem,
    group: Group,
    work: Mapping[Mesh, LeastWork],
    position: StagePosition,
    options: Options,
) -> Column:
    """For each candidate for a stage, a lower bound in seconds of the iteration times of all
    pipelines that contain it.
    """
    blocks = position.first_block, position.layers
    return least_with(problem, group, work, options, blocks, position.in_flight)


def least_with(
    problem: Problem,
    group: Group,
    work: Mapping[Mesh, LeastWork],
    options: Options,
    blocks: tuple[Column | int, Column | int],
    in_flight: Column | int,
) -> Column:
    """For each candidate, a lower bound in seconds of the iteration times of pipelines that contain
    it. ``blocks`` are its first block and its number of blocks. At most half of its ``in_flight``
    micro-batches, its work before and after all passes, and the end of a pass that has sent its
    output can overlap with the other stages' work.
    """
    if not group.has_formula:
        # All passes with the work before and after them, or the host's time to issue their kernels.
        own_s = group.micro_batches * options.stable_s + options.times.begin_s
        return np.asarray(np.maximum(own_s + options.times.end_s, options.times.after_first_s))
    times = options.times
    others_s = group.other_stages_s(work, *blocks, problem.workload.model.layers)
    # It waits for its first and for its last gradient; the longer wait is at least their mean.
    sent_s = times.after_first_s
    if group.micro_batches > 1:
        sent_s = (sent_s + np.maximum(times.forward_s - times.through_forward_s, 0.0)) / 2
    sent_s = sent_s + np.maximum(times.backward_s - times.through_backward_s, 0.0)
    hidden_s = (in_flight - 1) / 2 * options.stable_s + times.begin_s + times.end_s + sent_s
    own_s = options.once_s + group.micro_batches * options.stable_s
    longest_s = own_s + np.maximum(others_s - hidden_s, 0.0)
    return np.asarray(np.maximum(longest_s, group.micro_batches * options.times.issued_s))


def coarse(choices: Choices, *, is_alone: bool) -> Choices:
    """A coarse grid of the allowed values: all values of a ZeRO level, and of each offload ratio
    the first, the last and those that divide the range into ``coarse_parts`` parts.

    A stage that is a whole pipeline gets twice as many parts: no other stage can make up for it.
    """
    times = 2 if is_alone else 1
    return tuple(
        spread(values, times * row.coarse_parts) if row.is_ratio else values
        for name, values in zip(names_of("savings"), choices, strict=True)
        for row in [DIMENSIONS[name]]
    )


def first_step(choices: Choices) -> int:
    """The first step size of a local search around coarse ratios, as a number of allowed values."""
    most = (
        len(values) - 1
        for name, values in zip(names_of("savings"), choices, strict=True)
        if DIMENSIONS[name].is_ratio
    )
    return max(most) // 4 or 1


def spread(choices: Sequence[float], parts: int) -> Sequence[float]:
    """The first and the last of a list of values, and values between that divide the list into
    ``parts`` equal parts.
    """
    last = len(choices) - 1
    return [choices[place] for place in sorted({last * part // parts for part in range(parts + 1)})]


def _by_mesh(positions: Iterable[StagePosition]) -> Iterable[list[StagePosition]]:
    """Groups stages by their mesh; a stage that is the whole pipeline is in a group of its own."""
    groups: dict[tuple[Mesh, bool], list[StagePosition]] = defaultdict(list)
    for position in sorted(positions):
        groups[position.mesh, position.is_alone].append(position)
    return groups.values()


def neighbours(
    strategy: tuple[float, ...], choices: Choices, step: int
) -> Iterator[tuple[float, ...]]:
    """The strategies next to one strategy: one ratio is moved by ``step`` allowed values, or two
    ratios are moved in opposite directions, so that memory stays about equal.
    """
    here = [allowed.index(value) for allowed, value in zip(choices, strategy, strict=True)]
    ratios = [i for i, name in enumerate(names_of("savings")) if DIMENSIONS[name].is_ratio]
    for up, down in product((*ratios, None), repeat=2):
        there = here[:]
        for kind, by in ((up, step), (down, -step)):
            if kind is not None:
                there[kind] += by
        is_inside = all(0 <= p < len(allowed) for p, allowed in zip(there, choices, strict=True))
        if is_inside and up != down:
            yield tuple(allowed[p] for p, allowed in zip(there, choices, strict=True))


# The type of a batch of stages to evaluate: each stage's index, the stage, and a column of the
# numbers of recomputed blocks to try.
_Part = list[tuple[int, StagePosition, Ints]]


def _parts(
    positions: Sequence[StagePosition], every: Sequence[Sequence[CountsRow]], strategies: int
) -> Iterator[_Part]:
    """Divides stages, each with the numbers of recomputed blocks to evaluate, into batches of at
    most ``TOGETHER`` candidates.
    """
    most = max(1, TOGETHER // max(1, strategies))
    part: _Part = []
    room = most
    for number, (position, rows) in enumerate(zip(positions, every, strict=True)):
        counts = np.array(rows)
        for start in range(0, len(counts), most):
            chunk = counts[start : start + most]
            if len(chunk) > room and part:
                yield part
                part, room = [], most
            part.append((number, position, chunk))
            room -= len(chunk)
    if part:
        yield part


def savings_columns(savings: Floats) -> dict[str, NDArray[Any]]:
    """Converts a table of memory-saving strategies to a dictionary of columns by dimension: ZeRO
    levels as integers, offload ratios as floats.
    """
    columns = dict(zip(names_of("savings"), savings.T, strict=True))
    return {
        name: column if DIMENSIONS[name].is_ratio else column.astype(np.int64)
        for name, column in columns.items()
    }


class _Rows:
    """Every pair of a stage and a memory-saving strategy of one batch, as rows; the rows of one
    strategy are adjacent.
    """

    def __init__(self, part: _Part, strategies: Floats, micro_batches: int) -> None:
        self.part = part
        self.micro_batches = micro_batches
        self.strategies = strategies
        self.counts = [len(counts) for _, _, counts in part]

    def batch(self) -> StageBatch:
        """The rows as candidates for stages, in the form that the predictor takes."""
        each = np.sum(self.counts)
        counts = np.tile(
            np.concatenate([counts for _, _, counts in self.part]), (len(self.strategies), 1)
        )
        return StageBatch(
            layers=self._of_place(lambda position: position.layers),
            **{name: self._of_mesh(name) for name in names_of("mesh")},
            **savings_columns(np.repeat(self.strategies, each, axis=0)),
            **dict(zip(counts_of_blocks(), counts.T, strict=True)),
            in_flight=self._of_place(lambda position: position.in_flight),
            has_embedding=self._of_place(lambda position: position.is_first),
            has_head=self._of_place(lambda position: position.is_last),
            first_rank=self._of_place(lambda position: position.place_in_node),
            first_block=self._of_place(lambda position: position.first_block),
            micro_batches=self.micro_batches,
        )

    def options(self, costs: StageCosts, problem: Problem) -> Iterator[tuple[int, Options]]:
        """The candidates that fit in memory, stage by stage, each list with the index of its
        stage.
        """
        cluster = problem.cluster
        gpus_of_node = np.minimum(
            self._of_place(lambda position: position.mesh.num_gpus), cluster.gpus_per_node
        )
        fits = costs.fits & (costs.host_bytes * gpus_of_node <= self._host_room(cluster))
        by_strategy = fits.reshape(len(self.strategies), -1)
        times, first = StageTimes.of(costs.seconds, -1), 0
        for number, _, counts in self.part:
            rows, columns = np.nonzero(by_strategy[:, first : first + len(counts)])
            flat = rows * by_strategy.shape[1] + first + columns
            yield (
                number,
                Options(
                    savings=self.strategies[rows],
                    counts=counts[columns],
                    times=times.chosen(flat),
                    host_bytes=costs.host_bytes[flat],
                ),
            )
            first += len(counts)

    def _host_room(self, cluster: Cluster) -> Floats | float:
        """For each pair of a stage and a strategy, the bytes of host memory of the stage's node; a
        single number if all nodes are equal.
        """
        if not cluster.others:
            return cluster.host_memory_bytes
        return host_room_at(cluster, self._of_place(lambda position: position.place_in_node))

    def _of_mesh(self, name: str) -> Ints:
        return self._of_place(lambda place: place.mesh.value(name))

    def _of_place(self, value: Callable[[StagePosition], int]) -> Ints:
        values = np.array([int(value(position)) for _, position, _ in self.part])
        return np.tile(np.repeat(values, self.counts), len(self.strategies))
