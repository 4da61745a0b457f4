"""Lists of candidates for stages in which a candidate may stand for a box (a set of memory-saving
strategies with ratios in ranges); boxes are split as far as a proof needs it.

Of each box the candidate has the least times. Where the least ratios fit, they are a candidate of
their own, with their true times. So a pipeline of such candidates is never slower than the
pipelines that it stands for, and if it has no boxes it is one of them.

Axes: R rows of a place.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.graph.library import graph_of
from mistlab.job.search import FEWEST_ALIKE, Problem
from mistlab.plan.dimensions import RECOMPUTED, counts_of_blocks
from mistlab.plan.space import SearchSpace
from searchers.exact.box_costs import HALVED, Asked, BoxCosts, Boxes, Pool
from searchers.exact.candidates import (
    Options,
    StagePosition,
    hopeful_s,
    telling_columns,
    undominated,
)
from searchers.exact.groups import Group, LeastWork
from searchers.meshes import Mesh
from searchers.savings import CountsRow, counts_choices, savings_choices
from searchers.strategy import SHORT_LIST, Ledger

# Numbers of blocks that are recomputed or run in other ways (R, T), and for each row the largest
# number of recomputed blocks that it stands for (R).
Runs = tuple[Ints, Ints]

# If a pipeline has one stage only, this many of its boxes are halved per round: usually all that
# are left.
ALONE = 1024
# While there are fewer boxes than this, each is halved several times per round.
FEW_PARTS = 1024


@dataclass(slots=True, kw_only=True)
class BoxMenus:
    """Lists of candidates for the stages of a group of pipelines, in which some candidates stand
    for boxes of strategies; used like ``Menus`` to join stages to pipelines.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]
    with_host: bool = False
    _pools: dict[StagePosition, Pool] = field(default_factory=dict, init=False)
    # The initial boxes of a mesh and a number of blocks; the flag says whether the stage is the
    # whole pipeline.
    _largest: dict[tuple[Mesh, int, bool], tuple[Ints, Boxes]] = field(
        default_factory=dict, init=False
    )
    # The initial boxes of a mesh without recomputed blocks; and for each number of blocks, the
    # ranges of recomputed blocks.
    _of_mesh: dict[tuple[Mesh, bool], Boxes] = field(default_factory=dict, init=False)
    _runs: dict[int, Runs] = field(default_factory=dict, init=False)
    # For each stage position, the candidates that no other candidate dominates, and their indices
    # in its pool.
    _best: dict[StagePosition, tuple[Options, Rows]] = field(default_factory=dict, init=False)

    def __getitem__(self, position: StagePosition) -> Options:
        """The candidates for a stage position; ``prepare`` must have evaluated it before."""
        if position not in self._best:
            pool = self._pools[position]
            rows = undominated(telling_columns(pool.options, with_host=self.with_host))
            self._best[position] = pool.options.chosen(rows), rows
        return self._best[position][0]

    def prepare(self, places: Iterable[StagePosition], limit_s: float) -> None:
        """Evaluate the initial boxes of these stage positions; boxes that no pipeline faster than
        ``limit_s`` can contain are pruned.
        """
        asked = [self._whole(place) for place in sorted(set(places) - self._pools.keys())]
        for position, pool in self._costs.pools(asked, limit_s):
            self._pools[position] = self._tidied(pool)

    def least(
        self, places: Sequence[StagePosition], limit_s: float
    ) -> Iterator[tuple[Options, Rows]]:
        """Candidates that are lower bounds of all boxes at these stage positions, in pipelines
        faster than ``limit_s``, each with the index of its position; the lists of candidates stay
        unchanged.
        """
        return self._costs.least([self._whole(place) for place in places], limit_s)

    def _whole(self, position: StagePosition) -> Asked:
        """The initial boxes to be evaluated at a stage position, with every range of recomputed
        blocks.
        """
        key = position.mesh, position.layers, position.is_alone
        if key not in self._largest:
            self._largest[key] = whole_boxes(self._ways(position), self._runs_of(position.layers))
        counts, boxes = self._largest[key]
        return Asked(place=position, counts=counts, boxes=boxes)

    def _ways(self, position: StagePosition) -> Boxes:
        """The initial boxes (sets of ratios and levels) for the mesh of a stage position, without
        recomputed blocks; cached by mesh.
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
        """Whether a candidate for a stage position stands for a box of several strategies."""
        return bool(self._pools[position].is_open[self._best[position][1][row]])

    def split(self, stages: Iterable[tuple[StagePosition, int]], limit_s: float) -> None:
        """Halve the boxes that these candidates stand for, also at other stage positions that have
        the same boxes.
        """
        codes: dict[tuple[Mesh, bool], set[int]] = {}
        for position, row in stages:
            rows = self._best[position][1][[row]]
            pool = self._pools[position]
            if position.is_alone:
                # A stage that is the whole pipeline has boxes that no other stage position has.
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
            asked.append(Asked(place=position, counts=counts, boxes=boxes))
            self._pools[position] = pool.chosen(~chosen)
        for position, new in self._costs.pools(asked, limit_s):
            self._pools[position] = self._tidied(self._pools[position].and_also(new))
            self._best.pop(position, None)

    def _wanted(self, codes: Mapping[tuple[Mesh, bool], set[int]]) -> dict[StagePosition, Bools]:
        """A mask, for each stage position, of its boxes with these codes; positions without such
        boxes are omitted.
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
        """A copy of the lists without boxes, so that every pipeline joined from their candidates is
        a plan.
        """
        menus = replace(self)
        menus._pools = {place: pool.chosen(~pool.is_open) for place, pool in self._pools.items()}
        return menus

    def fastest(self, position: StagePosition) -> list[int]:
        """The indices of the few fastest candidates for a stage that is the whole pipeline."""
        seconds = self._least_s(position, self[position])
        fastest: list[int] = np.argsort(seconds, kind="stable")[:SHORT_LIST].tolist()
        return fastest

    def fall_to(self, limit_s: float) -> None:
        """Lower the upper bound to ``limit_s``, and prune candidates that no faster pipeline can
        contain.
        """
        for position, pool in self._pools.items():
            hopeful = self._is_hopeful(position, pool.options, limit_s)
            if not hopeful.all():
                self._pools[position] = pool.chosen(hopeful)
                self._best.pop(position, None)

    def heed_hosts(self) -> None:
        """From now on, keep slower candidates that need less host memory, too, since stages on a
        node share host memory.
        """
        self.with_host = True
        self._best.clear()

    @property
    def _costs(self) -> BoxCosts:
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

    def _tidied(self, pool: Pool) -> Pool:
        """Prune candidates that another single strategy dominates; a box is kept unless one
        strategy dominates all of it.
        """
        if not len(pool.is_open):
            return pool
        columns = np.stack(telling_columns(pool.options, with_host=True), axis=1)
        left = np.flatnonzero(pool.is_open)
        closed = np.flatnonzero(~pool.is_open)
        closed = closed[undominated([*columns[closed].T])] if len(closed) else closed
        for row in closed:
            left = left[(columns[left] < columns[row]).any(axis=1)]
        return pool.chosen(np.sort(np.concatenate([closed, left])))


