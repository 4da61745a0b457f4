"""Computes the iteration time of a 1F1B pipeline as its critical path: the longest chain of passes
that wait for one another, from the last stage to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, reduce
from operator import add
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.stages.stage_batch import TIMES, times_of

# Sums and maxima of durations of any kind: numbers, columns of candidates, or expressions of a
# linear programme (``searchers.exact.milp``).


class Duration(Protocol):
    """A duration of any kind, which can be added, subtracted and multiplied by an integer."""

    def __add__(self, other: Any, /) -> Any: ...

    def __sub__(self, other: Any, /) -> Any: ...

    def __mul__(self, other: Any, /) -> Any: ...


Length = TypeVar("Length", bound=Duration)


class Algebra(Protocol[Length]):
    """The maximum and the comparison of durations that are numbers, columns or expressions."""

    def longest(self, name: str, *ways: Length) -> Length:
        """The maximum of some durations; in a linear programme ``name`` names its variable."""
        ...

    def may_exceed(self, lengths: Sequence[Length], others: Sequence[Length]) -> "Condition":
        """Whether any duration in ``lengths`` may exceed any in ``others``, for each candidate."""
        ...

    @property
    def nothing(self) -> Length:
        """A duration of zero seconds, as a number, a column or an expression."""
        ...


class Numbers:
    """The maximum and the comparison of durations that are plain numbers."""

    nothing = 0.0

    def longest(self, _name: str, *ways: float) -> float:
        """The largest of some numbers."""
        return max(ways)

    def may_exceed(self, lengths: Sequence[float], others: Sequence[float]) -> bool:
        """Whether the largest number in ``lengths`` exceeds the smallest in ``others``."""
        return max(lengths) > min(others)


class ColumnAlgebra:
    """The maximum and the comparison of durations that are columns of candidates."""

    def __init__(self, candidates: int) -> None:
        self.nothing = np.zeros(candidates)

    def longest(self, _name: str, *ways: Floats) -> Floats:
        """The largest of some columns' durations, for each candidate."""
        # Taking maxima in pairs is faster than stacking the columns into one table.
        return reduce(np.maximum, ways)

    def may_exceed(self, lengths: Sequence[Floats], others: Sequence[Floats]) -> Bools:
        """Whether the largest of ``lengths`` exceeds the smallest of ``others``, by candidate."""
        longest, shortest = reduce(np.maximum, lengths), reduce(np.minimum, others)
        return np.asarray(longest > shortest)


# Computes when a stage's host has issued its passes: from the beginning of the iteration on, it
# issues one after another.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedChains(Generic[Length]):
    """The durations from the beginning of an iteration until a stage's host has issued certain
    passes; empty tuples if the host delays no pass.

    They end when the host comes to the ``first`` backward pass, or has issued the ``last`` forward
    pass, ``every`` pass, or also the stage's work after them (``ended``).
    """

    first: Sequence[Length] = ()
    last: Sequence[Length] = ()
    every: Sequence[Length] = ()
    ended: Sequence[Length] = ()

    @classmethod
    def of(
        cls, issued: Sequence[Length | None], in_flight: int | Ints, alternating: int | Ints
    ) -> Self:
        """Compute the durations until a stage's host comes to its first backward pass, and until it
        has issued its last forward pass, all passes, and the work after them.

        The stage has ``in_flight`` forward passes before its first backward pass, and
        ``alternating`` more afterwards; ``issued`` are the stage's times named in ``ISSUED``.
        """
        known = [length for length in issued if length is not None]
        if not known:
            return cls()
        forward, backward, forward_late, backward_late, end = known
        first = forward * in_flight
        last = first + (forward + backward) * alternating
        every = last + backward * in_flight
        return cls(
            first=[first],
            last=[last + forward_late],
            every=[every + backward_late],
            ended=[every + end],
        )


# Computes the critical path of a 1F1B pipeline: the longest chain of passes that wait for one
# another.

# Whether a condition holds: one value for all candidates, or a mask with a value for each.
Condition = bool | Bools


