"""Lower bounds of pipelines' iteration times by a linear relaxation, in which blocks and GPUs have
dual prices.

Axes: M columns, S positions from the last stage, E kinds of stage: last, inner and first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.cost.order_path import least_sends_of
from mistlab.cost.pipeline import no_stages, prepended
from mistlab.graph.library import graph_of
from mistlab.job.search import Problem
from mistlab.stages.stage_batch import StageTimes
from searchers.exact.box_menus import BoxMenus
from searchers.exact.candidates import StagePosition
from searchers.exact.divisions import like_blocks
from searchers.exact.partials import Partials
from searchers.meshes import Mesh, lies_well

# Finds the dual prices of blocks and GPUs that give the highest lower bounds.
#
# Axes of arrays: M columns of the linear programme, S positions counted from the last stage, E
# kinds of stage (last, inner, first).


# In the linear programme, missing or surplus blocks and GPUs cost this multiple of the upper bound,
# so that the programme always has a solution.
FAR = 50.0
# Row indices of the last, the inner and the first stages in tables with a row for each kind of
# stage.
LAST, BETWEEN, FIRST = range(3)
ENDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The columns of the linear programme. Each stands for a stage with a number of blocks on a
    number of GPUs: its least times over all memory-saving strategies, as last, inner and first
    stage.

    The first stage has the embedding and receives nothing, the last has the head and sends nothing,
    so their times differ from those of inner stages. ``sent_s`` (M) is the time of sends to the
    next stage and back. ``share_of_layers`` (M) is the share of the model's blocks in each column,
    weighted by their work if kinds of blocks alternate.
    """

    micro_batches: int
    all_layers: int
    all_gpus: int
    layers: Rows
    gpus: Rows
    share_of_layers: Floats
    passed_s: Floats
    sent_s: Floats
    forward_s: Floats
    backward_s: Floats
    # If true, only the latency of a single micro-batch counts, as if no stage ever stalled.
    is_passage: bool = False

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def passing(self) -> Self:
        """A copy of the columns of the linear programme, in which a stage costs its share of one
        micro-batch's latency alone.
        """
        return replace(self, is_passage=True)

    @property
    def share_of_gpus(self) -> Floats:
        """For each column of the linear programme, the share of all GPUs that its stage uses."""
        return np.asarray(self.gpus / self.all_gpus)

    def merged(self) -> Self:
        """A copy in which columns with equal shares of blocks and of GPUs become one column with
        the least of each time.
        """
        told_apart = np.stack([self.share_of_layers, self.gpus])
        _, first, which = np.unique(told_apart, axis=1, return_index=True, return_inverse=True)
        least: dict[str, Any] = {}
        for name in ("passed_s", "sent_s", "forward_s", "backward_s"):
            times = getattr(self, name)
            column = np.full((*times.shape[:-1], len(first)), np.inf)
            np.minimum.at(column.T, which.reshape(-1), times.T)
            least[name] = column
        return replace(
            self,
            layers=self.layers[first],
            gpus=self.gpus[first],
            share_of_layers=self.share_of_layers[first],
            **least,
        )

    def latencies_s(self, stages: int) -> Floats:
        """The latency of a micro-batch through a stage, a row for each position in the pipeline and
        a column for each kind of stage considered; the last stage sends nothing on.
        """
        passed_s = self.passed_s[_ends(stages)]
        passed_s[1:] += self.sent_s
        return passed_s

    def waits_s(self, stages: int) -> Floats:
        """The time that a pipeline takes beyond its latency if it stalls at a stage, a row for each
        position in the pipeline and a column for each stage considered.
        """
        count = 1 if self.is_passage else self.micro_batches
        ahead = np.minimum(count, np.arange(1, stages + 1)) - 1
        forward_s, backward_s = (own[_ends(stages)] for own in (self.forward_s, self.backward_s))
        return np.asarray((count - 1) * (forward_s + backward_s) - ahead[:, None] * forward_s)


