"""Training on documents of different lengths: distributes them over micro-batches, whose work then
differs, and simulates steps with these micro-batches.

A step has a fixed number of micro-batches, each with a fixed number of sequences of at most a
context length. ``padded``: each document is a sequence, padded to the longest of its micro-batch.
``sorted``: likewise, but documents are ordered by length, so that micro-batches and ranks have
documents of similar length. ``packed``: documents fill sequences of the whole context, and
attention stays within each document. ``balanced``: the same documents as in packing, distributed
over micro-batches by their cost, without padding.

Axes: D documents, R data-parallel ranks, M micro-batches of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.core.values import reject
from mistlab.graph.symbols import sizes_of_candidates
from mistlab.plan.lengths import DocumentLengths, balanced, best_fit
from mistlab.plan.plan import Plan
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from simulators.variability import Quantiles

Arrangement = Literal["padded", "sorted", "packed", "balanced"]
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)

# The greatest length of a document at which attention takes as long as all other operators: with
# more, attention takes no time worth counting.
MOST_EVEN = 10**9
# The name of the plan dimension that gives the number of sequences in a micro-batch.
SEQUENCES = sizes_of_candidates()["b"]


def sequences_of(plan: Plan) -> int:
    """The number of sequences in a micro-batch, which must be the same in all stages."""
    counts = {one.degree(SEQUENCES) for one in plan.stages}
    if len(counts) > 1:
        reject(
            f"plan.stages: {SEQUENCES} differs between stages: give all stages the same {SEQUENCES}"
        )
    return counts.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The work of a step's micro-batches, with a row for each rank: each one's tokens including
    padding, and its sum of squared document lengths, to which attention is proportional; and the
    number of tokens without padding.
    """

    tokens: Floats
    squares: Floats
    real_tokens: float

    @property
    def padding(self) -> float:
        """The share of a step's tokens that are padding."""
        return 1 - self.real_tokens / float(self.tokens.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCosts:
    """The time of one token, and of one squared token (in attention), as shares of the time of a
    full micro-batch.
    """

    token: float
    square: float

    @classmethod
    def of(cls, simulator: EventSimulator, plan: Plan) -> Self:
        """The costs of tokens for a plan, from two predictions: with whole sequences, and with
        twice as many of half the length. Halved sequences take half the time for attention, and the
        same time for everything else.
        """
        work = simulator.workload
        half = replace(
            work, sequence_length=work.sequence_length // 2, global_batch=2 * work.global_batch
        )
        sequences = sequences_of(plan)
        doubled: dict[str, Any] = {SEQUENCES: 2 * sequences}
        stages = [replace(one, **doubled) for one in plan.stages]
        halves = replace(plan, stages=tuple(stages))
        whole_s, half_s = (
            sum(one.stable_s for one in predictor.predict(asked).stages)
            for predictor, asked in (
                (SymbolicPredictor(workload=work, cluster=simulator.cluster), plan),
                (SymbolicPredictor(workload=half, cluster=simulator.cluster), halves),
            )
        )
        attention = min(max(2 * (whole_s - half_s) / whole_s, 0.0), 1.0)
        context = work.sequence_length
        return cls(
            token=(1 - attention) / (sequences * context),
            square=attention / (sequences * context**2),
        )

    @property
    def even_tokens(self) -> int:
        """The length of a document at which attention takes as long as all other operators."""
        return min(round(self.token / self.square), MOST_EVEN) if self.square else MOST_EVEN

    def work(self, batches: Batches) -> Floats:
        """The times of each rank's micro-batches, relative to the time of a full micro-batch."""
        return self.token * batches.tokens + self.square * batches.squares


@dataclass(slots=True, kw_only=True)
class Arranger:
    """Draws documents at random, and arranges them into the micro-batches of one step after
    another.
    """

    lengths: DocumentLengths
    costs: LengthCosts
    ranks: int
    micro_batches: int
    sequences: int
    context: int
    draw: np.random.Generator
    _waiting: Ints | None = None

    def step(self, way: Arrangement) -> Batches:
        """Draw the documents of the next step; returns the work of its micro-batches."""
        if way in ("packed", "balanced"):
            bins = self._packed()
            return self._balanced(bins) if way == "balanced" else self._of_bins(bins)
        lengths = self.lengths.at(
            self.draw.random(self.ranks * self.micro_batches * self.sequences)
        )
        if way == "sorted":
            # Documents of similar length go to different ranks, so that micro-batches with the same
            # number take about equally long on all ranks.
            lengths = np.sort(lengths).reshape(self.micro_batches, self.sequences, self.ranks)
            rows = lengths.transpose(2, 0, 1)
        else:
            rows = lengths.reshape(self.ranks, self.micro_batches, self.sequences)
        longest = rows.max(axis=2).astype(float)
        return Batches(
            tokens=self.sequences * longest,
            squares=self.sequences * longest**2,
            real_tokens=float(lengths.sum()),
        )

    def documents(self, way: Arrangement) -> list[list[int]]:
        """Draw the documents of the next step and distribute them; returns the lengths of the
        documents in each micro-batch of each rank.
        """
        bins = self._packed()
        dealt = self._dealt(bins) if way == "balanced" else None
        if dealt is not None:
            return dealt
        size = self.sequences
        return [
            [length for one in bins[at : at + size] for length in one]
            for at in range(0, len(bins), size)
        ]

    def _packed(self) -> list[list[int]]:
        """Pack documents into the sequences of a step: the longest document first, each into the
        sequence where it leaves the least space. Documents that do not fit wait for the next step.
        """
        count = self.ranks * self.micro_batches * self.sequences
        queue = [] if self._waiting is None else [self._waiting]
        missing = count * self.context - sum(int(one.sum()) for one in queue)
        while missing > 0:
            more = self.lengths.at(self.draw.random(max(1, int(missing / self.lengths.mean))))
            queue.append(more)
            missing -= int(more.sum())
        waiting = np.sort(np.concatenate(queue))[::-1]
        places = best_fit(waiting, count, self.context)
        bins = [waiting[places == index].tolist() for index in range(count)]
        self._waiting = waiting[places < 0]
        # The first sequences hold the longest documents, so sequences are shuffled before they are
        # given to ranks.
        return [bins[index] for index in self.draw.permutation(count)]

    def _of_bins(self, bins: Sequence[Sequence[int]]) -> Batches:
        shape = (self.ranks, self.micro_batches, self.sequences)
        squares = np.array([float(np.square(np.array(one, dtype=float)).sum()) for one in bins])
        return Batches(
            tokens=np.full(shape[:2], float(self.sequences * self.context)),
            squares=squares.reshape(shape).sum(axis=2),
            real_tokens=float(sum(map(sum, bins))),
        )

    def _balanced(self, bins: Sequence[Sequence[int]]) -> Batches:
        dealt = self._dealt(bins)
        if dealt is None:
            return self._of_bins(bins)
        shape = (self.ranks, self.micro_batches)
        tokens = np.array([float(sum(one)) for one in dealt])
        squares = np.array([float(sum(length**2 for length in one)) for one in dealt])
        return Batches(
            tokens=tokens.reshape(shape),
            squares=squares.reshape(shape),
            real_tokens=float(tokens.sum()),
        )

    def _dealt(self, bins: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """The lengths of the documents in each micro-batch of a step, with balanced work; None if
        there is no space for some document.
        """
        documents = np.array([length for each in bins for length in each])
        count, room = self.ranks * self.micro_batches, self.sequences * self.context
        parts = balanced(documents, count, room, self.costs.even_tokens)
        if parts is None:
            return None
        return [documents[parts == index].tolist() for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSteps:
    """The result of simulated steps: their seconds, the document tokens per second, the share of
    padding, and the mean share of a step that a rank spends waiting for the slowest rank.
    """

    steps: Quantiles
    tokens_per_s: float
    padding: float
    waits: float


def played_steps(
    arranger: Arranger,
    way: Arrangement,
    play: Callable[[Sequence[float]], float],
    samples: int,
    seed: int,
) -> PlayedSteps:
    """Simulate steps whose documents are distributed in one ``way`` (padded, sorted, packed or
    balanced); a step takes as long as its slowest rank's iteration. ``play`` returns the seconds of
    an iteration, given the work of a rank's micro-batches.
    """
    steps, real, every, waits = [], 0.0, 0.0, []
    for _ in range(samples):
        batches = arranger.step(way)
        of_ranks = [play(row) for row in arranger.costs.work(batches).tolist()]
        steps.append(max(of_ranks))
        waits.append(1 - float(np.mean(of_ranks)) / steps[-1])
        real += batches.real_tokens
        every += float(batches.tokens.sum())
    return PlayedSteps(
        steps=Quantiles.of(steps, seed),
        tokens_per_s=real / sum(steps),
        padding=1 - real / every,
        waits=float(np.mean(waits)),
    )
