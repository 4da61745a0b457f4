"""Searches uniform plans (all stages save memory in the same way) of models in which kinds of
blocks alternate.

A stage's cost depends on which blocks it has, not only on their number. Ranges of blocks are
predicted for many pipelines together. From their times follow lower bounds over all divisions of
the blocks, and the iteration time of each division.

Axes: C candidates, R ranges, D divisions, S stages.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from mistlab.core.arrays import Floats, Ints, Rows
from mistlab.graph.library import graph_of
from mistlab.job.search import Problem
from mistlab.plan.dimensions import counts_of_blocks, names_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, in_flight
from mistlab.stages.stage_batch import TIMES, StageBatch, StageTimes
from searchers.exact.candidates import savings_columns
from searchers.exact.division_join import least_joined
from searchers.exact.divisions import Divisions, RangeTimes
from searchers.exact.hierarchy import Hierarchy
from searchers.meshes import Pipeline, even_layers, layer_counts
from searchers.savings import Way, stage_of, ways_alike
from searchers.strategy import ROUNDING, Ending, Ledger

# ROWS_TOGETHER: how many candidates for stages one call of the predictor evaluates at most.
# PIPELINES_TOGETHER: how many pipelines are compared at once.
ROWS_TOGETHER = 1 << 13
PIPELINES_TOGETHER = 256
# Times of partial pipelines are rounded down to multiples of a grain, so that fewer differ. As
# shares of the gap to be proven divided by the number of stages: the grain's first size, then the
# divisor by which it shrinks, then the size below which times are no longer rounded.
GRAIN, FINER, FINEST = 0.25, 4.0, 0.001


def takes_ranges(space: SearchSpace) -> bool:
    """Whether this search can handle a space: its only schedule is 1F1B, or all stages are equal
    with equally many blocks.
    """
    are_equal = not space.unequal_stages and space.layers_off_balance == 0
    return space.orders == (DEFAULT_ORDER,) or are_equal


def searched_by_ranges(problem: Problem, space: SearchSpace, ledger: Ledger) -> Ending:
    """The best uniform plan (all stages save memory in the same way). It is proven best if every
    division of the blocks could be tried; otherwise a lower bound is returned with it.
    """
    hierarchy = Hierarchy.of(problem, space, ledger)
    search = RangeSearch(problem=problem, space=space, ledger=ledger)
    ways = [
        _Alike(pipeline=pipeline, way=way, least_s=hierarchy.bound_s(group))
        for group in hierarchy.least_s
        for pipeline in group.equal_pipelines(problem)
        for way in search.ways(pipeline)
    ]
    ways.sort(key=lambda one: one.least_s)
    search.show_even(ways)
    return Ending.of(ledger, search.close(search.bounded(ways)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """A pipeline whose stages all save memory in the same way, with a lower bound of its iteration
    time over all divisions of the blocks.
    """

    pipeline: Pipeline
    way: Way
    least_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSearch:
    """Searches uniform plans (all stages save memory in the same way), with many pipelines per call
    of the predictor.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    _divisions: dict[int, Divisions] = field(default_factory=dict)

    def ways(self, pipeline: Pipeline) -> Iterator[Way]:
        """Every way to save memory that all stages of a pipeline may share."""
        layers, count = self.problem.workload.model.layers, pipeline.num_stages
        most = max(layer_counts(layers, count, self.space)[-1], *even_layers(layers, count), 1)
        yield from ways_alike(self.space, pipeline.meshes[0], most, in_pipeline=count > 1)

    def times(self, pipeline: Pipeline, way: Way) -> RangeTimes:
        """The times of a pipeline's stages with every range of blocks, if all stages save memory in
        this way.
        """
        divisions = self._divisions_of(pipeline.num_stages)
        alike = _Alike(pipeline=pipeline, way=way, least_s=0.0)
        return self._times([alike], divisions, np.arange(len(divisions.asked)))

    def show_even(self, ways: Sequence[_Alike]) -> None:
        """Predict the best plans in which all stages have equally many blocks."""
        for part in _parts(ways, PIPELINES_TOGETHER):
            for alike, divisions in self._by_stages(self._hopeful(part)):
                ranges = divisions.even[0]
                for few in _parts(alike, max(1, ROWS_TOGETHER // len(ranges))):
                    times = self._times(few, divisions, ranges)
                    even = np.array([even_layers(divisions.layers, divisions.num_stages)])
                    seconds = times.even_s()
                    order = np.argsort(seconds, kind="stable").tolist()
                    self._show((float(seconds[row]), few[row], even[0]) for row in order)

    def bounded(self, ways: Sequence[_Alike]) -> list[_Alike]:
        """The pipelines that may beat the best plan, each with a lower bound over all divisions of
        its blocks. The plans closest to these bounds are predicted.
        """
        hopeful: list[_Alike] = []
        for number, part in enumerate(_parts(ways, PIPELINES_TOGETHER)):
            for alike, divisions in self._by_stages(self._hopeful(part)):
                ranges = np.arange(len(divisions.asked))
                for few in _parts(alike, max(1, ROWS_TOGETHER // len(ranges))):
                    times = self._times(few, divisions, ranges)
                    least_s = np.maximum(
                        times.least_s(self.ledger.best_s), [one.least_s for one in few]
                    )
                    for row in np.argsort(least_s, kind="stable").tolist():
                        if least_s[row] >= self.ledger.best_s:
                            break
                        pipeline = few[row]
                        times_of_pipeline = times.chosen(np.array([row]))
                        self._show_best(
                            pipeline,
                            times_of_pipeline,
                            times_of_pipeline.near_best(self.ledger.best_s),
                        )
                        hopeful.append(
                            _Alike(
                                pipeline=pipeline.pipeline,
                                way=pipeline.way,
                                least_s=float(least_s[row]),
                            )
                        )
            rest = ways[(number + 1) * PIPELINES_TOGETHER :][:1]
            self.ledger.bounded(
                min([self.ledger.best_s, *(one.least_s for one in (*hopeful, *rest))])
            )
        return hopeful

    def close(self, ways: Sequence[_Alike]) -> float:
        """A lower bound in seconds of all uniform plans, after trying divisions of the blocks among
        stages by ascending bounds: all divisions or, if there are too many, the most promising
        ones.
        """
        left_s = inf
        in_order = sorted(ways, key=lambda one: one.least_s)
        for alike in in_order:
            if alike.least_s >= self.ledger.best_s:
                break
            self.ledger.bounded(min(left_s, alike.least_s))
            times = self.times(alike.pipeline, alike.way)
            every = times.divisions.every()
            if every is None:
                left_s = min(left_s, self._joined_s(alike, times, left_s))
            else:
                self._show_best(alike, times, every)
        return min(left_s, self.ledger.best_s)

    def _joined_s(self, alike: _Alike, times: RangeTimes, left_s: float) -> float:
        """A lower bound in seconds over all divisions of the blocks among stages, where there are
        too many divisions to try each.
        """
        share, least_s = GRAIN, alike.least_s
        while least_s < self.ledger.best_s * (1 - ROUNDING):
            self.ledger.bounded(min(left_s, least_s))
            best_s = self.ledger.best_s
            grain_s = share * (best_s - least_s) / times.divisions.num_stages
            if share < FINEST:
                grain_s = 0.0
            found_s, shares = least_joined(times, best_s, grain_s, self.ledger.check_time)
            least_s = max(least_s, found_s)
            if shares is not None:
                self._show_best(alike, times, shares)
            if not grain_s:
                break
            share /= FINER
        return least_s

    def _hopeful(self, ways: Sequence[_Alike]) -> list[_Alike]:
        return [one for one in ways if one.least_s < self.ledger.best_s]

    def _by_stages(self, ways: Sequence[_Alike]) -> Iterator[tuple[list[_Alike], Divisions]]:
        """Groups pipelines by their number of stages; with each group come all divisions of the
        blocks among so many stages.
        """
        by_stages: dict[int, list[_Alike]] = defaultdict(list)
        for alike in ways:
            by_stages[alike.pipeline.num_stages].append(alike)
        for count, of_count in by_stages.items():
            yield of_count, self._divisions_of(count)

    def _divisions_of(self, count: int) -> Divisions:
        if count not in self._divisions:
            pattern = graph_of(self.problem.workload).pattern
            layers = self.problem.workload.model.layers
            self._divisions[count] = Divisions.of(tuple(pattern), layers, count, self.space)
        return self._divisions[count]

    def _show_best(self, alike: _Alike, times: RangeTimes, shares: Ints) -> None:
        """Predict the fastest of some divisions of the blocks, if it may beat the best plan; a
        division is a row of block counts.
        """
        seconds = times.seconds_of(times.divisions.ranges_of(shares))
        order = np.argsort(seconds, kind="stable")
        self._show((float(seconds[division]), alike, shares[division]) for division in order)

    def _show(self, fastest: Iterable[tuple[float, _Alike, Ints]]) -> None:
        """Predict the plans of pipelines by ascending times, each with its pipeline and division of
        the blocks, until no further one can beat the best.
        """
        self.ledger.predict_fastest(
            (least_s, _plan(self.space, alike, shares.tolist()))
            for least_s, alike, shares in fastest
        )

    def _times(self, ways: Sequence[_Alike], divisions: Divisions, ranges: Rows) -> RangeTimes:
        """The times of stages with the given ranges of blocks, for pipelines with equally many
        stages. Entries for other ranges of blocks have no meaning.
        """
        size = len(ways), len(divisions.asked)
        batch = self._batch(ways, divisions.asked[ranges])
        costs = self.ledger.stage_costs(batch, engine=self.space.engine)
        every = StageTimes.of(costs.seconds, -1)

        def table(column: Floats) -> Floats:
            whole_table = np.zeros(size)
            whole_table[:, ranges] = column.reshape(len(ways), -1)
            return whole_table

        return RangeTimes(
            divisions=divisions,
            micro_batches=np.array([one.pipeline.micro_batches for one in ways]),
            times=StageTimes(**{name: table(getattr(every, name)) for name in TIMES}),
            fits=table(costs.fits.astype(np.float64)) > 0,
        )

    def _batch(self, ways: Sequence[_Alike], asked: Ints) -> StageBatch:
        """The candidates of all pipelines as one batch: for each pipeline, a stage with each of the
        ``asked`` ranges of blocks.
        """
        stage, first_block, layers = (np.tile(column, len(ways)) for column in asked.T)
        each, count = len(asked), ways[0].pipeline.num_stages
        meshes = [one.pipeline.meshes[0].values() for one in ways]
        savings = np.array([one.way.savings for one in ways], dtype=np.float64)
        of_layers = np.unique(asked[:, 2], return_inverse=True)
        treated = np.array(
            [[one.way.counts_within(own) for own in of_layers[0].tolist()] for one in ways]
        )[:, of_layers[1]].reshape(len(stage), -1)
        held = np.array(
            [
                [in_flight(own, count, alike.pipeline.micro_batches) for own in range(count)]
                for alike in ways
            ]
        )
        cluster, gpus = self.problem.cluster, ways[0].pipeline.meshes[0].num_gpus
        ranks = [cluster.like_rank(rank, gpus) for rank in ways[0].pipeline.first_ranks()]
        return StageBatch(
            layers=layers,
            **{name: np.repeat([mesh[name] for mesh in meshes], each) for name in names_of("mesh")},
            **savings_columns(np.repeat(savings, each, axis=0)),
            **dict(zip(counts_of_blocks(), treated.T, strict=True)),
            in_flight=held[:, asked[:, 0]].reshape(-1),
            has_embedding=(stage == 0).astype(np.int64),
            has_head=(stage == count - 1).astype(np.int64),
            first_rank=np.array(ranks)[stage],
            first_block=first_block,
            micro_batches=np.repeat([one.pipeline.micro_batches for one in ways], each),
        )


def _parts(ways: Sequence[_Alike], size: int) -> Iterator[Sequence[_Alike]]:
    for start in range(0, len(ways), size):
        yield ways[start : start + size]


def _plan(space: SearchSpace, alike: _Alike, shares: Sequence[int]) -> Plan:
    names = names_of("savings")
    stages = []
    for share in shares:
        counts = zip(counts_of_blocks(), alike.way.counts_within(share), strict=True)
        saving = {**dict(zip(names, alike.way.savings, strict=True)), **dict(counts)}
        stages.append(stage_of(alike.pipeline.meshes[0], share, saving))
    return Plan(
        engine=space.engine, micro_batches=alike.pipeline.micro_batches, stages=tuple(stages)
    )
