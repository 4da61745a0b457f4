"""Computes the seconds of a pipeline stage's forward and backward passes as sums over its layers.

Axes: C candidates, S strategies, K kinds of slots, P phases, N slots; the four streams first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import NOTHING, Sums
from mistlab.cost.beside_sends import (
    STEADY,
    SUMS,
    TURNS,
    BesideSend,
    Pass,
    beside_sends,
    slots_beside_sends,
)
from mistlab.cost.layer_recurrences import least_first, least_in_windows, without_leaving_s
from mistlab.cost.side_by_side import (
    AHEAD,
    AWAY,
    LINK,
    ends_if_gathered,
    least_ends_if_gathered,
    until,
)
from mistlab.cost.slot_work import (
    HERE,
    LOWER,
    UPPER,
    SlotWork,
    first_slots,
    in_slots,
    leave_passes,
    reduced_inside,
    shared_turns,
    slot_ends,
    slots_of_stepping,
    steps_in_turn,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import PHASES, Phase

# Computes the seconds of each layer in a pass, with the transfers that overlap with it.


_FIRST, _FORWARD, _BACKWARD, _LAST = (
    PHASES.index(phase) for phase in ("first_forward", "forward", "backward", "last_backward")
)
# The number of the phase between two passes (the "turn"), in which one pass ends while the next
# begins.
_TURN = len(PHASES)
_NOT_REDUCING = tuple(stream for stream in STREAMS if stream != "gpu_to_gpu")


class PassSlots:
    """The seconds of each layer in a pass, with the transfers that overlap with it, and those of
    the transfers before and after a pass.

    Time slots ``inside`` a pass (P, K', S) are those in which layers compute, for each phase. Slots
    ``below`` (4, K', S) come before the first layer, in three phases and between two passes; slots
    ``above`` (1, K', S) come after the last layer, between two passes. Where a slot between two
    passes is merged into the slot of the next pass's first layer, it counts how much it lengthens
    that slot.

    ``is_inside``, ``is_below`` and ``is_above`` are masks (K) of these kinds of slots.
    ``has_turns`` says whether any strategy has work between a backward and a forward pass.
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
        # Each phase, and in it each kind of layer with its neighbours, has a row in a table of
        # layer times.
        places = [
            np.add.outer(np.array(phases) * len(kinds), np.flatnonzero(where))
            for phases, where in parts
        ]
        rows = np.concatenate([one.ravel() for one in places])
        # A small table takes as long to compute as a large one, so all phases are in one.
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
        if kept == "own" and len(self.work.evicts) and seconds.model.template.depth != 1:
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
        self.leave = leave_passes(seconds)
        self._without_leaving()
        if kept == "least":
            # Reductions of the last pass may be hidden beside longer copies.
            self.inside[_LAST][:, self.work.evicts] = self.inside[_BACKWARD][:, self.work.evicts]

    def _without_leaving(self) -> None:
        """Count data that leaves a pass in the pass alone, not in the time after it."""
        seconds = self._seconds
        if not self.leave.any():
            return
        after = zip(
            (self.below[-1], self.above[-1]),
            (self.is_below, self.is_above),
            self.leave[::-1],
            strict=True,
        )
        alone = self.work.alone(("forward", "backward")).sum(axis=1)
        fetched_s = self.work.fetched_s(("forward", "backward")).sum(axis=0).max(axis=0)
        alone[AWAY] = 0.0
        alone[LINK] -= reduced_inside(seconds, self._kinds[:, UPPER])
        alone = np.maximum(alone, 0.0)
        for turn_s, where, leave in after:
            chosen = np.flatnonzero(leave)
            of_turn = alone[:, where][..., chosen]
            ends = slot_ends(seconds, of_turn, True, chosen)
            lasting = until(STREAMS, ends, of_turn)
            turn_s[:, chosen] = np.maximum(lasting, fetched_s[where][:, chosen])

    def least_in_windows(self) -> Floats:
        """Lower bounds by layer of the seconds of passes from which data leaves, in one table."""
        alone = self.work.alone(("forward", "backward"))[:, :, self.is_inside]
        least = least_in_windows(self._seconds, self._kinds[self.is_inside], alone)
        return least.reshape(-1, *least.shape[2:])

    def last_computed(self) -> Floats:
        """The seconds of each layer in the last backward pass, without gradient reductions."""
        last = self._rows_inside(_LAST, _LAST)
        computed_s = until(_NOT_REDUCING, self._ends[:, last], self._alone[:, last])
        return np.asarray(np.maximum(computed_s, self._fetched_s[:, last].sum(axis=0)))

    def through_backward(self) -> Floats:
        """The seconds of each layer in a steady backward pass until its gradient can be sent back.

        Of the last slot, only the time until its layer has computed counts; but if gradients are
        offloaded or layers are fetched further ahead, the whole slot counts. In lower bounds no
        layer waits for gradients that leave, since these may leave in any slot. The result is
        (K', S).
        """
        if self._seconds.model.template.depth != 1:
            return np.asarray(self.inside[_BACKWARD])
        lengths = self.inside[_BACKWARD].copy()
        last = np.flatnonzero(self._kinds[self.is_inside, LOWER] == NOTHING)[:, None]
        stay = np.flatnonzero(self._seconds.columns["offload_gradients"] == 0)
        rows = self._rows_inside(_BACKWARD, _BACKWARD).start + last
        lengths[last, stay] = until(
            ("compute",), self._ends[:, rows, stay], self._alone[:, rows, stay]
        )
        evicts = self.work.evicts
        if self._kept == "least" and len(evicts):
            inside = np.flatnonzero(self.is_inside)[:, None]
            alone = self.work.alone(("backward",), without={"R"})[:, 0, inside, evicts]
            fetched_s = self._fetched_s[:, self._rows_inside(_BACKWARD, _BACKWARD)][..., evicts]
            slowed = in_slots(self._seconds.slowed_by("least"), alone, evicts)
            lengths[:, evicts] = without_leaving_s(alone, fetched_s, slowed)
        return np.asarray(lengths)

    def arithmetic(self) -> Floats:
        """The seconds of each layer's arithmetic: in steady passes, and its step (2, K', S)."""
        seconds, here = self._seconds, self._kinds[self.is_inside, HERE]
        passes_s = seconds.alone("F", "") + seconds.alone("B", "")
        return np.stack([passes_s[here], seconds.alone("S", "")[here]])

    def of_steps(self) -> Floats:
        """The parts of ``first_slots`` for each layer, if any offloads weights or states; in lower
        bounds of all passes with optimizer steps, with the bounds of ``least_first``.
        """
        columns, is_least = self._seconds.columns, self._kept == "least"
        offloads = (columns["offload_weights"] > 0) | (columns["offload_optimizer"] > 0)
        bounds = is_least and steps_in_turn(self._seconds)
        if not self._seconds.model.template.depth or not (bounds or offloads.any()):
            return np.empty((0, *self.inside.shape[1:]))
        first = self._rows_inside(_FIRST, _FIRST)
        stepped = self.work.alone(("first_forward",), without=OF_STEPS)[:, 0, self.is_inside]
        kinds = self._kinds[self.is_inside]
        parts = first_slots(
            self._seconds,
            kinds,
            (self._alone[:, first], self._ends[:, first]),
            stepped,
            self.inside[_FORWARD],
            is_least=is_least,
        )
        return np.concatenate([parts, least_first(self._seconds, kinds)]) if bounds else parts

    def beside_sends(self) -> tuple[Floats, Sequence[Floats]]:
        """The numbers from which the slowdown by sends is computed, for each layer of the steady
        passes and for the time between passes.

        The numbers are those of ``slots_beside_sends``: for steady passes (2, 6, K', S), and
        between them (7, K', S), where the first row is the usual seconds.
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
        # Sends overlap with the time between two passes only if they start in it, or if no pass
        # follows.
        turns[:-1] *= beside_sends(self._seconds, self._alone[:, turning])
        return of_passes, np.split(turns, [np.count_nonzero(self.is_below)], axis=1)

    def _tasks(self, rows: Rows) -> tuple[Floats, Floats]:
        """The seconds of each stream's tasks while one layer computes, and of fetching and
        gathering its weights.

        Shapes: (4, N, S) and (2, N, S), for these ``rows`` of a table of all phases.
        """
        alone, fetched_s = self.work.alone(), self.work.fetched_s()
        turns = alone[:, _FORWARD] + alone[:, _BACKWARD]
        turns_s = np.maximum(fetched_s[:, _FORWARD], fetched_s[:, _BACKWARD])
        alone = np.concatenate([alone, turns[:, None]], axis=1)
        fetched_s = np.concatenate([fetched_s, turns_s[:, None]], axis=1)
        alone, fetched_s = (one.reshape(len(one), -1, one.shape[-1]) for one in (alone, fetched_s))
        return alone.take(rows, axis=1), fetched_s.take(rows, axis=1)

    def _gather_after_copies(self) -> None:
        """Correct the time of layers whose weights are copied from the host, then gathered."""
        slots, strategies = np.nonzero(self._fetched_s[1])
        if not len(slots):
            return
        copied, gathered = self._fetched_s[:, slots, strategies]
        slowed = self._seconds.slowed_by(self._kept).chosen(strategies)
        ends_of = least_ends_if_gathered if self._kept == "least" else ends_if_gathered
        alone = self._alone[:, slots, strategies]
        self._ends[:, slots, strategies] = ends_of(alone, slowed, copied, gathered)

    def _wait_for_gradients(self, lasting: Floats, phases: Rows) -> None:
        """Lengthen the time of layers that wait in backward passes until gradients left the GPU."""
        rows = np.flatnonzero((phases == _BACKWARD) | (phases == _LAST))[:, None]
        evicts = self.work.evicts
        evicting_s = self.work.evicting_s(self._alone[:, rows, evicts])
        lasting[rows, evicts] = np.maximum(lasting[rows, evicts], evicting_s)

    def _in_turn(self, lasting: Floats) -> None:
        """Correct the time of layers whose own offloads start before the next layer computes."""
        work = SlotWork(self._seconds, self._kinds[self.is_inside])
        first, is_least = self._rows_inside(_FIRST, _FIRST), self._kept == "least"
        lasting[first] = slots_of_stepping(work, lasting[first], is_least=is_least)

    def _rows_inside(self, first: int, last: int) -> slice:
        """The row numbers of layers inside passes from phase ``first`` to ``last``, in a table."""
        kinds = np.count_nonzero(self.is_inside)
        return slice(first * kinds, (last + 1) * kinds)


# Computes the times of a stage's passes as sums over the layers of each phase.

# These kinds of tasks belong to a layer's optimizer step.
OF_STEPS = frozenset({"S", "P", "G", "O"})


@dataclass(frozen=True, slots=True, eq=False)
class FirstPass:
    """The seconds of each candidate's first forward pass, with and without the optimizer steps that
    run in it.

    ``unawaited`` are seconds of copies at the ends of time slots, for which no layer waits; of
    these the stage's next pass waits for ``after``. ``stepped`` is the time of the pass if all
    optimizer steps had run before, for stages that offload states or weights. ``block_steps`` and
    ``end_steps`` are the arithmetic of the steps of blocks with offloaded weights, and of other
    layers, without the first layer. ``passing`` is the pass's arithmetic, in lower bounds. ``late``
    is the time of a pass that is played, zero where the other fields give it.
    """

    unawaited: Floats
    after: Floats
    stepped: Floats
    block_steps: Floats
    end_steps: Floats
    passing: Floats
    late: Floats

    def chosen(self, rows: Rows | slice) -> "FirstPass":
        """Select the candidates with these indices."""
        parts = (getattr(self, entry.name) for entry in fields(self))
        # A stage that offloads nothing has a single zero for all candidates.
        return FirstPass(*(part if len(part) == 1 else part[rows] for part in parts))

    @classmethod
    def least(cls, ends: Sequence["FirstPass"]) -> "FirstPass":
        """The smallest times of the candidates, for lower bounds of the first forward pass."""
        return cls(*(np.minimum(*(getattr(end, one.name) for end in ends)) for one in fields(cls)))

    def within_s(
        self,
        whole_s: Floats,
        forward_s: Floats,
        blocks: Ints,
        offloads_weights: Bools,
    ) -> Floats:
        """By how many seconds the first micro-batch's forward pass takes longer than a steady one.

        The first pass takes ``whole_s``, a steady one ``forward_s``. Optimizer steps need no
        activations, so they may run before a first micro-batch that comes late. With offloaded
        weights only two blocks can step before it, since buffers have no room for more; meanwhile
        the states of a third block are fetched. The other blocks step during the pass.
        """
        others = np.maximum(blocks - 1, 1)
        ahead = np.minimum(1.0, AHEAD / others)
        held_s = np.where(blocks > AHEAD, self.block_steps / others + ahead * self.end_steps, 0.0)
        steps_s = np.maximum(whole_s - self.stepped, 0.0) * (1 - ahead) + held_s
        stepping_s = self.block_steps * (1 - 1 / others) + self.end_steps
        least_s = self.passing + np.where(blocks > AHEAD, stepping_s, 0.0)
        steps_s = np.where(self.passing > 0, least_s - self.stepped, steps_s)
        passed_s = self.stepped + np.where(offloads_weights, steps_s, 0.0)
        passed_s = np.where(self.late > 0, self.late, passed_s)
        return np.where(self.stepped > 0, passed_s - forward_s, np.zeros_like(forward_s))


# The number of the first rows of ``PassSums.values``, with the time between passes. Then come a
# last pass until its layers have computed, a backward pass until its gradient can be sent, and each
# phase.
BETWEEN = 5
# The number of fields of ``FirstPass`` that are sums over layers: all but ``late``.
PARTS = len(fields(FirstPass)) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """The seconds of each candidate stage inside its passes, by phase, and between its passes.

    Copies at either end of the ``first`` forward pass that no layer waits for are not included.

    ``through`` is the time from when a micro-batch arrives at an idle stage until its output (in a
    backward pass, its gradient) can be sent. ``last_computed`` is the time inside the last
    backward pass without the reductions that go on after it: for ``reducing`` seconds where
    gradients are offloaded. ``opening`` comes before a steady forward pass by itself,
    ``first_opening`` before the first forward pass, ``last_closing`` after the last backward pass.
    A forward pass that follows a backward pass is longer by ``turn_at_first_layer``.
    ``beside_sends`` says how much sends slow all of these; it is empty if no stage sends meanwhile.

    ``computing`` and ``step_computing`` are the times of arithmetic alone, in steady passes and in
    the optimizer step. ``windows`` are bounds of passes from which data leaves, ``again`` (6, C)
    their times after a pass of their own kind and by how much the others differ where they are
    simulated (``MOVED``); zero for others.
    """

    inside: Mapping[Phase, Floats]
    first: FirstPass
    through: Mapping[Phase, Floats]
    last_computed: Floats
    reducing: Floats
    opening: Floats
    first_opening: Floats
    last_closing: Floats
    turn_at_first_layer: Floats
    turn_at_last_layer: Floats
    beside_sends: Mapping[Pass, BesideSend]
    computing: Floats
    step_computing: Floats
    windows: Floats
    again: Floats

    @property
    def after_last_s(self) -> Floats:
        """The least seconds that follow the last layer of the last backward pass."""
        return self.last_closing + self.inside["step"]

    def chosen(self, rows: Rows | slice) -> "PassSeconds":
        """Select the candidates with these indices."""
        inside = {phase: seconds[rows] for phase, seconds in self.inside.items()}
        return PassSeconds(
            inside=inside,
            first=self.first.chosen(rows),
            through={phase: seconds[rows] for phase, seconds in self.through.items()},
            **{name: getattr(self, name)[rows] for name in (*ONCE, *ALONE)},
            beside_sends={phase: one.chosen(rows) for phase, one in self.beside_sends.items()},
            windows=self.windows[..., rows],
            again=self.again[:, rows],
        )

    def with_leaving(self, simulated: Floats, left_s: Floats) -> "PassSeconds":
        """The passes with the ``simulated`` times (9, C) of those from which data leaves; after the
        first pass it does for ``left_s`` (C). They take at least what their lower bounds say.
        """
        forward_s, back_s, last_s, over_s, reducing_s, turned_s, turned_back_s, *again = simulated
        inside, least_s, closing_s = dict(self.inside), self.windows.max(axis=1), self.last_closing
        least_back_s, (leave, leave_back) = least_s[1], least_s > 0
        both_s = turned_s + turned_back_s - self.turn_at_first_layer - self.turn_at_last_layer
        of_forward_s = np.where(
            leave_back,
            np.minimum(turned_s - self.turn_at_first_layer, both_s - least_back_s),
            both_s - inside["backward"],
        )
        forward = np.where(leave, np.maximum(of_forward_s, least_s[0]), inside["forward"])
        backward = np.maximum(both_s - forward, least_back_s)
        last = np.where(leave_back, backward + last_s - back_s, inside["last_backward"])
        through = np.where(leave, np.maximum(forward_s, least_s[0]), inside["forward"])
        through_back = np.where(leave_back, np.minimum(back_s, backward), self.through["backward"])
        inside["forward"], inside["last_backward"] = forward, last
        inside["backward"] = np.where(leave_back, backward, inside["backward"])
        # The backward pass waits for activations that outlast the first pass.
        waits_s = turned_back_s - self.turn_at_last_layer - back_s
        waits_s += leave_back * np.minimum(over_s - backward, 0.0)
        waits_s = leave * (np.clip(waits_s, 0.0, left_s) - self.first.after)
        inside["first_forward"] = inside["first_forward"] + np.maximum(waits_s, 0.0)
        moved = (
            turned_s - forward - self.turn_at_first_layer,
            turned_back_s - through_back - self.turn_at_last_layer,
            *(forward_s - through, through_back - inside["backward"]),
        )
        opening = np.minimum(self.opening, self.turn_at_first_layer)
        return replace(
            self,
            inside=inside,
            through={"forward": through, "backward": through_back},
            last_closing=np.where(leave_back, np.maximum(over_s, backward) - last, closing_s),
            reducing=reducing_s,
            again=np.stack([*again, *np.where(leave | leave_back, moved, 0.0)]),
            opening=np.where(leave | leave_back, opening, self.opening),
            beside_sends=self._beside(inside, (leave, leave_back), BesideSend.hiding_nothing),
        )

    def with_least_leaving(self) -> "PassSeconds":
        """The lower bounds, with ``windows`` for passes from which data leaves."""
        if not self.windows.size:
            return self
        least_s, through, inside = self.windows.max(axis=1), dict(self.through), dict(self.inside)
        leave, leave_back = least_s > 0
        for way, phase in enumerate(STEADY):
            least = np.where(least_s[way] > 0, least_s[way], inside[phase])
            inside[phase], through[phase] = least, np.minimum(through[phase], least)
        inside["last_backward"] = np.where(leave_back, least_s[1], inside["last_backward"])
        beside = self._beside(inside, (leave, leave_back), BesideSend.without_copies)
        closing_s = self.last_closing - leave_back * (inside["backward"] - through["backward"])
        passes = replace(self, inside=inside, through=through, beside_sends=beside)
        return replace(passes, last_closing=np.maximum(closing_s, 0.0))

    def _beside(
        self,
        inside: Mapping[Phase, Floats],
        leave: tuple[Bools, Bools],
        of_turn: Callable[[BesideSend, Bools], BesideSend],
    ) -> Mapping[Pass, BesideSend]:
        """How much sends slow down forward and backward passes whose times have changed.

        ``inside`` are the new times, where activations ``leave`` forward passes or gradients leave
        backward passes (a mask of candidates for each); ``of_turn`` changes the turn after these.
        """
        beside = dict(self.beside_sends)
        for phase, where, back in zip(STEADY, leave, (False, True), strict=True):
            if phase in beside:
                beside[phase] = beside[phase].instead_of(inside[phase], where, is_back=back)
        for name, where in zip(TURNS, reversed(leave), strict=True):
            if name in beside:
                beside[name] = of_turn(beside[name], where)
        return beside


ONCE = (
    *("last_computed", "reducing", "opening", "first_opening", "last_closing"),
    *("turn_at_first_layer", "turn_at_last_layer"),
)
ALONE = "computing", "step_computing"


@dataclass(frozen=True, slots=True, eq=False)
class PassSums:
    """Sums over the layers of each candidate stage, from which its pass times are computed.

    ``queued``, ``first`` and ``leaving`` are of ``mistlab.cost.layer_recurrences``.
    Under a host ``slots`` are the terms of the sums from row ``BETWEEN`` on: of passes (7, K', S),
    and where passes overlap with ``sends`` those of ``slots_beside_sends`` too.
    """

    values: Floats
    steps: int
    sends: bool
    slots: Floats | None = None
    prices: int = 0
    queued: Floats | None = None
    first: Floats | None = None
    leaving: Floats | None = None

    def chosen(self, rows: Rows) -> "PassSums":
        """Select the candidates with these indices, without the terms of the sums."""
        sums = replace(self, slots=None)
        tables = {entry.name: getattr(sums, entry.name) for entry in fields(sums)}
        chosen = {name: table.take(rows, -1) for name, table in tables.items() if np.ndim(table)}
        return replace(sums, **chosen)

    def passes(self) -> PassSeconds:
        """Compute the pass times of each candidate from the sums over its layers."""
        sums = iter(self.values)
        opening, first_opening, last_closing, at_first_layer, at_last_layer = islice(sums, BETWEEN)
        last_computed, through_backward_s = islice(sums, 2)
        inside_s = dict(zip(PHASES, islice(sums, len(PHASES)), strict=True))
        lost = [*islice(sums, 2 * SUMS * self.sends)]
        computing, step_computing = islice(sums, 2)
        # Only stages that offload weights or optimizer states have these sums.
        parts = islice(sums, PARTS) if self.steps else np.zeros((PARTS, 1))
        begun, late, left_s = np.zeros((3, 1)) if self.first is None else self.first
        first = FirstPass(*(*parts, late))
        first_s = inside_s["first_forward"] - first.unawaited
        begun_s = np.maximum.reduce([begun, *islice(sums, max(self.steps - PARTS, 0))])
        first = replace(first, late=np.where((begun > 0) & (late > 0), begun_s, late))
        inside_s["first_forward"] = np.where(begun == 0, first_s, begun_s - first_opening)
        if self.queued is not None:
            of_slots = first_opening + inside_s["first_forward"], last_computed
            whole_s, last_computed, inside_s["last_backward"] = np.where(
                self.queued > 0, self.queued, [*of_slots, inside_s["last_backward"]]
            )
            inside_s["first_forward"] = whole_s - first_opening
        windows = np.array([*islice(sums, 2 * self.prices)]).reshape(2, self.prices, len(computing))
        passes = PassSeconds(
            inside=inside_s,
            first=first,
            through={"forward": inside_s["forward"], "backward": through_backward_s},
            last_computed=last_computed,
            reducing=np.zeros_like(computing),
            opening=opening,
            first_opening=first_opening,
            last_closing=last_closing,
            turn_at_first_layer=at_first_layer,
            turn_at_last_layer=at_last_layer,
            beside_sends=_beside_sends(inside_s, [*lost, *sums]),
            computing=computing,
            step_computing=step_computing,
            windows=windows,
            again=np.zeros((6, len(computing))),
        )
        return passes if self.leaving is None else passes.with_leaving(self.leaving, left_s)


def pass_sums(
    seconds: TaskSeconds, kinds: Ints, summed: Sums, *, sends: bool = True, kept: Kept = "own"
) -> PassSums:
    """Sum up the seconds of stages' passes over their layers, using the function ``summed``.

    Passes may overlap with ``sends``. With ``kept`` "least" the sums are lower bounds for this work
    and any greater work on the same streams.
    """
    slots = PassSlots(seconds, kinds, kept)
    steps = slots.of_steps()
    of_passes = [slots.last_computed()[None], slots.through_backward()[None], slots.inside]
    windows = slots.least_in_windows() if slots.leave.any() else slots.inside[:0]
    lost, turns = slots.beside_sends() if sends else ((), ())
    of_passes = [*of_passes, *lost]
    inside = [*of_passes, slots.arithmetic(), steps, windows]
    lengths = [
        (slots.below, slots.is_below),
        (slots.above, slots.is_above),
        (np.concatenate(inside), slots.is_inside),
    ]
    lengths += zip(turns, (slots.is_below, slots.is_above), strict=bool(turns))
    is_held = seconds.model.host is not None and kept == "own"
    held = np.concatenate(of_passes) if is_held else None
    return PassSums(summed(lengths), len(steps), sends, held, len(windows) // 2)


def _beside_sends(
    usual_s: Mapping[Phase, Floats], sums: Sequence[Floats]
) -> Mapping[Pass, BesideSend]:
    """How much sends slow down passes and the time between passes, from sums over layers."""
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