def _are_in(codes: Ints, listed: Ints) -> Bools:
    """Whether each box code is among ``listed``, which is sorted."""
    places = np.searchsorted(listed[:-1], codes)
    return np.asarray(listed[places] == codes)


def halvings(boxes: int) -> int:
    """The number of times that each box is halved in a round: more if there are few boxes, since a
    small batch takes as long to evaluate as a large one.
    """
    return max(HALVED, (FEW_PARTS // max(1, boxes)).bit_length() - 1)


def whole_boxes(whole: Boxes, runs: Runs) -> tuple[Ints, Boxes]:
    """The initial boxes of a stage, once for each range of recomputed blocks, and for each box the
    fewest blocks that are recomputed or run in other ways (R, T).
    """
    counts, most = runs
    of_row = np.repeat(np.arange(len(counts)), len(whole))
    fewest = counts[of_row, counts_of_blocks().index(RECOMPUTED)]
    boxes = whole.chosen(np.tile(np.arange(len(whole)), len(counts)))
    return counts[of_row], boxes.with_blocks(fewest, most[of_row])


def runs_of(space: SearchSpace, layers: int, *, turns: bool = False) -> Runs:
    """The possible numbers of a stage's blocks that are recomputed or run in other ways, as rows
    (R, T); each row stands for all numbers of recomputed blocks up to a largest one (R), or for one
    number if kinds of blocks alternate (``turns``).
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