# The names of the stage times in which a host issues kernels; these times are None where no pass
# can be host-bound.
ISSUED = times_of("host")
# The critical path needs these two stage times in another form: all work before a stage's first
# pass, and all work after its last one.
_BESIDE = {"delta_forward_s": "begin_s", "delta_backward_s": "end_s"}
PASSES = tuple(_BESIDE.get(name, name) for name in TIMES)


class PassLengths(SimpleNamespace, Generic[Length]):
    """The times of one stage from which the critical path of a pipeline is computed; ``PASSES`` has
    their names.

    ``begin_s``, ``after_first_s`` and ``end_s`` are work outside passes, the others are times of
    ``StageTimes``.
    """

    def __init__(self, **lengths: Length) -> None:
        super().__init__(**{**dict.fromkeys(ISSUED), **lengths})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Length: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains(Generic[Length]):
    """The longest chains of dependent passes through a pipeline stage and all stages after it, by
    how they begin and end.

    Chains ``around`` follow one micro-batch from the stage through the later stages and back: in
    the steady state, or the first or the last micro-batch; ``nearest`` goes to this stage only.
    Chains ``through`` last from the first micro-batch's arrival until the last gradient leaves. A
    chain that begins with work that occurs once an iteration is called ``begun``, one that ends
    with such work ``ended``, one that does both ``whole``. If a time or a later chain grows, no
    chain gets shorter.
    """

    nearest: Length
    around: Length
    around_first: Length
    around_last: Length
    around_begun: Length
    around_ended: Length
    through: Length
    through_begun: Length
    through_ended: Length
    whole: Length

    @classmethod
    def of_nothing(cls, nothing: Length) -> Self:
        """The chains of passes after the last stage: all of zero length."""
        return cls(**dict.fromkeys(CHAINS, nothing))

    def from_in_front(self, stage: PassLengths[Length], *, short: Condition) -> Self:
        """The chains of passes, with the seconds of sends to and from the ``stage`` in front added.

        In ``short`` pipelines, with more stages than micro-batches, passes are far apart, so all
        sends are like those of the first and the last micro-batch.
        """
        both_s, back_late_s = stage.point_to_point_s, stage.end_return_late_s
        # Each chain needs a single addition: sums of sends are made only once.
        late_s, one_s = stage.end_send_late_s + back_late_s, both_s * 0.5
        last_s, both_s = both_s + late_s, both_s + late_s * (1 * short)
        return type(self)(
            nearest=self.nearest + both_s,
            around=self.around + both_s,
            around_first=self.around_first + (both_s + stage.first_send_late_s),
            around_last=self.around_last + last_s,
            around_begun=self.around_begun + (one_s + back_late_s * (1 * short)),
            around_ended=self.around_ended + (one_s + stage.end_send_late_s),
            through=self.through + (last_s + stage.first_send_late_s),
            through_begun=self.through_begun + (one_s + back_late_s),
            through_ended=self.through_ended
            + (one_s + stage.first_send_late_s + stage.end_send_late_s),
            whole=self.whole,
        )