def _ends(stages: int) -> list[int]:
    """The kind of stage (last, inner or first) at each position of a pipeline of at least two
    stages, counted from the end.
    """
    return [LAST, *[BETWEEN] * (stages - 2), FIRST]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Dual prices: weights of the stages' positions and of the shares of blocks and GPUs, which add
    up to at most 1; and what all blocks and all GPUs are worth, in seconds.
    """

    positions: Floats
    of_layers: float
    of_gpus: float
    layers_s: float
    gpus_s: float

    @classmethod
    def made(cls, weights: Floats, layers_s: float, gpus_s: float) -> Self:
        """Prices whose weights are proportional to ``weights`` and add up to 1; the last two
        weights are those of the shares of blocks and GPUs.
        """
        weights = np.maximum(weights, 0.0)
        weights = weights / max(weights.sum(), 1e-300)
        return cls(
            positions=weights[:-2],
            of_layers=float(weights[-2]),
            of_gpus=float(weights[-1]),
            layers_s=layers_s,
            gpus_s=gpus_s,
        )

    def for_stages(self, stages: int) -> Self:
        """The prices for pipelines of another number of stages; weights of positions are
        interpolated.
        """
        at = np.linspace(0, len(self.positions) - 1, stages)
        positions = np.interp(at, np.arange(len(self.positions)), self.positions)
        weights = np.array([*positions, self.of_layers, self.of_gpus])
        return type(self).made(weights, self.layers_s, self.gpus_s)

    def raised(self, factor: float) -> Self:
        """A copy of the dual prices with the weights of all positions and shares multiplied by a
        factor.
        """
        return replace(
            self,
            positions=factor * self.positions,
            of_layers=factor * self.of_layers,
            of_gpus=factor * self.of_gpus,
        )

    def weight_of(self, after: int, layers: Floats, gpus: Floats) -> Floats:
        """The sum of the dual weights of the stages that partial pipelines of ``after`` stages
        still need; ``layers`` and ``gpus`` are the shares of blocks and GPUs left for these.
        """
        positions = self.positions[after:].sum()
        return np.asarray(positions + self.of_layers * layers + self.of_gpus * gpus)

    def cost_s(self, columns: Columns) -> Floats:
        """The cost in seconds of each column of the linear programme at each position in the
        pipeline: its latency plus its weighted stall.
        """
        stages = len(self.positions)
        weights = self.positions[:, None] + (
            self.of_layers * columns.share_of_layers + self.of_gpus * columns.share_of_gpus
        )
        return columns.latencies_s(stages) + weights * columns.waits_s(stages)

    def reduced_cost_s(self, columns: Columns) -> Floats:
        """The reduced cost in seconds of each column of the linear programme at each position in
        the pipeline: its cost minus what its blocks and GPUs are worth.
        """
        worth_s = self.layers_s * columns.share_of_layers + self.gpus_s * columns.share_of_gpus
        return self.cost_s(columns) - worth_s

    def bound_s(self, columns: Columns) -> float:
        """The lower bound in seconds that these prices give for all pipelines composed of these
        columns.
        """
        least_s = self.reduced_cost_s(columns).min(axis=1).sum()
        return float(least_s + self.layers_s + self.gpus_s)


def best_prices(
    columns: Columns, stages: int, near: Prices | None, enough_s: float
) -> tuple[Prices, float]:
    """The dual prices with the highest lower bound for pipelines of ``stages`` stages, and that
    bound. The prices ``near``, found for a similar number of stages, are taken instead if their
    bound is at least ``enough_s``.
    """
    if near is not None:
        prices = near.for_stages(stages)
        bound_s = prices.bound_s(columns)
        if bound_s >= enough_s:
            return prices, bound_s
    prices = _solved(columns.merged(), stages, FAR * enough_s)
    return prices, prices.bound_s(columns)


def _solved(columns: Columns, stages: int, far_s: float) -> Prices:
    """Finds the dual prices by linear programming. Its variables are the share of each column at
    each position in the pipeline, missing and surplus blocks and GPUs, and the longest stall.
    """
    from scipy import sparse  # noqa: PLC0415 (slow to import)
    from scipy.optimize import linprog  # noqa: PLC0415

    waits_s, shares = columns.waits_s(stages), [columns.share_of_layers, columns.share_of_gpus]
    longest = np.ones((stages + 2, 1))
    waits = sparse.vstack(
        [
            sparse.block_diag([row[None] for row in waits_s]),
            *((share * waits_s).reshape(1, -1) for share in shares),
        ]
    )
    most = sparse.hstack([waits, np.zeros((stages + 2, 4)), -longest])
    each = sparse.hstack(
        [sparse.block_diag([np.ones((1, len(columns)))] * stages), np.zeros((stages, 5))]
    )
    totals = [np.tile(share, stages)[None] for share in shares]
    off = np.array([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])
    equal = sparse.vstack(
        [
            each,
            np.column_stack([np.concatenate(totals), np.array(off), np.zeros((2, 1))]),
        ]
    )
    cost = np.concatenate([columns.latencies_s(stages).reshape(-1), np.full(4, far_s), [1.0]])
    solution = linprog(
        cost,
        A_ub=most.tocsr(),
        b_ub=np.zeros(stages + 2),
        A_eq=equal.tocsr(),
        b_eq=np.ones(stages + 2),
        method="highs",
    )
    layers_s, gpus_s = solution.eqlin.marginals[-2:].tolist()
    return Prices.made(-solution.ineqlin.marginals, layers_s, gpus_s)


# Lower bounds of pipelines with unequal numbers of GPUs per stage, by allowing fractional stages.
#
# A pipeline of S stages takes a *column* at each position: a mesh and a number of blocks, with the
# minimum times of any memory-saving strategy. The columns together use all blocks and all GPUs. Let
# p be a stage's position from the end, P the latency of a micro-batch through a stage there and
# back with its sends, and t = f + b the stage's steady-state time for a forward and a backward
# pass. Of G micro-batches, the first may have to wait at one stage i (``mistlab.cost.chains``), so
# a pipeline takes at least
#
#     sum P + r_i    with    r_i = (G - 1) t_i - (min(G, p_i) - 1) f_i
#
# The largest r is at least any weighted mean of all r. Weights may belong to positions, or be
# shares of the blocks or of the GPUs. Blocks and GPUs have dual prices. The bound is then the worth
# of all blocks and GPUs, plus for each position the smallest reduced cost of a column. It holds for
# any weights and prices; a linear programme finds those that maximise it.
#
# Axes of arrays: M columns, S positions from the end, K partial pipelines.


# Several dual prices are tried, and the highest bound is taken: the weights of the missing stages
# are multiplied by each of the first factors, the prices of blocks by each of the second.
RAISED = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
VARIED = (0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """Lower bounds of a group's pipelines with several stages, where these may beat an upper bound.

    ``prices`` has two dual prices for each number of stages: for the whole iteration time, and for
    the latency of a micro-batch only. ``least_s`` has the lower bound for each number of stages.
    """

    meshes: Sequence[Mesh]
    columns: Columns
    prices: Mapping[int, tuple[Prices, Prices]]
    least_s: Mapping[int, float]
    # For the model's first 0, 1, 2, ... blocks, their share of the least time of all blocks.
    front: Floats
    _lines: dict[int, "list[_Lines]"] = field(default_factory=dict)
    _counts: dict[int, tuple[float, Mapping[Mesh, Sequence[int]]]] = field(default_factory=dict)

    @classmethod
    def of(cls, menus: BoxMenus, limit_s: float) -> Self:
        """The lower bounds for those pipelines of a group that may take less than ``limit_s``; the
        group's candidates in ``menus`` do not change.
        """
        front = _front_of(menus)
        meshes, columns = _columns(replace(menus), limit_s, front)
        prices: dict[int, tuple[Prices, Prices]] = {}
        least_s: dict[int, float] = {}
        if len(columns):
            before = None
            for stages in range(2, _most_stages(menus) + 1):
                menus.ledger.check_time()
                stage_prices, bound_s = best_prices(columns, stages, before, limit_s)
                before = stage_prices
                if bound_s < limit_s:
                    passage, _ = best_prices(columns.passing, stages, None, limit_s)
                    prices[stages], least_s[stages] = (stage_prices, passage), bound_s
        return cls(meshes=meshes, columns=columns, prices=prices, least_s=least_s, front=front)

    def bound_s(self, limit_s: float) -> float:
        """A lower bound in seconds of all pipelines with several stages; ``limit_s`` if none of
        them can beat it.
        """
        return min([limit_s, *self.least_s.values()])

    def most_stages(self, limit_s: float) -> int:
        """The most stages of a pipeline that can take less than ``limit_s``; 1 if no pipeline with
        several stages can.
        """
        return max([1, *(stages for stages, least_s in self.least_s.items() if least_s < limit_s)])

    def counts(self, after: int, limit_s: float) -> Mapping[Mesh, Sequence[int]]:
        """How many blocks a stage on each mesh can have, with ``after`` stages behind it, in a
        pipeline of several stages that takes less than ``limit_s``.
        """
        known_s, counts = self._counts.get(after, (-1.0, {}))
        if known_s != limit_s:
            counts = self._worked_out(after, limit_s)
            self._counts[after] = limit_s, counts
        return counts

    def _worked_out(self, after: int, limit_s: float) -> Mapping[Mesh, Sequence[int]]:
        may = np.zeros(len(self.columns), dtype=np.bool_)
        for stages, (stage_prices, _) in self.prices.items():
            if stages > after and self.least_s[stages] < limit_s:
                reduced_cost_s = stage_prices.reduced_cost_s(self.columns)[after]
                may |= self.least_s[stages] + reduced_cost_s - reduced_cost_s.min() < limit_s
        layers_of: dict[Mesh, set[int]] = {}
        for row in np.flatnonzero(may).tolist():
            layers_of.setdefault(self.meshes[row], set()).add(int(self.columns.layers[row]))
        return {mesh: sorted(counts) for mesh, counts in layers_of.items()}

    def rest_s(self, partials: Partials, stages: int) -> Floats:
        """For each partial pipeline, all of which have ``stages`` stages, a lower bound in seconds
        of the pipelines that it can become.
        """
        if not len(partials):
            return np.empty(0)
        if stages not in self._lines:
            self._lines[stages] = [
                _Lines.of(self.columns, *prices, stages)
                for count, prices in self.prices.items()
                if count > stages
            ]
        # Partial pipelines with equal numbers of blocks and GPUs follow one another, so a bound is
        # computed once for each run of them.
        changes = np.diff(partials.layers).astype(bool) | np.diff(partials.gpus).astype(bool)
        first = np.flatnonzero(np.concatenate([[True], changes]))
        left = (
            self.front[self.columns.all_layers - partials.layers[first]],
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
    """Lower bounds for the stages that a partial pipeline still needs, as linear functions (lines)
    of the shares of blocks and GPUs that are left.

    A line has a worth of all blocks, a worth of all GPUs, and a constant. It is a valid bound as
    long as its weights sum to at most 1.
    """

    prices: Prices
    stages: int
    passing: Floats
    raised: Floats

    @classmethod
    def of(cls, columns: Columns, prices: Prices, passage: Prices, stages: int) -> Self:
        """The linear functions that dual prices give for pipelines of which the last ``stages``
        stages are known.
        """
        return cls(
            prices=prices,
            stages=stages,
            passing=_lines(columns.passing, [passage], stages),
            raised=_lines(columns, [prices.raised(factor) for factor in RAISED], stages),
        )

    def at(self, layers: Floats, gpus: Floats) -> tuple[Floats, Floats]:
        """For each partial pipeline, the least latency of the stages that it still needs, and the
        least sum of that latency and of their longest stall.
        """
        through = _highest(self.passing, layers, gpus)
        weight = self.prices.weight_of(self.stages, layers, gpus)
        around = np.full(len(layers), -np.inf)
        for number, factor in enumerate(RAISED):
            lines = self.raised[number * len(VARIED) : (number + 1) * len(VARIED)]
            holds = factor * weight <= 1 + 1e-12
            bound = np.where(holds, _highest(lines, layers, gpus), -np.inf)
            around = np.maximum(around, bound)
        return through, np.maximum(around, through)


def _lines(columns: Columns, prices: Sequence[Prices], stages: int) -> Floats:
    """A linear function for each of the given dual prices and each factor of the price of blocks:
    what all blocks and all GPUs are worth, and a constant.
    """
    rows = []
    for price_set in prices:
        cost_s = price_set.cost_s(columns)[stages:] - price_set.gpus_s * columns.share_of_gpus
        for factor in VARIED:
            worth_s = factor * price_set.layers_s
            beside_s = (cost_s - worth_s * columns.share_of_layers).min(axis=1).sum()
            rows.append((worth_s, price_set.gpus_s, beside_s))
    return np.array(rows)


def _highest(lines: Floats, layers: Floats, gpus: Floats) -> Floats:
    """The highest of several linear functions, for each pair of shares of blocks and GPUs."""
    layers_s, gpus_s, beside_s = lines.T[:, :, None]
    return np.asarray((layers_s * layers + gpus_s * gpus + beside_s).max(axis=0))


def alone_s(menus: BoxMenus, limit_s: float) -> float:
    """A lower bound in seconds of a group's pipelines with a single stage, at most ``limit_s``."""
    positions = menus.alone
    menus.prepare(positions, limit_s)
    least_s = limit_s
    for position in positions:
        options = menus[position]
        nothing = no_stages(len(options))
        whole_s = prepended(options.times, nothing, menus.group.micro_batches, 1).whole
        least_s = min([least_s, *whole_s.tolist()])
    return least_s


