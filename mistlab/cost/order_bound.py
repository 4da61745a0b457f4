"""The least time of an iteration in an order of passes, without a path through all passes.

In every order a stage runs all its passes. The first of them is a forward pass of its first chunk,
and waits until the first micro-batch has come through the first chunks of the stages in front. The
last backward pass is of its first chunk too, and its gradient goes back through the same chunks.
And a micro-batch passes through all parts of the model, there and back. Parts lie in a loop or in a
V (``mistlab.schedule.placement``): in both, the first chunks are the first parts.

A host issues all passes of its stage one after another, from the beginning of the iteration on, and
may be ahead of them. So a stage's last pass ends no earlier than its host has issued all. Work
after it may go on beside a pass that waits for its host.

Axes: C candidates, V chunks of a stage, S stages; P parts of the model in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.chains import Chains
from mistlab.cost.pipeline import StageTimes
from mistlab.schedule.placement import Placement

Table = NDArray[np.float64]

# The times of a part that a bound adds up, each of which makes no pipeline faster by being longer;
# those of a chunk, with its host's.
OF_PARTS = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "begin_s", "end_s", "gone_backward_s"),
)
OF_CHUNKS = (*OF_PARTS, "issued_s")


def order_bound_s(
    times: StageTimes,
    placement: Placement,
    micro_batches: Table | int,
    *,
    issued_s: Table | None = None,
    splits: bool = False,
    steps_apart: bool = False,
) -> Table:
    """Seconds (C) that an iteration takes at least, from the times of parts (C, P), and from those
    in which hosts issue both passes of a micro-batch.

    An order ``splits`` backward passes if gradients of weights have passes of their own: together
    the two are at least as long. With ``steps_apart`` no stage waits for the beginning of another.
    """
    goes_back = not (splits or steps_apart)
    own = _OfChunks(times, placement, issued_s)
    stages = InOrder.of(own.chunks, np.asarray(micro_batches)[..., None], goes_back=goes_back)
    before_s = stages.begin_s if steps_apart else own.way_in_s(stages)
    goes_s = own.way_out_s(stages) if goes_back else np.zeros_like(stages.end_s)
    passed_s = before_s + stages.all_s + np.maximum(stages.end_s, goes_s)
    issued_s = stages.issued_within_s(steps_apart=steps_apart) + goes_s
    longest = np.asarray(np.maximum(passed_s, issued_s).max(axis=1))
    return np.maximum(longest, own.there_and_back_s()) if goes_back else longest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InOrder:
    """Seconds of stages (C), as far as bounds of an order of passes ask for them.

    ``all_s`` are those of all passes, from when the input of the first pass has come until the last
    gradient can go back; a host issues them in ``issued_s``. The first micro-batch passes through
    in ``first_s``, the last gradient goes back in ``last_s``. Work of ``begin_s`` comes before the
    first pass, work of ``end_s`` after the last one.
    """

    all_s: Table
    issued_s: Table
    first_s: Table
    last_s: Table
    begin_s: Table
    end_s: Table

    @classmethod
    def of(
        cls,
        chunks: Sequence[Mapping[str, Table]],
        micro_batches: Table | int,
        *,
        goes_back: bool,
    ) -> Self:
        """The stages whose chunks have these times (``OF_CHUNKS``). If no gradient ``goes_back`` in
        the end, what comes after the last pass counts as one of the passes."""
        first, nothing = chunks[0], np.zeros_like(chunks[0]["end_s"])
        both_s = sum((one["forward_s"] + one["backward_s"] for one in chunks), nothing)
        once_s = sum(
            (one["within_forward_s"] + one["within_backward_s"] for one in chunks), nothing
        )
        once_s = once_s + sum((one["begin_s"] for one in chunks[1:]), nothing)
        all_s = micro_batches * both_s + once_s + first["through_forward_s"] - first["forward_s"]
        if goes_back:
            all_s = all_s - first["backward_s"] + first["gone_backward_s"]
        last_s = first["through_backward_s"] + first["within_backward_s"]
        issued_s = micro_batches * sum((one["issued_s"] for one in chunks), nothing)
        after_s = nothing if goes_back else first["end_s"]
        return cls(
            all_s=np.asarray(all_s + after_s),
            issued_s=np.asarray(issued_s),
            first_s=first["through_forward_s"] + first["within_forward_s"],
            last_s=last_s if goes_back else nothing,
            begin_s=first["begin_s"],
            end_s=first["end_s"] if goes_back else nothing,
        )

    def issued_within_s(self, *, steps_apart: bool) -> Table:
        """Seconds (C) that a stage's passes take at least because a host issues them; with
        ``steps_apart`` none, since an iteration of the stage may begin after that of its host."""
        return np.zeros_like(self.issued_s) if steps_apart else self.issued_s


def in_front_s(
    stage: InOrder,
    sent_s: tuple[Table, Table],
    after: Chains[Table],
    *,
    is_last: bool,
    steps_apart: bool,
) -> Chains[Table]:
    """Bounds (C) of a stage and the stages after it, as the chains ``through``, ``through_begun``
    and ``whole``; the others are zero. ``sent_s`` are the times of sends to the next stage and
    back.

    ``through`` begins when the first micro-batch arrives. It ends when the last gradient is sent
    back; if none is waited for, when all stages are over. ``through_begun`` ends there too, and
    begins with the iteration.
    """
    through_s, issued_s = stage.all_s, stage.issued_within_s(steps_apart=steps_apart)
    begun_s = np.zeros_like(through_s)
    if not (is_last or steps_apart):
        there_s, back_s = stage.first_s + sent_s[0], stage.last_s + sent_s[1]
        through_s = np.maximum(through_s, there_s + back_s + after.through)
        begun_s = back_s + after.through_begun
    begun_s = np.maximum(begun_s, stage.begin_s + through_s)
    whole_s = np.maximum.reduce([begun_s + stage.end_s, issued_s, after.whole])
    begun_s = np.maximum(begun_s, issued_s)
    nothing = Chains.of_nothing(np.zeros_like(whole_s))
    return replace(nothing, through=through_s, through_begun=begun_s, whole=whole_s)


class _OfChunks:
    """The times of parts, for each chunk of all stages (C, S)."""

    def __init__(self, times: StageTimes, placement: Placement, issued_s: Table | None) -> None:
        num_stages = placement.num_stages
        assert placement.stages[:num_stages] == (*range(num_stages),), "the first parts are first"
        of = {name: getattr(times, name) for name in (*OF_PARTS, "point_to_point_s")}
        of["issued_s"] = np.zeros_like(times.forward_s) if issued_s is None else issued_s
        self.chunks = [
            {name: table[:, parts] for name, table in of.items()}
            for parts in (
                [placement.of_stage(stage)[chunk] for stage in range(num_stages)]
                for chunk in range(placement.chunks)
            )
        ]
        self.crossed_s = [
            one["point_to_point_s"] / 2 if num_stages > 1 else one["forward_s"] * 0.0
            for one in self.chunks
        ]
        self.last_stage = placement.last_stage

    def way_in_s(self, stages: InOrder) -> Table:
        """Seconds (C, S) until a stage's first pass can begin."""
        ready_s = stages.begin_s.copy()
        passed_s = stages.first_s + self.crossed_s[0]
        for stage in range(1, ready_s.shape[1]):
            comes_s = ready_s[:, stage - 1] + passed_s[:, stage - 1]
            ready_s[:, stage] = np.maximum(ready_s[:, stage], comes_s)
        return ready_s

    def way_out_s(self, stages: InOrder) -> Table:
        """Seconds (C, S) from the end of a stage's last backward pass until the stages in front are
        over."""
        goes_s = np.zeros_like(stages.end_s)
        passed_s = self.crossed_s[0] + stages.last_s
        for stage in range(1, goes_s.shape[1]):
            left_s = np.maximum(stages.end_s[:, stage - 1], goes_s[:, stage - 1])
            goes_s[:, stage] = passed_s[:, stage - 1] + left_s
        return goes_s

    def there_and_back_s(self) -> Table:
        """Seconds (C) of one micro-batch through all parts and back."""
        names = ("through_forward_s", "within_forward_s", "through_backward_s")
        passed_s = sum(one[name].sum(axis=1) for one in self.chunks for name in names)
        sent_s = 2 * sum(crossed.sum(axis=1) for crossed in self.crossed_s)
        return np.asarray(passed_s + sent_s - 2 * self.crossed_s[-1][:, self.last_stage])