CHAINS = tuple(entry.name for entry in fields(Chains))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """The numbers of passes and of round trips in a stage's longest chains of passes.

    In a round trip, or round, a micro-batch goes to later stages and back, and a forward pass waits
    for it. The numbers are integers, or columns of candidates.

    Before its first backward pass the stage runs ``in_flight`` forward passes, and afterwards
    ``alternating`` more. ``is_short`` says whether there are more stages than micro-batches,
    ``alternates`` whether any forward pass waits for a backward pass.

    Of the stage's forward passes, M lie between the round trips of the first and of the last
    micro-batch. A round trip takes as many of them as it has stages. So there are ``near`` round
    trips over two stages, or ``far`` round trips over all k stages. M is seldom a multiple of k, so
    some of the latter are ``nested``: the next stage makes one more round trip within, and the
    round trip takes k - 1 forward passes. Round trips over two stages leave ``left_near`` of the M
    passes, those over all stages ``left_far``.
    """

    in_flight: int | Ints
    alternating: int | Ints
    near: int | Ints
    far: int | Ints
    nested: int | Ints
    left_near: int | Ints
    left_far: int | Ints
    is_short: Condition
    alternates: Condition
    is_last: Condition

    @classmethod
    def of(cls, micro_batches: int | Ints, stages: int) -> "Counts":
        """The numbers of passes and round trips of the first of ``stages`` pipeline stages."""
        if isinstance(micro_batches, int):
            return _counts_alike(micro_batches, stages)
        in_flight = np.minimum(micro_batches, stages)
        forwards = np.maximum(micro_batches - in_flight - 1, 0)
        rounds = -(-forwards // in_flight)
        nested = rounds * in_flight - forwards
        fits = nested <= rounds
        far = np.where(in_flight > 2, np.where(fits, rounds - nested, forwards // in_flight), 0)
        nested = np.where((in_flight > 2) & fits, nested, 0)
        return cls(
            in_flight=in_flight,
            alternating=micro_batches - in_flight,
            near=forwards // 2,
            far=far,
            nested=nested,
            left_near=forwards % 2,
            left_far=forwards - far * in_flight - nested * (in_flight - 1),
            is_short=stages > micro_batches,
            alternates=micro_batches > in_flight,
            is_last=np.full(len(micro_batches), stages == 1),
        )


@cache
def _counts_alike(micro_batches: int, stages: int) -> Counts:
    """The numbers of passes and round trips as plain integers, if all candidates share them."""
    columns = Counts.of(np.array([micro_batches]), stages)
    return Counts(**{e.name: getattr(columns, e.name)[0].item() for e in fields(Counts)})


def chained(
    algebra: Algebra[Length], stage: PassLengths[Length], after: Chains[Length], counts: Counts
) -> Chains[Length]:
    """Extend the longest chains of dependent passes by one more stage in front of the others.

    An iteration takes as long as the longest chain of passes that wait for one another. With G
    micro-batches a stage runs G forward passes of tf seconds and G backward passes of tb seconds;
    its forward passes are k - 1 micro-batches ahead of its backward passes. A micro-batch that
    finds the stage idle waits for less of each pass (lf, lb): not for fetches before it and work
    after it. Work that comes once an iteration is done before a stage's first forward pass (df) and
    after its last backward pass (db); a part of it makes the pass itself longer (vf, vb). Two times
    describe the stages after a stage, and include the sends to them and back:

        around     from where a micro-batch leaves to where its gradient returns, if the stages do
                   nothing else
        through    from where the first micro-batch leaves to where the last one's gradient returns

    The longest chain through the stage and those after it is one of these, where t = tf + tb and l
    = lf + lb:

        the stage never waits              G t
        it waits for the first gradient    G t + around - (k - 1) tf
        it waits for the last gradient     G t + around - (k - 1) tb
        it waits for both, G > k           G t + 2 around - (k - 1) t + rounds
        it waits for later stages          l + through

    plus vf for the first micro-batch and vb for the last. A backward pass that has sent its
    gradient back may still reduce gradients of weights: only its stage's next pass, and the stage's
    end, wait for these. From the beginning of the iteration a host issues each forward pass in hf
    and each backward pass in hb seconds, without waiting for the stage, which may wait for it:

        until all passes are issued           G (hf + hb)
        until the last forward is issued      G (hf + hb) - k hb, then for the last gradient
        until the first k forwards are issued k hf, then it runs all passes from the first backward

    The first micro-batch is sent beside forward passes, the last one's gradient beside no pass.
    Between its first forward and its next pass a stage takes af longer. A chain may also wait for
    several micro-batches in turn: after a gradient has come back, the stage runs the forward pass
    of the k-th micro-batch after it. Each such round trip takes around + l - k t longer than the
    stage's own work meanwhile, so a steady pipeline waits for its sends. Passes of a round trip
    that overlap with sends lose time (``mistlab.cost.beside_sends``). If one boundary between
    stages is slower than the others, round trips between its stages may be longer.

    The first gradient comes back later than after ``around`` if other micro-batches hold it up:
    those that the stage itself runs ahead, or those that queue for the next stage, which runs one
    fewer ahead. The last gradient may be held up likewise. A backward pass right after a forward
    pass of its stage takes tb; one that waits for its gradient takes lb.

    A chain begins when a micro-batch arrives, or at the beginning of the iteration with a stage's
    work df - vf. It ends when a gradient is sent back, or with a stage's work db - vb. So the
    longest chain is kept for each kind of beginning and end. For S equal stages with equal sends c
    and no extras the iteration takes exactly (G + S - 1) t + 2 c (S + G - 2 - ceil((G - 1) / S)).
    Without sends this is the published (G - 1) max t + sum t (Mist, EuroSys 2025), which is too
    long for all other pipelines (docs/decisions/0008-pipeline-objective.md).
    """
    after = after.from_in_front(stage, short=counts.is_short)
    longest, begin, end = algebra.longest, stage.begin_s, stage.end_s + stage.left_backward_s
    forward, backward = stage.through_forward_s, stage.through_backward_s
    first, last = forward + stage.within_forward_s, backward + stage.within_backward_s
    work = _OwnWork(algebra, stage, after, counts)
    sends = stage.point_to_point_s * 0.5, stage.received_s
    waits = algebra.may_exceed(sends, (forward, backward))
    does_wait = waits if isinstance(waits, bool) else bool(waits.any())
    queued_sends = _QueuedSends(algebra, stage, work, waits) if does_wait else None
    ways = work.ways if queued_sends is None else queued_sends.ways
    # Work after the first forward pass delays the first gradient; no such work delays the last one.
    nothing, after_first = algebra.nothing, stage.after_first_s
    to_gradient = work.until_gradient(after.around_first, stage.forward_s, after_first)
    to_last = work.until_gradient(after.around_last, stage.backward_s, nothing)
    if queued_sends is not None:
        to_gradient += queued_sends.until_gradient()
        to_last += queued_sends.until_gradient()
    there = first + longest("there", *to_gradient)
    back = longest("back", *to_last) + last
    of_host = [getattr(stage, name) for name in ISSUED]
    issued = IssuedChains.of(of_host, counts.in_flight, counts.alternating)
    there_begun = longest("there_begun", begin + there, after.around_begun, *issued.first)
    back_ended = longest("back_ended", back + end, after.around_ended)
    begun = longest("begun", begin + first + after.through, after.through_begun)
    ended = longest("ended", after.through + last + end, after.through_ended)
    return Chains(
        nearest=forward + _either(counts.is_short, after.nearest, work.after_forward) + backward,
        around=forward
        + _either(counts.is_last, work.after_forward, after.around)
        + backward
        + (stage.within_round_s + stage.round_late_s),
        around_first=there + backward,
        around_last=forward + back,
        around_begun=there_begun + backward,
        around_ended=forward + back_ended,
        through=longest(
            "through",
            *ways(None, there, back, None),
            first + after.through + last,
        ),
        through_begun=longest(
            "through_begun",
            *ways(begin, there_begun, back, None),
            begun + last,
            *issued.every,
            *(last_forward + back for last_forward in issued.last),
        ),
        through_ended=longest(
            "through_ended",
            *ways(None, there, back_ended, end),
            first + ended,
        ),
        whole=longest(
            "whole",
            *ways(begin, there_begun, back_ended, end),
            begun + last + end,
            begin + first + after.through_ended,
            after.whole,
            *issued.ended,
            *(last_forward + back_ended for last_forward in issued.last),
        ),
    )


class _OwnWork(Generic[Length]):
    """The durations of one stage's own passes in the chains of passes that go through it."""

    def __init__(
        self,
        algebra: Algebra[Length],
        stage: PassLengths[Length],
        after: Chains[Length],
        counts: Counts,
    ) -> None:
        forward, backward = stage.forward_s, stage.backward_s
        pairs, alone = (forward + backward) * counts.alternating, counts.in_flight - 1
        # A pass after an idle time takes its shorter time: its weights and other data were fetched
        # meanwhile.
        first = stage.through_forward_s + stage.within_forward_s
        last = stage.through_backward_s + stage.within_backward_s
        left = stage.left_backward_s
        self.after, self.counts = after, counts
        self.first, self.passed = first, stage.through_backward_s
        # A backward pass takes this much longer if it follows the stage's own forward pass than if
        # the stage was idle before.
        self.after_forward = backward - left - stage.through_backward_s + stage.held_forward_s
        self.from_first_backward = pairs + backward * alone + last
        # A stage with a single forward pass has no later one, so nothing waits for the work after
        # that pass.
        only = 1 * (alone + counts.alternating == 0)
        self.to_last_forward = first + stage.after_first_s * (1 - only) + forward * alone + pairs
        all_forwards = first + stage.after_first_s + forward * alone + pairs
        never = all_forwards + backward * counts.in_flight - left + stage.within_backward_s
        never += stage.held_forward_s
        self.inside = [never]
        if counts.is_short is not False:
            # With fewer micro-batches than stages, the next stage may run all of its forward passes
            # before it sends the first gradient back.
            back_at_once = self.to_last_forward + after.nearest + self.from_first_backward
            self.inside.append(_only(counts.is_short, back_at_once))
        # Only where forward and backward passes alternate does a forward pass wait for a backward
        # pass.
        self.between: Length | None = None
        if counts.alternates is not False:
            waited = stage.through_backward_s + left
            # Between n sends there are only n - 1 intervals, so the time of one send is subtracted.
            self.pairs = pairs - backward + waited - stage.held_forward_s
            self.rounds = _rounds(stage, after, counts)
            between = self.pairs + algebra.longest("rounds", algebra.nothing, *self.rounds)
            self.between = _only(counts.alternates, between)

    def until_gradient(self, around: Length, each: Length, before: Length) -> list[Length]:
        """The durations of the chains of passes from the end of a stage's first forward pass to the
        arrival of its gradient, or from the last forward pass to the last gradient.

        Either the micro-batch goes ``around``, through the later stages and back. Or the stage runs
        all the passes that it runs ahead, each of which takes ``each``, after the work ``before``
        them. Or it runs all of these but one, and then waits for the next stage alone; with fewer
        micro-batches than stages, the next stage runs as many ahead, so the stage runs all.
        """
        ahead = self.counts.in_flight - 1
        all_but_one = ahead - 1 + self.counts.is_short
        return [
            around,
            before + each * ahead + self.after_forward,
            before * (1 * (all_but_one > 0)) + self.after.nearest + each * all_but_one,
        ]

    def ways(
        self, begins: Length | None, there: Length, back: Length, ends: Length | None
    ) -> list[Length]:
        """The durations of the chains through the stage's own passes.

        ``begins`` and ``ends`` are the additional work at the beginning and the end of these
        chains, None if there is none.
        """
        ways = [_sum(begins, inside, ends) for inside in self.inside]
        ways += [
            _sum(there, self.from_first_backward, ends),
            _sum(begins, self.to_last_forward, back),
        ]
        if self.between is not None:
            ways.append(there + self.between + back)
        return ways


class _QueuedSends(Generic[Length]):
    """The durations of the chains of passes that wait for a stage's queued sends.

    ``there_s`` is a send to the next stage, ``back_s`` a send to the stage in front. If no send
    takes longer than a pass, sends never queue, and these chains are never the longest, so they are
    left out; ``waits`` is a mask of the candidates in which sends may queue.
    """

    def __init__(
        self,
        algebra: Algebra[Length],
        stage: PassLengths[Length],
        work: _OwnWork[Length],
        waits: Condition,
    ) -> None:
        self.work, self.there_s, self.back_s = work, stage.point_to_point_s * 0.5, stage.received_s
        self.sends_on = not np.all(work.counts.is_last)
        self.first, self.passed = (_only(waits, length) for length in (work.first, work.passed))
        if not self.sends_on:
            return
        after, counts = work.after, work.counts
        self.last = stage.through_backward_s + stage.within_backward_s
        # Before the first gradient comes back, the next stage receives one activation for each
        # forward pass that it runs ahead of its first backward pass.
        all_but_one = np.maximum(counts.in_flight - 2 + counts.is_short, 0)
        self.queued = _only(waits, after.nearest + self.there_s * all_but_one)
        # The duration from the send after the last forward pass to the end of the last backward
        # pass.
        self.back = algebra.longest("sent_back", after.around_last, self.queued) + self.last
        if work.between is None:
            return
        # Micro-batches that are left over after dividing them into round trips are sent one after
        # another.
        longer_s = self.there_s - stage.forward_s - stage.backward_s
        # The passes of left-over micro-batches, too few for another round trip, overlap with the
        # sends of the micro-batches before them.
        self.around = [
            self.first
            + (after.around_first + work.pairs + rounds)
            + (longer_s * left + stage.queued_late_s * (1 * (left > 0)))
            for rounds, left in zip(work.rounds, (counts.left_near, counts.left_far), strict=True)
        ]

    def until_gradient(self) -> list[Length]:
        """The duration of a stage's queued sends until the first or the last gradient is back."""
        return [self.queued] if self.sends_on else []

    def ways(
        self, begins: Length | None, there: Length, back: Length, ends: Length | None
    ) -> list[Length]:
        """The durations of the chains of passes and sends through a stage whose sends queue.

        The arguments are those of ``_OwnWork.ways``.
        """
        work, counts = self.work, self.work.counts
        every = counts.in_flight + counts.alternating
        alternating_s = (self.there_s + self.back_s) * counts.alternating
        ways = work.ways(begins, there, back, ends)
        if self.sends_on:
            to_last_forward = self.first + self.there_s * (counts.in_flight - 1) + alternating_s
            ways.append(_sum(begins, to_last_forward, self.back, ends))
        if ends is None:
            # The stage in front waits for the last gradient that this stage sends, not for what
            # this stage does afterwards.
            to_last_gradient = self.passed + self.back_s * (counts.in_flight - 1) + alternating_s
            sent = self.there_s * every + self.back_s * (every - 1)
            ways += [there + to_last_gradient, _sum(begins, self.first, sent)]
        if self.sends_on and work.between is not None:
            sent = self.passed + alternating_s - self.there_s
            ways.append(_sum(there, _only(counts.alternates, sent + self.back), ends))
            ways += [
                _sum(begins, _only(counts.alternates, around + back)) for around in self.around
            ]
        return ways


def _rounds(
    stage: PassLengths[Length], after: Chains[Length], counts: Counts
) -> tuple[Length, Length]:
    """The durations by which micro-batches' round trips, to the next stage and to the last one,
    exceed the passes that the stage runs meanwhile.
    """
    both = stage.forward_s + stage.backward_s
    # The stage is idle when the gradient arrives that it waits for, so its backward pass is
    # shorter.
    turn = stage.backward_s - stage.through_backward_s
    held = stage.held_backward_s - stage.held_forward_s
    near = after.nearest + stage.round_late_s - both - turn + held
    ahead = after.around - both * (counts.in_flight - 1)
    passed = stage.through_forward_s + stage.through_backward_s
    far = ahead - both + passed + stage.held_backward_s
    far += stage.within_round_s + stage.round_late_s
    nested = ahead - stage.point_to_point_s
    return near * counts.near, far * counts.far + nested * counts.nested


def _sum(*parts: Length | None) -> Length:
    """The sum of the durations that are not None."""
    total: Length = reduce(add, [part for part in parts if part is not None])
    return total


def _either(condition: Condition, length: Length, other: Length) -> Length:
    """``length`` where the condition holds, ``other`` elsewhere."""
    if isinstance(condition, bool):
        return length if condition else other
    chosen: Any = np.where(condition, np.asarray(length), np.asarray(other))
    return cast("Length", chosen)


def _only(condition: Condition, length: Length) -> Length:
    """The duration where the condition holds; elsewhere minus infinity, never a maximum."""
    if isinstance(condition, bool):
        assert condition
        return length
    only: Length = length + np.where(condition, 0.0, -np.inf)
    return only
