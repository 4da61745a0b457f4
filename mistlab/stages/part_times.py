"""The times of a model's parts in orders of passes other than 1F1B, besides those of their passes:
separate weight-gradient passes, hosts, work that is done once an iteration, and what reductions and
sends of passes before lengthen a pass by.

Axes: C candidates, P parts of the model in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.stage_passes import StagePass, StagePasses
from mistlab.stages.stage_batch import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTimes:
    """How much longer a stage's pass takes if the pass before it still reduces gradients.

    A forward pass takes ``forward_s`` longer, a column for each part of the model to which the pass
    before may belong (C, P). The last gradients of a backward pass are reduced while the first
    layer of the next pass runs, or before it if weights must be fetched
    (``mistlab.cost.slot_work``). A forward pass leaves no gradients to reduce.

    If a stage has several chunks, a backward or weight-gradient pass may follow another one, which
    leaves ``left_s`` to reduce, by its part. Of this the pass's first layer hides
    ``hidden_backward_s`` or ``hidden_weights_s``, by the pass's own part; but since both slow each
    other down, the pass takes at least ``least_s`` longer.
    """

    forward_s: Floats
    left_s: Floats
    least_s: Floats
    hidden_backward_s: Floats
    hidden_weights_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlowedTimes:
    """How much longer one kind of pass takes because its stage sends an output meanwhile, a column
    for each part of the model (C, P).

    For each second of the send, the arithmetic of the pass takes ``share`` seconds longer, at most
    ``most_s`` in all. ``hidden_s`` of this costs nothing, since the pass waits for its copies and
    collectives anyway. But the send slows these too: if the send that precedes the pass in 1F1B
    runs entirely beside it, the pass takes at least ``beside_send_s`` longer.
    """

    share: Floats
    most_s: Floats
    hidden_s: Floats
    beside_send_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """The seconds of separate weight-gradient passes, and how much shorter backward passes get.

    ``weights_s`` are the seconds of the weight-gradient passes, with the reductions that layers
    wait for; in them, the first layer has computed after ``first_s``. ``less_s`` are the seconds by
    which the backward passes are shorter.
    """

    weights_s: Floats
    less_s: Floats
    first_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTimes:
    """The seconds in which hosts issue a forward and a backward pass of each part of the model.

    A host issues a part's pass block by block; ``blocks`` (C, P), the number of blocks, is at least
    one.
    """

    forward_s: Floats
    backward_s: Floats
    blocks: Floats

    @classmethod
    def of(cls, times: StageTimes, layers: Ints) -> Self:
        """Take the seconds in which hosts issue passes from the times of the model's parts.

        The parts have these numbers of blocks (C, P).
        """
        return cls(
            forward_s=times.issued_forward_s,
            backward_s=times.issued_backward_s,
            blocks=np.maximum(layers, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndTimes:
    """The gradient reductions and optimizer steps that each part of the model needs once an
    iteration, after its last backward pass.

    ``gathers_s`` are the seconds to gather one block's stepped weights again, before the part's
    first forward pass.
    ``reductions_s`` are the seconds to reduce all gradients of a part, if this begins in its last
    backward pass: a stage reduces one part after another, beside passes of other parts. ``tied_s``
    is the exchange of a tied embedding table, which comes after all reductions of its stage.
    ``steps_s`` is the work of a stage for a part after all of its passes and reductions, one part
    after another.
    """

    gathers_s: Floats
    reductions_s: Floats
    tied_s: Floats
    steps_s: Floats

    def steady_s(self, turned: TurnTimes | None) -> Floats:
        """The seconds for which each part reduces gradients in every pass; zero if only in the last
        one.
        """
        if turned is None:
            return np.zeros_like(self.reductions_s)
        return np.where(turned.left_s > 0, self.reductions_s, 0.0)

    def rests_s(self, times: StageTimes, split: SplitTimes | None) -> Floats:
        """The seconds of gradient reductions that are left when the last backward pass of each part
        of the model has computed.

        If weight gradients have separate passes, their reduction begins when the first layer of
        the last such pass has computed; otherwise in the first layer of the last backward pass.
        """
        rests_s = np.maximum(times.end_s - self.steps_s, 0.0)
        if split is None:
            return rests_s
        beside_s = split.weights_s + times.within_backward_s - split.first_s
        return np.maximum(rests_s, self.reductions_s - beside_s)


# Computes how much longer a pass takes because of what its stage still does of the passes before.


def columns_of(of_parts: Floats) -> list[Any]:
    """Split a table of seconds into a column, or a number, for each part of the model."""
    return of_parts[0].tolist() if len(of_parts) == 1 else [*of_parts.T]


class LateTurns:
    """Computes how much longer passes take while gradients of the previous pass are reduced."""

    def __init__(
        self,
        times: TurnTimes | None,
        passes: Sequence[StagePasses],
        maximum: Callable[[Any, Any], Any],
    ) -> None:
        self.is_any, self.maximum = times is not None, maximum
        if times is not None:
            self.of_forward = columns_of(times.forward_s)
            self.left_s, self.least_s = columns_of(times.left_s), columns_of(times.least_s)
            hidden_s = times.hidden_backward_s, times.hidden_weights_s
            self.hidden_s = dict(zip("BW", map(columns_of, hidden_s), strict=True))
        self.reduce = ["W" if of_stage.splits_backward else "B" for of_stage in passes]
        self.reducing: dict[int, int] = {}

    def before_s(self, stage_pass: StagePass, part: int) -> Any:
        """The seconds by which reductions of the stage's previous pass lengthen this pass."""
        if not self.is_any:
            return 0.0
        reducing, kind = self.reducing.pop(stage_pass.stage, None), stage_pass.kind
        if kind == self.reduce[stage_pass.stage]:
            self.reducing[stage_pass.stage] = part
        if reducing is None:
            return 0.0
        if kind == "F":
            return self.of_forward[reducing]
        return self.maximum(
            self.left_s[reducing] - self.hidden_s[kind][part], self.least_s[reducing]
        )


_SLOWED = tuple(entry.name for entry in fields(SlowedTimes))


class BesideSends:
    """Computes how much longer passes take because their stage sends at the same time."""

    def __init__(
        self, times: Mapping[PassKind, SlowedTimes], maximum: Callable[[Any, Any], Any]
    ) -> None:
        self.maximum = maximum
        self.of_kinds = {
            kind: [*zip(*(columns_of(getattr(of_kind, name)) for name in _SLOWED), strict=True)]
            for kind, of_kind in times.items()
        }

    def lost_s(self, stage_pass: StagePass, part: int, sending: tuple[Any, Any]) -> Any:
        """The seconds by which sends lengthen a pass.

        ``sending`` has the seconds for which its stage still sends when it begins, and the share of
        the last send that is left then.
        """
        if stage_pass.kind not in self.of_kinds:
            return 0.0
        share, most_s, hidden_s, beside_send_s = self.of_kinds[stage_pass.kind][part]
        sending_s, of_send = sending
        lost_s = share * sending_s
        lost_s = lost_s - self.maximum(lost_s - most_s, 0.0) - hidden_s
        return self.maximum(lost_s, beside_send_s * of_send)
