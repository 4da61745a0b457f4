"""The times of a stage's passes: sums over the slots of each phase.

Two passes that follow one another share the slots outside of them. A stage turns round at its first
layers, from a backward pass to a forward pass, and at its last layers.

Axes: C candidates, S distinct strategies, K kinds of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.beside_sends import STEADY, SUMS, TURNS, BesideSend, Pass, longest_slots
from mistlab.cost.first_pass import PARTS, FirstPass
from mistlab.cost.pass_slots import PassSlots
from mistlab.cost.slot_lengths import HERE, UPPER, Kinds, Sums, Values
from mistlab.cost.slot_work import SlotWork
from mistlab.cost.split_slots import split_slots
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.cost.turns import beside_sends, shared_turns
from mistlab.schedule.slot_kinds import NOTHING
from mistlab.schedule.slot_table import PHASES, SHARDED_GRADIENTS, Phase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """Seconds (C) inside the passes of each phase, and outside passes.

    The time inside the ``first`` forward pass leaves out what no layer of it waits for.

    ``through`` is the time inside steady passes of a micro-batch for which its stage was idle: a
    backward pass may go on when its gradient has been computed.
    ``last_computed`` is the time inside the last backward pass without reductions, which go on
    after it. ``opening`` comes before a steady forward pass by itself, ``first_opening`` before the
    first forward, ``last_closing`` after the last backward. By ``turn_at_first_layer`` a forward
    pass is longer that follows a backward pass. ``beside_sends`` says what sends cost steady passes
    and shared turns; it is empty if no stage sends beside its passes.

    ``computing`` and ``step_computing`` are the times of arithmetic alone, in steady passes and in
    the step.
    """

    inside: Mapping[Phase, Values]
    first: FirstPass
    through: Mapping[Phase, Values]
    last_computed: Values
    opening: Values
    first_opening: Values
    last_closing: Values
    turn_at_first_layer: Values
    turn_at_last_layer: Values
    beside_sends: Mapping[Pass, BesideSend]
    computing: Values
    step_computing: Values

    @property
    def after_last_s(self) -> Values:
        """Seconds (C) that surely come after the last layer of the last backward pass."""
        return self.last_closing + self.inside["step"]

    def chosen(self, rows: NDArray[np.intp] | slice) -> "PassSeconds":
        """The passes of the candidates in these rows."""
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
_ALONE = "computing", "step_computing"


@dataclass(frozen=True, slots=True, eq=False)
class PassSums:
    """Sums (L, C) of the lengths of slots of which ``PassSeconds`` are made, in the order of
    ``pass_sums``. Either none or all ``steps`` of the first pass are among them."""

    values: Values
    steps: bool

    def chosen(self, rows: NDArray[np.intp]) -> "PassSums":
        """The sums of the candidates in these rows."""
        return PassSums(self.values.take(rows, axis=1), self.steps)

    def passes(self) -> PassSeconds:
        """The times of passes."""
        sums = iter(self.values)
        opening, first_opening, last_closing, at_first_layer, at_last_layer = islice(sums, 5)
        last_computed, computing, step_computing = islice(sums, 3)
        through_backward_s = next(sums)
        inside_s = dict(zip(PHASES, islice(sums, len(PHASES)), strict=True))
        # Without offloading there is nothing of the first pass to sum.
        first = FirstPass(*(islice(sums, PARTS) if self.steps else np.zeros((PARTS, 1))))
        inside_s["first_forward"] = inside_s["first_forward"] - first.unawaited
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
        )


def pass_sums(
    seconds: TaskSeconds, kinds: Kinds, summed: Sums, *, sends: bool = True, kept: Kept = "own"
) -> PassSums:
    """The sums of stages' passes, which may be beside ``sends``; ``summed`` sums lengths of slots
    over each stage. If the ``least`` factors are kept, times that no greater work on the same
    streams undercuts."""
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
    return PassSums(summed(lengths), len(steps) > 0)


def _beside_sends(
    usual_s: Mapping[Phase, Values], sums: Sequence[Values]
) -> Mapping[Pass, BesideSend]:
    """Steady passes, and turns if there are any, beside sends, from their sums."""
    if not sums:
        return {}
    forward, backward, turns = sums[:SUMS], sums[SUMS : 2 * SUMS], sums[2 * SUMS :]
    beside: dict[Pass, BesideSend] = {
        "forward": BesideSend.of_sums(usual_s["forward"], *forward),
        "backward": BesideSend.of_sums(usual_s["backward"], *backward),
    }
    half = len(turns) // 2
    found = zip(TURNS, (turns[:half], turns[half:]), strict=True)
    return {**beside, **{name: BesideSend.of_sums(*of_turn) for name, of_turn in found if of_turn}}


def split_pass_seconds(
    seconds: TaskSeconds, kinds: Kinds, summed: Sums, *, weights_s: Values, unhidden_s: Values
) -> tuple[Values, Values]:
    """Seconds (C) of passes that make gradients of weights, in which the gradients are reduced, and
    by which steady backward passes are shorter without them.

    The products take ``weights_s`` (T, S). For ``unhidden_s`` tensor-parallel ranks wait for one
    another, which these products hid before. Both passes together are never shorter than one.
    """
    is_inside = kinds[:, HERE] != NOTHING
    split = split_slots(SlotWork(seconds, kinds[is_inside]), weights_s, unhidden_s)
    whole_s, inputs_s, weights_s, waits_s = summed([(split, is_inside)])
    less_s = whole_s - inputs_s
    return np.maximum(weights_s, less_s + waits_s), less_s


def longest_beside_sends(seconds: TaskSeconds, kinds: Kinds, summed: Sums) -> Mapping[Pass, Values]:
    """Seconds (C) of steady passes and of turns beside a send that goes on all through them, which
    no lesser work exceeds."""
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


def least_passes(ends: Sequence[PassSeconds], longest_s: Mapping[Pass, Values]) -> PassSeconds:
    """The times that no passes of a box undercut, from those at both ends of its recomputed blocks
    with the least ratios; ``longest_s`` are those of its ``longest_beside_sends``.

    The number of each kind of slot is linear in the number of recomputed blocks. So each sum of
    slots rises or falls all the way between the two ends, and is least at one of them.
    """

    def least(sums: Sequence[Mapping[Phase, Values]]) -> Mapping[Phase, Values]:
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


def reduces_in_place(seconds: TaskSeconds) -> NDArray[np.bool_]:
    """Strategies (S) that reduce gradients in place, and so go on computing meanwhile."""
    in_place = (seconds.zero < SHARDED_GRADIENTS) & (seconds.columns["offload_gradients"] == 0)
    return np.asarray(in_place)
