"""Lists of candidates for pipeline stages. A candidate is a single memory-saving strategy or a box
(all strategies with ratios in given ranges); boxes are split where a proof of the best plan needs
it.

A box has the smallest times of its strategies. If its smallest ratios fit in memory, this strategy
is a candidate too, with its true times. So a pipeline joined from candidates is never slower than
the plans whose strategies lie in its boxes; a pipeline without boxes is itself a plan.

Axes: R candidates (rows) of a stage.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.graph.library import graph_of
from mistlab.job.search import FEWEST_ALIKE, Problem
from mistlab.plan.dimensions import RECOMPUTED, counts_of_blocks
from mistlab.plan.space import SearchSpace
from searchers.exact.box_costs import HALVED, BoxCosts, Boxes, BoxQuery, Pool
from searchers.exact.candidates import (
    Options,
    StagePosition,
    compared_columns,
    hopeful_s,
    undominated,
)
from searchers.exact.groups import Group, LeastWork
from searchers.meshes import Mesh, lies_well
from searchers.savings import CountsRow, counts_choices, savings_choices
from searchers.strategy import SHORT_LIST, Ledger

# Two arrays with equal numbers of rows. A row of the first says in how many blocks a stage uses
# each way to keep fewer activations, such as recomputation. The row stands for a range of numbers
# of recomputed blocks, and the second array has the largest of these numbers.
Runs = tuple[Ints, Ints]

# If a pipeline has one stage only, this many boxes are cut in half per round: usually all that are
# left.
ALONE = 1024
# If a round has fewer boxes than this, each box is cut in half several times.
FEW_PARTS = 1024


@dataclass(slots=True, kw_only=True)
class BoxMenus:
    """Lists of candidates for the stages of a group of pipelines, in which some candidates stand
    for boxes (sets of memory-saving strategies). Offers the methods of ``Menus``, so that the same
    code joins stages to pipelines.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]
    with_host: bool = False
    _pools: dict[StagePosition, Pool] = field(default_factory=dict, init=False)
    # The boxes with which a search starts, by mesh and number of blocks; the key's flag says
    # whether the stage is the whole pipeline.
    _largest: dict[tuple[Mesh, int, bool], tuple[Ints, Boxes]] = field(
        default_factory=dict, init=False
    )
    # The boxes (sets of strategies) with which a search starts, by mesh; they recompute no blocks.
    _of_mesh: dict[tuple[Mesh, bool], Boxes] = field(default_factory=dict, init=False)
    # For each number of blocks of a stage, the ranges of recomputed blocks.
    _runs: dict[int, Runs] = field(default_factory=dict, init=False)
    # For each stage, the candidates that no other candidate dominates, and their row numbers in
    # ``_pools``.
    _best: dict[StagePosition, tuple[Options, Rows]] = field(default_factory=dict, init=False)

    def __getitem__(self, position: StagePosition) -> Options:
        """The candidates for a stage that ``prepare`` has evaluated."""
        if position not in self._best:
            pool = self._pools[position]
            rows = undominated(compared_columns(pool.options, with_host=self.with_host))
            self._best[position] = pool.options.chosen(rows), rows
        return self._best[position][0]

    def prepare(self, places: Iterable[StagePosition], limit_s: float) -> None:
        """Evaluate the boxes that a search starts with for these stages; boxes that no pipeline
        faster than ``limit_s`` can contain are pruned.
        """
        asked = [self.whole(place) for place in sorted(set(places) - self._pools.keys())]
        for position, pool in self.costs.pools(asked, limit_s):
            self._pools[position] = self._undominated(pool)

    def least(
        self, places: Sequence[StagePosition], limit_s: float
    ) -> Iterator[tuple[Options, Rows]]:
        """Lower bounds of all candidates for these stages, in pipelines faster than ``limit_s``,
        each with the index of its stage; the stored candidates do not change.
        """
        return self.costs.least([self.whole(place) for place in places], limit_s)

    def whole(self, position: StagePosition) -> BoxQuery:
        """The boxes that a search starts with for a stage, for every range of recomputed blocks."""
        key = position.mesh, position.layers, position.is_alone
        if key not in self._largest:
            self._largest[key] = first_boxes(self._ways(position), self._runs_of(position.layers))
        counts, boxes = self._largest[key]
        return BoxQuery(place=position, counts=counts, boxes=boxes)

    def _ways(self, position: StagePosition) -> Boxes:
        """The boxes (ranges of ZeRO levels and offload ratios) that a search starts with on the
        mesh of a stage; they recompute no blocks. Cached by mesh.
        """
        key = position.mesh, position.is_alone
        if key not in self._of_mesh:
            choices = savings_choices(self.space, position.mesh, in_pipeline=not position.is_alone)
            self._of_mesh[key] = Boxes.whole(tuple(tuple(sorted(own)) for own in choices))
        return self._of_mesh[key]

    def _runs_of(self, layers: int) -> Runs:
        if layers not in self._runs:
            turns = len(graph_of(self.problem.workload).pattern) > 1
            self._runs[layers] = runs_of(self.space, layers, turns=turns)
        return self._runs[layers]

    def is_open(self, position: StagePosition, row: int) -> bool:
        """Whether a candidate for a stage is a box of several strategies rather than a single
        one.
        """
        return bool(self._pools[position].is_open[self._best[position][1][row]])

    def split(self, stages: Iterable[tuple[StagePosition, int]], limit_s: float) -> None:
        """Cut the boxes that these candidates stand for in half, at every stage on the same mesh
        that has these boxes as candidates.
        """
        codes: dict[tuple[Mesh, bool], set[int]] = {}
        for position, row in stages:
            rows = self._best[position][1][[row]]
            pool = self._pools[position]
            if position.is_alone:
                # Other stages do not need the boxes of a stage that is the whole pipeline, so
                # several of the most promising boxes are split at once.
                least_s = self._least_s(position, pool.options)
                rows = np.argsort(np.where(pool.is_open, least_s, np.inf), kind="stable")[:ALONE]
            boxes = pool.boxes.chosen(rows[pool.is_open[rows]])
            codes.setdefault((position.mesh, position.is_alone), set()).update(boxes.codes.tolist())
        asked, wanted = [], self._wanted(codes)
        times = halvings(sum(int(chosen.sum()) for chosen in wanted.values()))
        for position, chosen in wanted.items():
            pool = self._pools[position]
            boxes, origin = pool.boxes.chosen(chosen).halved(times)
            counts = pool.options.counts[chosen][origin]
            asked.append(BoxQuery(place=position, counts=counts, boxes=boxes))
            self._pools[position] = pool.chosen(~chosen)
        for position, new in self.costs.pools(asked, limit_s):
            self._pools[position] = self._undominated(self._pools[position].and_also(new))
            self._best.pop(position, None)

    def _wanted(self, codes: Mapping[tuple[Mesh, bool], set[int]]) -> dict[StagePosition, Bools]:
        """For each stage, a mask of the boxes to cut in half: those whose ``Boxes.codes`` (integers
        that identify ranges of strategies) are in ``codes``. Stages without such boxes are omitted.
        """
        wanted = {}
        for position, pool in self._pools.items():
            wanted_codes = codes.get((position.mesh, position.is_alone))
            if wanted_codes and len(pool.is_open):
                chosen = pool.is_open & _are_in(pool.boxes.codes, np.array(sorted(wanted_codes)))
                if chosen.any():
                    wanted[position] = chosen
        return wanted

    def certain(self) -> "BoxMenus":
        """A copy of the lists of candidates without boxes: every candidate is a single strategy, so
        every pipeline joined from them is a plan.
        """
        menus = replace(self)
        menus._pools = {place: pool.chosen(~pool.is_open) for place, pool in self._pools.items()}
        return menus

    def fastest(self, position: StagePosition) -> list[int]:
        """The indices of the few fastest candidates for a stage that is the whole pipeline."""
        seconds = self._least_s(position, self[position])
        fastest: list[int] = np.argsort(seconds, kind="stable")[:SHORT_LIST].tolist()
        return fastest

    def lower_limit_to(self, limit_s: float) -> None:
        """Lower the upper bound to ``limit_s``, and prune candidates that no pipeline faster than
        this can contain.
        """
        for position, pool in self._pools.items():
            hopeful = self._is_hopeful(position, pool.options, limit_s)
            if not hopeful.all():
                self._pools[position] = pool.chosen(hopeful)
                self._best.pop(position, None)

    def count_host_memory(self) -> None:
        """Keep slower candidates that need less host memory from now on, since the stages on a node
        share its host memory.
        """
        self.with_host = True
        self._best.clear()

    @property
    def alone(self) -> list[StagePosition]:
        """The stages that are whole pipelines of the group: one on each mesh of all GPUs."""
        cluster = self.problem.cluster
        return [
            StagePosition(
                mesh=mesh,
                place_in_node=cluster.like_rank(0, mesh.num_gpus),
                layers=self.problem.workload.model.layers,
                in_flight=1,
                is_first=True,
                is_last=True,
            )
            for mesh in self.group.meshes
            if mesh.num_gpus == cluster.num_gpus and lies_well(0, mesh.num_gpus, cluster)
        ]

    @property
    def costs(self) -> BoxCosts:
        """Computes costs and lower bounds of boxes for the stages of the group."""
        return BoxCosts(
            problem=self.problem,
            space=self.space,
            ledger=self.ledger,
            group=self.group,
            work=self.work,
        )

    def _is_hopeful(self, position: StagePosition, options: Options, limit_s: float) -> Bools:
        return np.asarray(self._least_s(position, options) < limit_s)

    def _least_s(self, position: StagePosition, options: Options) -> Floats:
        return hopeful_s(self.problem, self.group, self.work, position, options)

    def _undominated(self, pool: Pool) -> Pool:
        """Prunes candidates that are dominated by a candidate with a single strategy. A box is
        pruned only if that strategy dominates all of the box.
        """
        if not len(pool.is_open):
            return pool
        columns = np.stack(compared_columns(pool.options, with_host=True), axis=1)
        left = np.flatnonzero(pool.is_open)
        closed = np.flatnonzero(~pool.is_open)
        closed = closed[undominated([*columns[closed].T])] if len(closed) else closed
        for row in closed:
            left = left[(columns[left] < columns[row]).any(axis=1)]
        return pool.chosen(np.sort(np.concatenate([closed, left])))


