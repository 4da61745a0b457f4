"""How long the slots of passes take, in each phase.

Inside a pass a layer computes in every slot. Below and above its layers nothing computes, but
layers are still fetched or evicted. There the evictions of one pass and the fetches of the next run
side by side: a stage turns round. Some turns share the slot of the first layer
(``mistlab.cost.turns``).

Axes: S distinct strategies, K kinds of slots, P phases, N slots; the four streams first.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.beside_sends import slots_beside_sends
from mistlab.cost.first_pass import OF_STEPS, first_slots
from mistlab.cost.gathered_weights import ends_if_gathered, least_ends_if_gathered
from mistlab.cost.side_by_side import Streams, until
from mistlab.cost.slot_lengths import HERE, LOWER, UPPER, Kinds, Values, slot_ends
from mistlab.cost.slot_work import SlotWork
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.cost.turns import beside_sends, shared_turns
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slot_kinds import NOTHING
from mistlab.schedule.slot_table import PHASES

_FIRST, _FORWARD, _BACKWARD, _LAST = (
    PHASES.index(phase) for phase in ("first_forward", "forward", "backward", "last_backward")
)
# One more phase, after the others: the slots of a forward and a backward pass side by side.
_TURN = len(PHASES)
_COMPUTING = ("compute",)
_NOT_REDUCING = tuple(stream for stream in STREAMS if stream != "gpu_to_gpu")


class PassSlots:
    """Seconds of slots: ``inside`` a pass (P, K', S) in each phase; ``below`` it (4, K', S) in the
    forward, first forward and last backward pass and where the stage turns round; and ``above`` it
    (1, K', S), where the stage turns round. A turn that shares the slot of the first layer has the
    seconds by which the slot is longer.

    ``is_inside``, ``is_below`` and ``is_above`` are masks (K) of their kinds. ``has_turns`` says
    whether any strategy has work outside of passes where the stage turns round.
    """

    def __init__(self, seconds: TaskSeconds, kinds: Kinds, kept: Kept = "own") -> None:
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
        # The number of the kind of slot, among those of all phases.
        places = [
            np.add.outer(np.array(phases) * len(kinds), np.flatnonzero(where))
            for phases, where in parts
        ]
        rows = np.concatenate([one.ravel() for one in places])
        # Small tables take as long as large ones, so all slots are worked out together.
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
        self._turns_s = lasting[self._turning].copy()
        if self._turns is not None:
            shared = self._turns.rows
            longer_s = np.maximum(lasting[turn][:, shared] - self._turns.layer_s, 0.0)
            lasting[turn][:, shared] = longer_s
        self.inside, self.below, self.above = (
            part.reshape(*one.shape, lasting.shape[1])
            for part, one in zip(np.split(lasting, [first, last]), places, strict=True)
        )

    def last_computed(self) -> Values:
        """Seconds (K', S) of slots inside the last backward pass until all but reductions is
        done."""
        last = self._rows_inside(_LAST, _LAST)
        computed_s = until(_NOT_REDUCING, self._ends[:, last], self._alone[:, last])
        return np.asarray(np.maximum(computed_s, self._fetched_s[:, last].sum(axis=0)))

    def through_backward(self) -> Values:
        """Seconds (K', S) of slots inside steady backward passes, of the last layer's slot until
        the layer has computed: its gradient goes back while others are still reduced. Where
        gradients leave for the host, or layers are fetched further ahead, all is waited for."""
        if self._seconds.model.template.depth != 1:
            return np.asarray(self.inside[_BACKWARD])
        found = self.inside[_BACKWARD].copy()
        last = np.flatnonzero(self._kinds[self.is_inside, LOWER] == NOTHING)[:, None]
        stay = np.flatnonzero(self._seconds.columns["offload_gradients"] == 0)
        rows = self._rows_inside(_BACKWARD, _BACKWARD).start + last
        found[last, stay] = until(_COMPUTING, self._ends[:, rows, stay], self._alone[:, rows, stay])
        return np.asarray(found)

    def arithmetic(self) -> Values:
        """Seconds (2, K', S) of arithmetic alone, of both steady passes and of the step."""
        seconds, here = self._seconds, self._kinds[self.is_inside, HERE]
        passes_s = seconds.alone("F", "") + seconds.alone("B", "")
        return np.stack([passes_s[here], seconds.alone("S", "")[here]])

    def of_steps(self) -> Values:
        """The parts of ``FirstPass`` (parts, K', S), to be summed; no parts if nothing of the steps
        leaves the GPU."""
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

    def beside_sends(self) -> tuple[Values, Sequence[Values]]:
        """What sends cost the slots of steady passes (2, 6, K', S), as in ``slots_beside_sends``;
        and the usual seconds of turns, and what sends cost these (7, K', S), below a pass and above
        it, if there are turns."""
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
        turns *= beside_sends(self._seconds, self._alone[:, turning])
        return of_passes, np.split(turns, [np.count_nonzero(self.is_below)], axis=1)

    def _tasks(self, rows: NDArray[np.intp]) -> tuple[Streams, Values]:
        """The tasks alone (4, N, S) of slots with numbers among those of all phases, and the times
        (2, N, S) in which layers are fetched."""
        alone, fetched_s = self.work.alone(), self.work.fetched_s()
        turns = alone[:, _FORWARD] + alone[:, _BACKWARD]
        turns_s = np.maximum(fetched_s[:, _FORWARD], fetched_s[:, _BACKWARD])
        alone = np.concatenate([alone, turns[:, None]], axis=1)
        fetched_s = np.concatenate([fetched_s, turns_s[:, None]], axis=1)
        alone, fetched_s = (one.reshape(len(one), -1, one.shape[-1]) for one in (alone, fetched_s))
        return alone.take(rows, axis=1), fetched_s.take(rows, axis=1)

    def _gather_after_copies(self) -> None:
        """Correct the ends of slots (4, N, S) in which weights are gathered after they came from
        the host."""
        slots, strategies = np.nonzero(self._fetched_s[1])
        if not len(slots):
            return
        copied, gathered = self._fetched_s[:, slots, strategies]
        slowed = self._seconds.slowed_by(self._kept).chosen(strategies)
        ends_of = least_ends_if_gathered if self._kept == "least" else ends_if_gathered
        alone = self._alone[:, slots, strategies]
        self._ends[:, slots, strategies] = ends_of(alone, slowed, copied, gathered)

    def _wait_for_gradients(self, lasting: Values, phases: NDArray[np.intp]) -> None:
        """Make the slots (N, S) of backward passes longer whose layers wait until the gradients
        have left."""
        rows = np.flatnonzero((phases == _BACKWARD) | (phases == _LAST))[:, None]
        evicts = self.work.evicts
        evicting_s = self.work.evicting_s(self._alone[:, rows, evicts])
        lasting[rows, evicts] = np.maximum(lasting[rows, evicts], evicting_s)

    def _rows_inside(self, first: int, last: int) -> slice:
        """The slots inside the passes from one phase to another."""
        kinds = np.count_nonzero(self.is_inside)
        return slice(first * kinds, (last + 1) * kinds)
