"""The seconds of a stage's passes: sums over per-layer time slots, and the first forward pass.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Sums
from mistlab.cost.beside_sends import (
    STEADY,
    SUMS,
    TURNS,
    BesideSend,
    Pass,
    beside_sends,
    longest_slots,
    slots_beside_sends,
)
from mistlab.cost.side_by_side import LINK, until
from mistlab.cost.slot_work import (
    HERE,
    LOWER,
    NOTHING,
    UPPER,
    SlotWork,
    ends_if_gathered,
    least_ends_if_gathered,
    shared_turns,
    slot_ends,
    slots_of_first_layers,
    slots_of_leaving,
    slots_of_stepping,
    split_slots,
    with_nothing,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import PHASES, SHARDED_GRADIENTS, SHARDED_WEIGHTS, Phase

# The first forward pass, in which a stage also takes the optimizer steps of its layers.
#
# Steps need no activations, so they run ahead of a first micro-batch that comes late. With
# offloaded weights there is room for two blocks that have stepped; meanwhile the states of a third
# block are fetched. Where states or weights are offloaded, a layer's step waits until those of the
# layer two before it are back on the host. Only the stage's next pass waits for those of the last
# block.
#
# Axes: C candidates, S distinct strategies, K kinds of time slots; the four streams first.


# Kinds of tasks that belong to a layer's optimizer step.
OF_STEPS = frozenset({"S", "P", "G", "O"})
# If weights are offloaded, this many blocks may step before their micro-batch comes; by then as
# many time slots have ended in which the next block's states are fetched.
AHEAD = 2

_AWAY = STREAMS.index("device_to_host")
_NOT_AWAY: Sequence[str] = [stream for stream in STREAMS if stream != STREAMS[_AWAY]]


@dataclass(frozen=True, slots=True, eq=False)
class FirstPass:
    """The seconds of parts of the first forward pass, for each candidate (C).

    For ``unawaited`` at the ends of its slots no layer waits, for ``after`` the stage's next pass
    waits. ``stepped`` is the time inside the pass if all layers stepped before, for stages that
    offload state or weights. ``block_steps`` and ``end_steps`` are the steps' arithmetic, without
    the first layer's: of blocks with offloaded weights, and of other layers beside them.
    """

    unawaited: Floats
    after: Floats
    stepped: Floats
    block_steps: Floats
    end_steps: Floats

    def chosen(self, rows: Rows | slice) -> "FirstPass":
        """The parts of the first forward pass of the candidates with these indices."""
        parts = (getattr(self, entry.name) for entry in fields(self))
        # Without offloading, a part is a single zero that holds for all candidates.
        return FirstPass(*(part if len(part) == 1 else part[rows] for part in parts))

    @classmethod
    def least(cls, ends: Sequence["FirstPass"]) -> "FirstPass":
        """The minimum of each part over candidates, for lower bounds of the first forward pass."""
        names = [entry.name for entry in fields(cls)]
        return cls(*(np.minimum(*(getattr(end, name) for end in ends)) for name in names))

    def within_s(
        self,
        whole_s: Floats,
        forward_s: Floats,
        blocks: Ints,
        offloads_weights: Bools,
    ) -> Floats:
        """The seconds that the first micro-batch takes longer through its forward pass (C) than a
        steady one; the first pass takes ``whole_s``, a steady one ``forward_s``.

        Of a stage with offloaded weights, a few blocks have stepped. For one of the others, state
        is there.
        """
        others = np.maximum(blocks - 1, 1)
        ahead = np.minimum(1.0, AHEAD / others)
        held_s = np.where(blocks > AHEAD, self.block_steps / others + ahead * self.end_steps, 0.0)
        steps_s = np.maximum(whole_s - self.stepped, 0.0) * (1 - ahead) + held_s
        passed_s = self.stepped + np.where(offloads_weights, steps_s, 0.0)
        return np.where(self.stepped > 0, passed_s - forward_s, np.zeros_like(forward_s))


PARTS = len(fields(FirstPass))


def first_slots(
    seconds: TaskSeconds,
    kinds: Ints,
    whole: tuple[Floats, Floats],
    stepped: Floats,
    usual: Floats,
    *,
    is_least: bool,
) -> Floats:
    """The parts of ``FirstPass`` by kind of time slot (5, K, S), from the tasks and ends (4, K, S)
    of ``whole`` slots, and the tasks without optimizer steps (``stepped``). Steady slots take
    ``usual`` seconds (K, S). In lower bounds (``is_least``) the next pass does not wait.
    """
    columns, (below, here, above) = seconds.columns, kinds.T
    parts = np.zeros((PARTS, *usual.shape))
    unawaited, after, stepped_s, block_steps, end_steps = parts
    weights, state = (with_nothing(seconds.alone(kind, ">")) for kind in ("P", "O"))
    chosen = np.flatnonzero((weights + state).any(axis=0))
    if not len(chosen):
        return parts
    weights, state = weights[:, chosen], state[:, chosen]
    swaps, keeps = (columns[f"offload_{kind}"][chosen] > 0 for kind in ("weights", "activations"))

    # Offloaded activations queue behind the last block's states, and the head waits for them.
    is_last = (above == NOTHING)[:, None] | (~keeps & ((weights + state)[above] == 0))
    last = np.flatnonzero(is_last.any(axis=1))
    at_last = np.ix_(last, chosen)
    work, ends = (one[:, last[:, None], chosen] for one in whole)
    without_weights = work.copy()
    without_weights[_AWAY] = np.maximum(work[_AWAY] - weights[here[last]], 0.0)
    # Weights that are not sharded are gathered with their optimizer steps.
    kept = stepped[:, :, chosen]
    kept[LINK] *= seconds.zero[chosen] >= SHARDED_WEIGHTS
    both = np.concatenate([kept, without_weights], axis=1)
    both_ends = slot_ends(seconds, both, is_least, chosen)
    kept_ends, left_ends = both_ends[:, : len(kinds)], both_ends[:, len(kinds) :]

    computed = until(_NOT_AWAY, ends, work)
    # A block steps before the block below computes, so the block below and the head compute while
    # the last block's states are offloaded.
    forward = with_nothing(seconds.alone("F", ""))[:, chosen]
    hidden = (forward[below] + forward[above])[last]
    left = until(STREAMS, left_ends, without_weights)
    is_last = is_last[last]
    unawaited[at_last] = np.where(is_last, until(STREAMS, ends, work) - computed, 0.0)
    if not is_least:
        after[at_last] = np.where(is_last, np.maximum(left - computed - hidden, 0.0), 0.0)
    stepped_s[:, chosen] = np.where(swaps, until(STREAMS, kept_ends, kept), usual[:, chosen])
    kept_computed = until(_NOT_AWAY, kept_ends[:, last], kept[:, last])
    stepped_s[at_last] = np.where(is_last, kept_computed, stepped_s[at_last])

    stepping, swapped = with_nothing(seconds.alone("S", ""))[above][:, chosen], weights[above] > 0
    block_steps[:, chosen] = np.where(swapped, stepping, 0.0)
    end_steps[:, chosen] = np.where(swapped, 0.0, stepping)
    return parts


# The seconds of a pass's time slots, in each phase of an iteration.
#
# Inside a pass a layer computes in every slot. Before and after its layers nothing computes, but
# layers are still fetched or offloaded. There the offloads of one pass and the fetches of the next
# run concurrently: these slots are the turn of a stage. Some turns share the slot of the first
# layer (``mistlab.cost.slot_work``).
#
# Axes: S distinct strategies, K kinds of slots, P phases, N slots; the four streams first.


_FIRST, _FORWARD, _BACKWARD, _LAST = (
    PHASES.index(phase) for phase in ("first_forward", "forward", "backward", "last_backward")
)
# A further phase, the turn: time slots in which a forward and a backward pass overlap.
_TURN = len(PHASES)
_COMPUTING = ("compute",)
_NOT_REDUCING = tuple(stream for stream in STREAMS if stream != "gpu_to_gpu")


class PassSlots:
    """The seconds of per-layer time slots: ``inside`` a pass (P, K', S), while layers compute, in
    each phase; ``below`` it (4, K', S), before its first layer, in three phases and between passes;
    ``above`` it (1, K', S), after its last layer, between passes. Where a slot between passes is
    merged into the first layer's slot, the seconds by which it lengthens that slot.

    ``is_inside``, ``is_below`` and ``is_above`` are masks (K) of their kinds. ``has_turns`` says
    whether any strategy has work outside of passes where the stage turns round.
    """

    def __init__(self, seconds: TaskSeconds, kinds: Ints, kept: Kept = "own") -> None:
        self._seconds, self._kinds, self._kept = seconds, kinds, kept
        self.work = SlotWork(seconds, kinds)
        self.is_inside = kinds[:, HERE] != NOTHING
        self.is_below = ~self.is_inside & (kinds[:, UPPER] != NOTHING)
        self.is_above = ~self.is_inside & ~self.is_below
        parts = (
            (range(len(PHASES)), self.is_inside),
            ((_FORWARD, _FIRST, _LAST, _TURN), self.is_below),
            ((_TURN,), self.is_above),
        )
        # The row of each kind of per-layer time slot in a table of all phases.
        places = [
            np.add.outer(np.array(phases) * len(kinds), np.flatnonzero(where))
            for phases, where in parts
        ]
        rows = np.concatenate([one.ravel() for one in places])
        # Small tables take as long as large ones, so the slots of all phases are computed together.
        self._alone, self._fetched_s = self._tasks(rows)
        first, last = np.cumsum([one.size for one in places[:-1]])
        turn = slice(last - len(places[1][-1]), last)
        self._turns = shared_turns(seconds, kinds[self.is_below], self._alone[:, turn])
        self._turning = slice(turn.start, None)
        self.has_turns = bool(self._alone[:, self._turning].any())
        if self._turns is not None:
            self._alone[:, turn][:, :, self._turns.rows] = self._turns.alone
        self._ends = slot_ends(seconds, self._alone, kept == "least")
        self._gather_after_copies()
        lasting = np.maximum(until(STREAMS, self._ends, self._alone), self._fetched_s.sum(axis=0))
        if kept == "own" and len(self.work.evicts):
            self._wait_for_gradients(lasting, rows // len(kinds))
        self._in_turn(lasting)
        self._turns_s = lasting[self._turning].copy()
        if self._turns is not None:
            shared = self._turns.rows
            longer_s = np.maximum(lasting[turn][:, shared] - self._turns.layer_s, 0.0)
            lasting[turn][:, shared] = longer_s
        self.inside, self.below, self.above = (
            part.reshape(*shaped.shape, lasting.shape[1])
            for part, shaped in zip(np.split(lasting, [first, last]), places, strict=True)
        )

    def last_computed(self) -> Floats:
        """The seconds of last backward passes' time slots (K', S) without gradient reductions."""
        last = self._rows_inside(_LAST, _LAST)
        computed_s = until(_NOT_REDUCING, self._ends[:, last], self._alone[:, last])
        return np.asarray(np.maximum(computed_s, self._fetched_s[:, last].sum(axis=0)))

    def through_backward(self) -> Floats:
        """The seconds of a micro-batch in each time slot of a steady backward pass (K', S): of the
        last slot, only those until its layer has computed. Where gradients are offloaded or layers
        are fetched further ahead, the whole slot counts.
        """
        if self._seconds.model.template.depth != 1:
            return np.asarray(self.inside[_BACKWARD])
        lengths = self.inside[_BACKWARD].copy()
        last = np.flatnonzero(self._kinds[self.is_inside, LOWER] == NOTHING)[:, None]
        stay = np.flatnonzero(self._seconds.columns["offload_gradients"] == 0)
        rows = self._rows_inside(_BACKWARD, _BACKWARD).start + last
        lengths[last, stay] = until(
            _COMPUTING, self._ends[:, rows, stay], self._alone[:, rows, stay]
        )
        return np.asarray(lengths)

    def arithmetic(self) -> Floats:
        """Seconds of arithmetic by kind of time slot: of both steady passes, and of the optimizer
        step (2, K', S); if a host issues passes, also of a forward and of a backward pass with the
        collectives that layers wait for (4, K', S).
        """
        seconds, here = self._seconds, self._kinds[self.is_inside, HERE]
        passes_s = seconds.alone("F", "") + seconds.alone("B", "")
        alone_s = [passes_s[here], seconds.alone("S", "")[here]]
        if seconds.model.host is None:
            return np.stack(alone_s)
        computed_s = [
            (seconds.alone(kind, "") + seconds.tensor_s[phase])[here]
            for kind, phase in (("F", "forward"), ("B", "backward"))
        ]
        return np.stack([*alone_s, *computed_s])

    def of_steps(self) -> Floats:
        """The parts of ``FirstPass`` by kind of time slot (parts, K', S); no rows if neither
        weights nor optimizer states are offloaded.
        """
        columns = self._seconds.columns
        offloads = (columns["offload_weights"] > 0) | (columns["offload_optimizer"] > 0)
        if not (self._seconds.model.template.depth and offloads.any()):
            return np.empty((0, *self.inside.shape[1:]))
        first = self._rows_inside(_FIRST, _FIRST)
        stepped = self.work.alone(("first_forward",), without=OF_STEPS)[:, 0, self.is_inside]
        return first_slots(
            self._seconds,
            self._kinds[self.is_inside],
            (self._alone[:, first], self._ends[:, first]),
            stepped,
            self.inside[_FORWARD],
            is_least=self._kept == "least",
        )

    def beside_sends(self) -> tuple[Floats, Sequence[Floats]]:
        """Sums that give the slowdown by sends, as in ``slots_beside_sends``: over time slots of
        steady passes (2, 6, K', S), and over those between passes (7, K', S), usual seconds first.
        """
        steady = self._rows_inside(_FORWARD, _BACKWARD)
        turning = self._turning if self.has_turns else slice(0, 0)
        usual_s, turns_s = self.inside[_FORWARD : _BACKWARD + 1], self._turns_s[: turning.stop]
        both_s = np.concatenate([usual_s.reshape(-1, usual_s.shape[-1]), turns_s])
        alone = np.concatenate([self._alone[:, steady], self._alone[:, turning]], axis=1)
        lost = slots_beside_sends(self._seconds, alone, both_s, self._kept)
        passes, turns = np.split(lost, [2 * usual_s.shape[1]], axis=1)
        of_passes = passes.reshape(len(passes), *usual_s.shape).swapaxes(0, 1)
        if not self.has_turns:
            return of_passes, ()
        turns = np.concatenate([self._turns_s[None], turns])
        # A slot between two passes lengthens the sends that start in it, or that no pass follows.
        turns[:-1] *= beside_sends(self._seconds, self._alone[:, turning])
        return of_passes, np.split(turns, [np.count_nonzero(self.is_below)], axis=1)

    def _tasks(self, rows: Rows) -> tuple[Floats, Floats]:
        """The seconds of each stream's tasks (4, N, S) in time slots, given as ``rows`` of a table
        of all phases, and those of fetching and of gathering a layer's weights (2, N, S).
        """
        alone, fetched_s = self.work.alone(), self.work.fetched_s()
        turns = alone[:, _FORWARD] + alone[:, _BACKWARD]
        turns_s = np.maximum(fetched_s[:, _FORWARD], fetched_s[:, _BACKWARD])
        alone = np.concatenate([alone, turns[:, None]], axis=1)
        fetched_s = np.concatenate([fetched_s, turns_s[:, None]], axis=1)
        alone, fetched_s = (one.reshape(len(one), -1, one.shape[-1]) for one in (alone, fetched_s))
        return alone.take(rows, axis=1), fetched_s.take(rows, axis=1)

    def _gather_after_copies(self) -> None:
        """Correct the ends of time slots that gather weights after copying them from the host."""
        slots, strategies = np.nonzero(self._fetched_s[1])
        if not len(slots):
            return
        copied, gathered = self._fetched_s[:, slots, strategies]
        slowed = self._seconds.slowed_by(self._kept).chosen(strategies)
        ends_of = least_ends_if_gathered if self._kept == "least" else ends_if_gathered
        alone = self._alone[:, slots, strategies]
        self._ends[:, slots, strategies] = ends_of(alone, slowed, copied, gathered)

    def _wait_for_gradients(self, lasting: Floats, phases: Rows) -> None:
        """Lengthen the time slots (N, S) of backward passes in which a layer waits until gradients
        have been offloaded.
        """
        rows = np.flatnonzero((phases == _BACKWARD) | (phases == _LAST))[:, None]
        evicts = self.work.evicts
        evicting_s = self.work.evicting_s(self._alone[:, rows, evicts])
        lasting[rows, evicts] = np.maximum(lasting[rows, evicts], evicting_s)

    def _in_turn(self, lasting: Floats) -> None:
        """Correct the seconds of time slots inside passes whose offloads start before the next slot
        begins.
        """
        work = SlotWork(self._seconds, self._kinds[self.is_inside])
        first, is_least = self._rows_inside(_FIRST, _FIRST), self._kept == "least"
        lasting[first] = slots_of_stepping(work, lasting[first], is_least=is_least)
        if self._kept == "own":
            rows = self._rows_inside(_FORWARD, _LAST)
            inside_s = slots_of_leaving(work, self._alone[:, rows], lasting[rows])
            lasting[rows] = slots_of_first_layers(work, inside_s)

    def _rows_inside(self, first: int, last: int) -> slice:
        """The rows of time slots inside the passes from phase ``first`` to phase ``last``."""
        kinds = np.count_nonzero(self.is_inside)
        return slice(first * kinds, (last + 1) * kinds)


# The times of a stage's passes: sums over the time slots of each phase.
#
# Two consecutive passes share the slots outside of them, the turn of the stage: at its first layers
# from a backward pass to a forward pass, and at its last layers from a forward pass to a backward
# pass.
#
# Axes: C candidates, S distinct strategies, K kinds of slots.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """The seconds of each candidate stage (C) inside passes, for each phase, and outside passes.

    The time inside the ``first`` forward pass leaves out what no layer of it waits for.

    ``through`` is the time inside steady passes of a micro-batch for which its stage was idle: a
    backward pass may go on when its gradient has been computed.
    ``last_computed`` is the time inside the last backward pass without reductions, which go on
    after it. ``opening`` comes before a steady forward pass by itself, ``first_opening`` before the
    first forward, ``last_closing`` after the last backward. By ``turn_at_first_layer`` a forward
    pass is longer that follows a backward pass. ``beside_sends`` says what sends cost steady passes
    and shared turns; it is empty if no stage sends beside its passes.

    ``computing`` and ``step_computing`` are the times of arithmetic alone, in steady passes and in
    the step; ``computed_forward`` and ``computed_backward`` those of steady passes with the
    collectives that layers wait for.
    """

    inside: Mapping[Phase, Floats]
    first: FirstPass
    through: Mapping[Phase, Floats]
    last_computed: Floats
    opening: Floats
    first_opening: Floats
    last_closing: Floats
    turn_at_first_layer: Floats
    turn_at_last_layer: Floats
    beside_sends: Mapping[Pass, BesideSend]
    computing: Floats
    step_computing: Floats
    computed_forward: Floats
    computed_backward: Floats

    @property
    def after_last_s(self) -> Floats:
        """The least seconds (C) that follow the last layer of the last backward pass."""
        return self.last_closing + self.inside["step"]

    def chosen(self, rows: Rows | slice) -> "PassSeconds":
        """The pass times of the candidates with these indices."""
        inside = {phase: seconds[rows] for phase, seconds in self.inside.items()}
        return PassSeconds(
            inside=inside,
            first=self.first.chosen(rows),
            through={phase: seconds[rows] for phase, seconds in self.through.items()},
            **{name: getattr(self, name)[rows] for name in (*_ONCE, *_ALONE)},
            beside_sends={phase: one.chosen(rows) for phase, one in self.beside_sends.items()},
        )


_ONCE = (
    *("last_computed", "opening", "first_opening", "last_closing"),
    *("turn_at_first_layer", "turn_at_last_layer"),
)
_ALONE = "computing", "step_computing", "computed_forward", "computed_backward"


@dataclass(frozen=True, slots=True, eq=False)
class PassSums:
    """Sums over time slots (L, C), in the order of ``pass_sums``, to make ``PassSeconds`` from.

    ``queued`` (2, C) are seconds of last backward passes whose reductions queue, until all layers
    have computed and until all but the last layer's gradients are reduced; zero for others.
    """

    values: Floats
    steps: bool
    computed: bool
    queued: Floats | None = None

    def chosen(self, rows: Rows) -> "PassSums":
        """The sums over time slots of the candidates with these indices."""
        queued = None if self.queued is None else self.queued.take(rows, axis=1)
        return PassSums(self.values.take(rows, axis=1), self.steps, self.computed, queued)

    def passes(self) -> PassSeconds:
        """The pass times that these sums over time slots give."""
        sums = iter(self.values)
        opening, first_opening, last_closing, at_first_layer, at_last_layer = islice(sums, 5)
        last_computed, computing, step_computing = islice(sums, 3)
        nothing = np.zeros_like(computing)
        computed_forward, computed_backward = (
            islice(sums, 2) if self.computed else (nothing, nothing)
        )
        through_backward_s = next(sums)
        inside_s = dict(zip(PHASES, islice(sums, len(PHASES)), strict=True))
        # Without offloading the first pass has no parts to sum.
        first = FirstPass(*(islice(sums, PARTS) if self.steps else np.zeros((PARTS, 1))))
        inside_s["first_forward"] = inside_s["first_forward"] - first.unawaited
        if self.queued is not None:
            last_computed, inside_s["last_backward"] = (
                np.where(queued_s > 0, queued_s, of_slots)
                for queued_s, of_slots in zip(
                    self.queued, (last_computed, inside_s["last_backward"]), strict=True
                )
            )
        return PassSeconds(
            inside=inside_s,
            first=first,
            through={"forward": inside_s["forward"], "backward": through_backward_s},
            last_computed=last_computed,
            opening=opening,
            first_opening=first_opening,
            last_closing=last_closing,
            turn_at_first_layer=at_first_layer,
            turn_at_last_layer=at_last_layer,
            beside_sends=_beside_sends(inside_s, [*sums]),
            computing=computing,
            step_computing=step_computing,
            computed_forward=computed_forward,
            computed_backward=computed_backward,
        )


def pass_sums(
    seconds: TaskSeconds, kinds: Ints, summed: Sums, *, sends: bool = True, kept: Kept = "own"
) -> PassSums:
    """Sums over the time slots of stages' passes, which may overlap with ``sends``; ``summed`` adds
    them up. With ``kept`` "least" they are lower bounds over any greater work on the same streams.
    """
    slots = PassSlots(seconds, kinds, kept)
    steps = slots.of_steps()
    backward = slots.through_backward()[None]
    inside = [slots.last_computed()[None], slots.arithmetic(), backward, slots.inside, steps]
    lost, turns = slots.beside_sends() if sends else ((), ())
    inside += [*lost]
    lengths = [
        (slots.below, slots.is_below),
        (slots.above, slots.is_above),
        (np.concatenate(inside), slots.is_inside),
    ]
    lengths += zip(turns, (slots.is_below, slots.is_above), strict=bool(turns))
    return PassSums(summed(lengths), len(steps) > 0, seconds.model.host is not None)


def _beside_sends(
    usual_s: Mapping[Phase, Floats], sums: Sequence[Floats]
) -> Mapping[Pass, BesideSend]:
    """How sends slow passes, and slots between passes if any, down, from sums over time slots."""
    if not sums:
        return {}
    forward, backward, turns = sums[:SUMS], sums[SUMS : 2 * SUMS], sums[2 * SUMS :]
    beside: dict[Pass, BesideSend] = {
        "forward": BesideSend.of_sums(usual_s["forward"], *forward),
        "backward": BesideSend.of_sums(usual_s["backward"], *backward),
    }
    half = len(turns) // 2
    named = zip(TURNS, (turns[:half], turns[half:]), strict=True)
    return {**beside, **{name: BesideSend.of_sums(*of_turn) for name, of_turn in named if of_turn}}


def split_pass_seconds(
    seconds: TaskSeconds, kinds: Ints, summed: Sums, *, weights_s: Floats, unhidden_s: Floats
) -> tuple[Floats, Floats]:
    """The seconds of weight-gradient passes with the reductions of their gradients, and the seconds
    by which steady backward passes are shorter without this work (C each).

    The products take ``weights_s`` (T, S). For ``unhidden_s`` tensor-parallel ranks wait for one
    another, which these products hid before. Both passes together are never shorter than one.
    """
    is_inside = kinds[:, HERE] != NOTHING
    split = split_slots(SlotWork(seconds, kinds[is_inside]), weights_s, unhidden_s)
    whole_s, inputs_s, weights_s, waits_s = summed([(split, is_inside)])
    less_s = whole_s - inputs_s
    return np.maximum(weights_s, less_s + waits_s), less_s


def longest_beside_sends(seconds: TaskSeconds, kinds: Ints, summed: Sums) -> Mapping[Pass, Floats]:
    """For each candidate (C), upper bounds of the seconds of steady passes and of slots between
    passes throughout which a send lasts, over any lesser work.
    """
    is_inside = kinds[:, HERE] != NOTHING
    is_below = ~is_inside & (kinds[:, UPPER] != NOTHING)
    alone = SlotWork(seconds, kinds).alone(STEADY)
    turns = alone.sum(axis=1)
    shared = shared_turns(seconds, kinds[is_below], turns[:, is_below])
    if shared is not None:
        turns[:, np.flatnonzero(is_below)[:, None], shared.rows] = shared.alone
    longest = [(longest_slots(seconds, alone[:, :, is_inside]), is_inside)]
    for where in (is_below, ~is_inside & ~is_below):
        longest_s = longest_slots(seconds, turns[:, where])
        longest.append(((beside_sends(seconds, turns[:, where]) * longest_s)[None], where))
    return dict(zip((*STEADY, *TURNS), summed(longest), strict=True))


def least_passes(ends: Sequence[PassSeconds], longest_s: Mapping[Pass, Floats]) -> PassSeconds:
    """Lower bounds of the passes of a box (all candidates with choices in given ranges), from its
    two ``ends`` with the smallest offload ratios; ``longest_s`` is from ``longest_beside_sends``.

    The number of each kind of slot is linear in the number of recomputed blocks. So each sum of
    slots rises or falls all the way between the two ends, and is least at one of them.
    """

    def least(sums: Sequence[Mapping[Phase, Floats]]) -> Mapping[Phase, Floats]:
        return {phase: np.minimum(*(own[phase] for own in sums)) for phase in sums[0]}

    inside = least([end.inside for end in ends])
    return PassSeconds(
        inside=inside,
        first=FirstPass.least([end.first for end in ends]),
        through=least([end.through for end in ends]),
        **{name: np.minimum(*(getattr(end, name) for end in ends)) for name in _ONCE},
        beside_sends={
            phase: BesideSend.of_box(
                [end.beside_sends[phase] for end in ends],
                longest_s.get(phase, 0.0),
            )
            for phase in ends[0].beside_sends
        },
        **{name: getattr(ends[0], name) for name in _ALONE},
    )


def reduces_in_place(seconds: TaskSeconds) -> Bools:
    """For each strategy (S), whether gradients are reduced in place, so that layers need not
    wait.
    """
    in_place = (seconds.zero < SHARDED_GRADIENTS) & (seconds.columns["offload_gradients"] == 0)
    return np.asarray(in_place)