def _are_in(codes: Ints, listed: Ints) -> Bools:
    """For each integer code of a box, whether the ascending array ``listed`` contains it."""
    places = np.searchsorted(listed[:-1], codes)
    return np.asarray(listed[places] == codes)


def halvings(boxes: int) -> int:
    """How many times each box is cut in half in a round. The number is larger if there are few
    boxes, since a small batch takes as long to evaluate as a large one.
    """
    return max(HALVED, (FEW_PARTS // max(1, boxes)).bit_length() - 1)


def first_boxes(whole: Boxes, runs: Runs) -> tuple[Ints, Boxes]:
    """The boxes that a search of a stage starts with: a copy of ``whole`` for each range of
    recomputed blocks. Also returns in how many blocks each box uses each way to keep fewer
    activations.
    """
    counts, most = runs
    of_row = np.repeat(np.arange(len(counts)), len(whole))
    fewest = counts[of_row, counts_of_blocks().index(RECOMPUTED)]
    boxes = whole.chosen(np.tile(np.arange(len(whole)), len(counts)))
    return counts[of_row], boxes.with_blocks(fewest, most[of_row])


def runs_of(space: SearchSpace, layers: int, *, turns: bool = False) -> Runs:
    """In how many of its blocks a stage may use each way to keep fewer activations, as rows of
    counts. A row stands for a range of numbers of recomputed blocks, from the number in the row to
    the largest, which is returned with it. If kinds of blocks alternate (``turns``), each range has
    a single number.
    """
    at, counts = counts_of_blocks().index(RECOMPUTED), counts_choices(space, layers)
    runs: list[tuple[CountsRow, int]] = []
    for row in sorted(counts, key=lambda row: (row[:at], row[at + 1 :], row[at])):
        alike = FEWEST_ALIKE <= row[at] < layers and sum(row) == row[at] and not turns
        first, last = runs[-1] if runs else (row, -1)
        follows = last + 1 == row[at] and first[at] >= FEWEST_ALIKE
        if alike and follows and sum(first) == first[at]:
            runs[-1] = first, row[at]
        else:
            runs.append((row, row[at]))
    firsts, most = zip(*runs, strict=True)
    return np.array(firsts, dtype=np.int64), np.array(most, dtype=np.int64)
