"""Bounds of pipelines whose stages have unequal numbers of GPUs, where stages may be fractions.

A pipeline of S stages takes a *column* at each position: a mesh and a number of blocks, with the
least times of any way to save memory. The columns have all blocks and all GPUs together. Let p be a
stage's position from the end, P the passage of a micro-batch through a stage there and back, with
its sends, and t = f + b the stage's steady time. A chain of passes waits for the first of G
micro-batches at any one stage i (``mistlab.cost.chains``), so a pipeline takes at least

    sum P + r_i    with    r_i = (G - 1) t_i - (min(G, p_i) - 1) f_i

The largest r is at least any weighted mean of all. Weights may be of positions, or be shares of the
blocks or of the GPUs. Blocks and GPUs have prices. Then the bound is what all blocks and GPUs are
worth, and for each position the least that a column costs beyond the worth of its own. It holds for
any weights and prices; a linear programme finds those that make it high.

Axes: M columns, S positions from the end, K partial pipelines.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import no_stages, prepended
from mistlab.values.search import Problem
from searchers.joining.box_menus import BoxMenus
from searchers.joining.candidates import StagePosition
from searchers.joining.partials import Partials
from searchers.joining.prices import BETWEEN, ENDS, FIRST, LAST, Columns, Prices, dearest
from searchers.meshes import Mesh, lies_well

Values = NDArray[np.float64]
Whole = NDArray[np.intp]

# Weights are raised by such factors for what is left of a pipeline, and prices of blocks varied.
RAISED = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
VARIED = (0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """The bounds of a group's pipelines of several stages that take less than a limit.

    ``prices`` are those of each number of stages, for the time of all passes and for the passage
    alone; ``least_s`` is the bound of pipelines with so many stages.
    """

    meshes: Sequence[Mesh]
    columns: Columns
    prices: Mapping[int, tuple[Prices, Prices]]
    least_s: Mapping[int, float]
    _lines: dict[int, "list[_Lines]"] = field(default_factory=dict)
    _counts: dict[int, tuple[float, Mapping[Mesh, Sequence[int]]]] = field(default_factory=dict)

    @classmethod
    def of(cls, menus: BoxMenus, limit_s: float) -> Self:
        """The bounds of a group of pipelines; ``menus`` are its menus, which are not changed."""
        meshes, columns = _columns(replace(menus), limit_s)
        prices: dict[int, tuple[Prices, Prices]] = {}
        least_s: dict[int, float] = {}
        if len(columns):
            before = None
            for stages in range(2, _most_stages(menus) + 1):
                menus.ledger.check_time()
                own, bound_s = dearest(columns, stages, before, limit_s)
                before = own
                if bound_s < limit_s:
                    passage, _ = dearest(columns.passing, stages, None, limit_s)
                    prices[stages], least_s[stages] = (own, passage), bound_s
        return cls(meshes=meshes, columns=columns, prices=prices, least_s=least_s)

    def bound_s(self, limit_s: float) -> float:
        """Seconds that no pipeline takes less than; the limit if none may take less than it."""
        return min([limit_s, *self.least_s.values()])

    def most_stages(self, limit_s: float) -> int:
        """The most stages of a pipeline that may take less than a limit; 1 if none has several."""
        return max([1, *(stages for stages, least_s in self.least_s.items() if least_s < limit_s)])

    def counts(self, after: int, limit_s: float) -> Mapping[Mesh, Sequence[int]]:
        """The numbers of blocks of stages on each mesh, in front of so many others, that may be
        part of a pipeline of several stages that takes less than a limit."""
        known_s, counts = self._counts.get(after, (-1.0, {}))
        if known_s != limit_s:
            counts = self._worked_out(after, limit_s)
            self._counts[after] = limit_s, counts
        return counts

    def _worked_out(self, after: int, limit_s: float) -> Mapping[Mesh, Sequence[int]]:
        may = np.zeros(len(self.columns), dtype=np.bool_)
        for stages, (own, _) in self.prices.items():
            if stages > after and self.least_s[stages] < limit_s:
                beyond_s = own.beyond_s(self.columns)[after]
                may |= self.least_s[stages] + beyond_s - beyond_s.min() < limit_s
        found: dict[Mesh, list[int]] = {}
        for row in np.flatnonzero(may).tolist():
            found.setdefault(self.meshes[row], []).append(int(self.columns.layers[row]))
        return found

    def rest_s(self, partials: Partials, stages: int) -> Values:
        """The least seconds of any completion (K) of partial pipelines of so many stages."""
        if not len(partials):
            return np.empty(0)
        if stages not in self._lines:
            self._lines[stages] = [
                _Lines.of(self.columns, *prices, stages)
                for count, prices in self.prices.items()
                if count > stages
            ]
        # Those with the same blocks and GPUs are side by side.
        changes = np.diff(partials.layers).astype(bool) | np.diff(partials.gpus).astype(bool)
        first = np.flatnonzero(np.concatenate([[True], changes]))
        left = (
            1 - partials.layers[first] / self.columns.all_layers,
            1 - partials.gpus[first] / self.columns.all_gpus,
        )
        through = np.full(len(first), np.inf)
        around = through.copy()
        for lines in self._lines[stages]:
            own_through, own_around = lines.at(*left)
            through, around = np.minimum(through, own_through), np.minimum(around, own_around)
        chains, of = partials.chains, np.concatenate([[0], np.cumsum(changes)])
        return np.asarray(
            np.maximum(chains.through + through[of], chains.around_first + around[of])
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lines:
    """Bounds of the stages that are left, in front of some, of pipelines of a number of stages:
    lines over the shares of the blocks and of the GPUs that are left.

    Each line has its worth of blocks and of GPUs, and what it costs beside (B). A line holds where
    its weights add up to one at most.
    """

    prices: Prices
    stages: int
    passing: Values
    raised: Values

    @classmethod
    def of(cls, columns: Columns, own: Prices, passage: Prices, stages: int) -> Self:
        """The lines of pipelines with these prices, of which ``stages`` stages are known."""
        return cls(
            prices=own,
            stages=stages,
            passing=_lines(columns.passing, [passage], stages),
            raised=_lines(columns, [own.raised(factor) for factor in RAISED], stages),
        )

    def at(self, layers: Values, gpus: Values) -> tuple[Values, Values]:
        """The least passage, and the least passage with the largest r (K)."""
        through = _highest(self.passing, layers, gpus)
        weight = self.prices.weight_of(self.stages, layers, gpus)
        around = np.full(len(layers), -np.inf)
        for number, factor in enumerate(RAISED):
            lines = self.raised[number * len(VARIED) : (number + 1) * len(VARIED)]
            holds = factor * weight <= 1 + 1e-12
            found = np.where(holds, _highest(lines, layers, gpus), -np.inf)
            around = np.maximum(around, found)
        return through, np.maximum(around, through)


def _lines(columns: Columns, prices: Sequence[Prices], stages: int) -> Values:
    """A row of worths and costs for each of some prices, with prices of blocks varied."""
    rows = []
    for one in prices:
        cost_s = one.cost_s(columns)[stages:] - one.gpus_s * columns.share_of_gpus
        for factor in VARIED:
            worth_s = factor * one.layers_s
            beside_s = (cost_s - worth_s * columns.share_of_layers).min(axis=1).sum()
            rows.append((worth_s, one.gpus_s, beside_s))
    return np.array(rows)


def _highest(lines: Values, layers: Values, gpus: Values) -> Values:
    """The highest line at each share of blocks and GPUs (K)."""
    layers_s, gpus_s, beside_s = lines.T[:, :, None]
    return np.asarray((layers_s * layers + gpus_s * gpus + beside_s).max(axis=0))


def alone_s(menus: BoxMenus, limit_s: float) -> float:
    """The least seconds of a group's pipelines of a single stage, up to a limit."""
    cluster, group = menus.problem.cluster, menus.group
    places = [
        StagePosition(
            mesh=mesh,
            place_in_node=cluster.like_rank(0, mesh.num_gpus),
            layers=menus.problem.workload.model.layers,
            in_flight=1,
            is_first=True,
            is_last=True,
        )
        for mesh in group.meshes
        if mesh.num_gpus == cluster.num_gpus and lies_well(0, mesh.num_gpus, cluster)
    ]
    menus.prepare(places, limit_s)
    least_s = limit_s
    for place in places:
        options = menus[place]
        nothing = no_stages(len(options))
        whole_s = prepended(options.times, nothing, group.micro_batches, 1).whole
        least_s = min([least_s, *whole_s.tolist()])
    return least_s


