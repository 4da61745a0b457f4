"""Chooses which consecutive blocks each stage has, so that the pipeline is fastest; stages are
added from the last to the first.

A partial pipeline (the last stages) is described by its first block and by the delays that it
imposes on stages added in front (``mistlab.cost.chains``). Dominated partial pipelines are pruned,
and so are those that no stages in front can complete below the upper bound. If delays are rounded
down, more of them are equal, and results are lower bounds.

Axes: K partial pipelines, D divisions, S stages, F first blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Ints, Rows
from mistlab.core.distinct import first_of_each
from mistlab.cost.chains import CHAINS, Chains
from mistlab.cost.pipeline import no_stages, prepended
from mistlab.stages.stage_batch import SENDS, TIMES, StageTimes
from searchers.exact.candidates import undominated
from searchers.exact.divisions import RangeTimes
from searchers.exact.partials import chosen_chains, each_of, rounded_down

# If more partial pipelines (the last stages of a pipeline) than this begin at the same block, their
# times are rounded more coarsely, so that more of them are equal.
MOST = 1 << 11


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fronts:
    """Lower bounds for the stages in front of a partial pipeline, by their number and their number
    of blocks: the latency of a micro-batch through them, and that latency plus their longest stall
    (the time by which waiting at one stage delays the pipeline).
    """

    passed_s: Floats
    waited_s: Floats

    @classmethod
    def of(cls, times: RangeTimes, limit_s: float) -> Self:
        """The lower bounds for the first stages of pipelines faster than ``limit_s`` in which all
        stages have the same memory-saving strategy.
        """
        passed_s = times.joined_by_stage(times.passed_s, np.add)[:, 0]
        edges = times.edges(limit_s)
        waited_s = [np.where(passed_s[0] == 0.0, 0.0, np.inf)]
        for within_s, _ in times.within_by_stage(edges[:, 1:]):
            # A stall shorter than the smallest threshold counts as zero, so that the result stays a
            # lower bound.
            lowest = np.concatenate([[0.0], edges[0, 1:-1]])
            waited_s.append((lowest[:, None] + within_s[0]).min(axis=0))
        above = np.where(np.isfinite(passed_s), limit_s, np.inf)
        waited = np.minimum(np.array(waited_s), above)
        return cls(passed_s=passed_s, waited_s=np.maximum(waited, passed_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Behind:
    """Partial pipelines, each the last stages of a pipeline: their first blocks in ascending order,
    and the times of their passes. For each, the index in ``counts`` of its first stage's number of
    blocks, and the row of the partial pipeline without that stage.
    """

    first: Ints
    chains: Chains[Floats]
    column: Ints
    row: Rows

    def chosen(self, rows: Rows) -> Self:
        return type(self)(
            first=self.first[rows],
            chains=chosen_chains(self.chains, rows),
            column=self.column[rows],
            row=self.row[rows],
        )


def least_joined(
    times: RangeTimes, limit_s: float, grain_s: float, check: Callable[[], None]
) -> tuple[float, Ints | None]:
    """A lower bound in seconds of the iteration times over all divisions of the blocks among
    stages, with one memory-saving strategy; and the stages' numbers of blocks in a division close
    to it. The bound is at most ``limit_s``, and it is that division's own time if ``grain_s`` is
    zero and there are few partial pipelines.
    """
    divisions = times.divisions
    fronts, count = Fronts.of(times, limit_s), int(times.micro_batches[0])
    none = np.zeros(1, dtype=np.int64)
    behind = [_Behind(first=none + divisions.layers, chains=no_stages(1), column=none, row=none)]
    for stage in reversed(range(divisions.num_stages)):
        check()
        partials = _in_front(times, behind[-1], stage, count)
        grain = grain_s
        while True:
            if grain:
                partials = _replaced(partials, rounded_down(partials.chains, grain))
            partials = _worth(partials, fronts, stage, limit_s)
            if len(partials.first) <= MOST * max(1, len(np.unique(partials.first))):
                break
            grain = max(2 * grain, limit_s * 1e-7)
        behind.append(partials)
        if not len(partials.first):
            return limit_s, None
    whole = behind[-1].chains.whole
    row = int(whole.argmin())
    shares = []
    for partial in reversed(behind[1:]):
        shares.append(divisions.counts[partial.column[row]])
        row = int(partial.row[row])
    return min(limit_s, float(whole.min())), np.array([shares])


def _replaced(behind: _Behind, chains: Chains[Floats]) -> _Behind:
    return _Behind(first=behind.first, chains=chains, column=behind.column, row=behind.row)


def _in_front(times: RangeTimes, behind: _Behind, stage: int, count: int) -> _Behind:
    """Extend each partial pipeline by a stage in front of it, once for every range of blocks that
    this stage may have.
    """
    divisions = times.divisions
    starts = np.searchsorted(behind.first, np.arange(divisions.layers + 2))
    first, ranges, column, rows = [], [], [], []
    for number, (begins, every, ends) in enumerate(divisions.steps(stage)):
        fits = times.fits[0, every]
        at = starts[ends[fits]]
        each, nth = each_of(np.arange(len(at)), starts[ends[fits] + 1] - at)
        first.append(begins[fits][each])
        ranges.append(every[fits][each])
        column.append(np.full(len(each), number))
        rows.append(at[each] + nth)
    chosen, row = np.concatenate(ranges), np.concatenate(rows)
    own_times = {name: getattr(times.times, name)[0, chosen] for name in TIMES}
    if stage == divisions.num_stages - 1:
        own_times |= {name: np.zeros(len(chosen)) for name in SENDS}
    after = divisions.num_stages - 1 - stage
    chains = prepended(StageTimes(**own_times), chosen_chains(behind.chains, row), count, after + 1)
    partials = _Behind(
        first=np.concatenate(first), chains=chains, column=np.concatenate(column), row=row
    )
    return partials.chosen(np.argsort(partials.first, kind="stable"))


def _worth(partials: _Behind, fronts: Fronts, stage: int, limit_s: float) -> _Behind:
    """The partial pipelines that may still become the fastest pipeline; dominated ones are
    pruned.
    """
    chains, first = partials.chains, partials.first
    front_s = fronts.passed_s[stage, first]
    ways = [
        chains.through + front_s,
        chains.whole,
        np.minimum(chains.around_first, chains.around) + fronts.waited_s[stage, first],
    ]
    rows = np.flatnonzero(np.maximum.reduce(ways) < limit_s)
    table = np.stack([getattr(chains, name)[rows] for name in CHAINS], axis=1)
    kept = [np.empty(0, dtype=np.intp)]
    edges = np.flatnonzero(np.diff(first[rows], prepend=-1, append=-1))
    for start, end in pairwise(edges.tolist()):
        same_first = table[start:end]
        different = first_of_each(same_first)
        kept.append(rows[start + different[undominated([*same_first[different].T])]])
    return partials.chosen(np.sort(np.concatenate(kept)))