def _most_stages(menus: BoxMenus) -> int:
    smallest = min(mesh.num_gpus for mesh in menus.group.meshes)
    return min(menus.problem.workload.model.layers, menus.problem.cluster.num_gpus // smallest)


def _front_of(menus: BoxMenus) -> Floats:
    """For the model's first 0, 1, 2, ... blocks, their share of the least time of all blocks."""
    front_s = menus.group.front_gpu_s(menus.work, menus.problem.workload.model.layers)
    return np.asarray(front_s / front_s[-1])


def _columns(menus: BoxMenus, limit_s: float, front: Floats) -> tuple[Sequence[Mesh], Columns]:
    """The columns of the linear programme (stages that may occur in a pipeline of several stages
    under ``limit_s``), and the mesh of each.
    """
    positions = [*_places(menus, limit_s)]
    numbers: dict[tuple[Mesh, int, int], int] = {}
    ends = [
        ENDS
        * numbers.setdefault((position.mesh, position.first_block, position.layers), len(numbers))
        + _end(position)
        for position in positions
    ]
    # Every time starts from the upper bound, and keeps it where no stage fits in memory.
    fastest_s = np.full((4, ENDS * len(numbers)), limit_s)
    for options, of_place in menus.least(positions, limit_s):
        times = options.times
        passed_s = times.through_forward_s + times.within_forward_s + times.through_backward_s
        stage_s = np.stack([passed_s, least_sent_s(times), times.forward_s, times.backward_s])
        end = np.array(ends, dtype=np.intp)[of_place]
        in_order = np.argsort(end, kind="stable")
        first = np.flatnonzero(np.diff(end[in_order], prepend=-1))
        here = end[in_order[first]]
        least_s = (
            np.minimum.reduceat(stage_s[:, in_order], first, axis=1) if len(first) else stage_s
        )
        fastest_s[:, here] = np.minimum(fastest_s[:, here], least_s)
    times_s = fastest_s.reshape(4, -1, ENDS)
    kept = np.flatnonzero((times_s < limit_s).any(axis=(0, 2)))
    passed_s, sent_s, forward_s, backward_s = times_s[:, kept].swapaxes(1, 2)
    every = [*numbers]
    meshes = [every[row][0] for row in kept.tolist()]
    columns = Columns(
        micro_batches=menus.group.micro_batches,
        all_layers=menus.problem.workload.model.layers,
        all_gpus=menus.problem.cluster.num_gpus,
        layers=np.array([every[row][2] for row in kept.tolist()], dtype=np.intp),
        share_of_layers=np.array(
            [front[sum(every[row][1:])] - front[every[row][1]] for row in kept.tolist()]
        ),
        gpus=np.array([mesh.num_gpus for mesh in meshes], dtype=np.intp),
        passed_s=passed_s,
        # The last stage sends nothing to a next stage, so only inner and first stages count for
        # sends.
        sent_s=sent_s[[BETWEEN, FIRST]].min(axis=0),
        forward_s=forward_s,
        backward_s=backward_s,
    )
    return meshes, columns


def least_sent_s(times: StageTimes) -> Floats:
    """The least seconds of a micro-batch's sends to the next stage and back, of stages with one
    micro-batch in flight, for any place of a pipeline: with several in flight, no send to the next
    stage is later, and may be as early as the one back.
    """
    there_s, back_s = least_sends_of(times)
    return np.asarray(np.minimum(there_s, back_s) + back_s)


def _end(position: StagePosition) -> int:
    return FIRST if position.is_first else LAST if position.is_last else BETWEEN


def _places(menus: BoxMenus, limit_s: float) -> Iterator[StagePosition]:
    """For each mesh, number of blocks and first rank in a node, the stage as first, last and inner
    stage of a pipeline, with as few micro-batches in flight as possible.
    """
    problem, group, work = menus.problem, menus.group, menus.work
    layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
    least_s = min(work[mesh].shortest_s for mesh in group.meshes)
    like = like_blocks(graph_of(problem.workload).pattern, layers)
    each_s, gpu_s = limit_s / group.micro_batches, group.least_gpu_s(work, 1)
    for mesh in group.meshes:
        if mesh.num_gpus == gpus:
            continue
        block_s = work[mesh].shortest_s
        most = work[mesh].blocks_within(each_s, layers - 1)
        fewest = layers - _most_elsewhere(each_s * (gpus - mesh.num_gpus), gpu_s, layers)
        for count in range(fewest, most + 1):
            if count * block_s + (layers - count) * least_s >= limit_s:
                break
            for rank in sorted(_places_in_node(problem, mesh.num_gpus)):
                between = StagePosition(
                    mesh=mesh,
                    place_in_node=rank,
                    layers=count,
                    in_flight=1,
                    is_first=False,
                    is_last=False,
                )
                for first in np.unique(like[1 : layers - count, count]).tolist():
                    yield between._replace(first_block=first)
                yield between._replace(is_last=True, first_block=int(like[layers - count, count]))
                if rank == problem.cluster.like_rank(0, mesh.num_gpus):
                    yield between._replace(is_first=True)


def _most_elsewhere(gpus_s: float, gpu_s: float, layers: int) -> int:
    """The most blocks that all stages but one can have together, if they have ``gpus_s``
    GPU-seconds for each micro-batch, and a block takes at least ``gpu_s`` GPU-seconds.
    """
    return math.ceil(min(gpus_s / gpu_s, layers - 1))


def _places_in_node(problem: Problem, gpus: int) -> set[int]:
    cluster = problem.cluster
    ranks = cluster.num_gpus if cluster.others else cluster.ranks_alike
    return {
        cluster.like_rank(rank, gpus)
        for rank in range(min(ranks, cluster.num_gpus - gpus + 1))
        if lies_well(rank, gpus, cluster)
    }