def _most_stages(menus: BoxMenus) -> int:
    smallest = min(mesh.num_gpus for mesh in menus.group.meshes)
    return min(menus.problem.workload.model.layers, menus.problem.cluster.num_gpus // smallest)


def _columns(menus: BoxMenus, limit_s: float) -> tuple[Sequence[Mesh], Columns]:
    """The columns of stages in pipelines of several stages that take less than a limit, and their
    meshes."""
    places = [*_places(menus, limit_s)]
    numbers: dict[tuple[Mesh, int], int] = {}
    ends = [
        ENDS * numbers.setdefault((place.mesh, place.layers), len(numbers)) + _end(place)
        for place in places
    ]
    # Where no stage is that fits, none is faster.
    found = np.full((4, ENDS * len(numbers)), limit_s)
    for options, of_place in menus.least(places, limit_s):
        times = options.times
        passed_s = times.through_forward_s + times.within_forward_s + times.through_backward_s
        own = np.stack([passed_s, times.point_to_point_s, times.forward_s, times.backward_s])
        end = np.array(ends, dtype=np.intp)[of_place]
        in_order = np.argsort(end, kind="stable")
        first = np.flatnonzero(np.diff(end[in_order], prepend=-1))
        here = end[in_order[first]]
        least_s = np.minimum.reduceat(own[:, in_order], first, axis=1) if len(first) else own
        found[:, here] = np.minimum(found[:, here], least_s)
    times_s = found.reshape(4, -1, ENDS)
    kept = np.flatnonzero((times_s < limit_s).any(axis=(0, 2)))
    passed_s, sent_s, forward_s, backward_s = times_s[:, kept].swapaxes(1, 2)
    every = [*numbers]
    meshes = [every[row][0] for row in kept.tolist()]
    columns = Columns(
        micro_batches=menus.group.micro_batches,
        all_layers=menus.problem.workload.model.layers,
        all_gpus=menus.problem.cluster.num_gpus,
        layers=np.array([every[row][1] for row in kept.tolist()], dtype=np.intp),
        gpus=np.array([mesh.num_gpus for mesh in meshes], dtype=np.intp),
        passed_s=passed_s,
        # The last stage sends nothing on.
        sent_s=sent_s[[BETWEEN, FIRST]].min(axis=0),
        forward_s=forward_s,
        backward_s=backward_s,
    )
    return meshes, columns


def _end(place: StagePosition) -> int:
    return FIRST if place.is_first else LAST if place.is_last else BETWEEN


def _places(menus: BoxMenus, limit_s: float) -> Iterator[StagePosition]:
    """A place for each mesh, number of blocks and place in a node, where a stage needs the least
    memory: as the first stage, as the last one, and between them."""
    problem, group, work = menus.problem, menus.group, menus.work
    layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
    least_s = min(work[mesh].block_s for mesh in group.meshes)
    each_s, gpu_s = limit_s / group.micro_batches, group.least_gpu_s(work, 1)
    for mesh in group.meshes:
        if mesh.num_gpus == gpus:
            continue
        block_s = work[mesh].block_s
        most = work[mesh].blocks_within(each_s, layers - 1)
        fewest = layers - _most_elsewhere(each_s * (gpus - mesh.num_gpus), gpu_s, layers)
        for count in range(fewest, most + 1):
            if count * block_s + (layers - count) * least_s >= limit_s:
                break
            for place in sorted(_places_in_node(problem, mesh.num_gpus)):
                between = StagePosition(
                    mesh=mesh,
                    place_in_node=place,
                    layers=count,
                    in_flight=1,
                    is_first=False,
                    is_last=False,
                )
                yield between
                yield between._replace(is_last=True)
                if place == problem.cluster.like_rank(0, mesh.num_gpus):
                    yield between._replace(is_first=True)


def _most_elsewhere(gpus_s: float, gpu_s: float, layers: int) -> int:
    """The most blocks in the other stages, which have so many GPU-seconds for a micro-batch: a
    block takes at least ``gpu_s`` of them."""
    return math.ceil(min(gpus_s / gpu_s, layers - 1))


def _places_in_node(problem: Problem, gpus: int) -> set[int]:
    cluster = problem.cluster
    ranks = cluster.num_gpus if cluster.others else cluster.gpus_per_node
    return {
        cluster.like_rank(rank, gpus)
        for rank in range(min(ranks, cluster.num_gpus - gpus + 1))
        if lies_well(rank, gpus, cluster)
    }
