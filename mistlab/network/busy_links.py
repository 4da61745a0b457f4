"""Computes how much later outputs of a pipeline stage arrive at the next stage because gathers and
reductions of the sending stage use the link at the same time.

Axes: C candidates, P parts of the model in order.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mistlab.schedule.placement import StageChunk
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses


class PartCollectives(NamedTuple):
    """The seconds of the collectives of a part of the model that may run beside sends, each a
    number or a column (C).

    ``gather_s`` is the gather of one block's weights before the part's first forward pass;
    ``reductions_s`` are the reductions of all its gradients, which begin when the first block has
    computed in the last pass: in a weight-gradient pass after ``first_block_s``.
    """

    gather_s: Any
    reductions_s: Any
    first_block_s: Any


class BusyLinks:
    """Computes by how long a stage's collectives delay the sends of its outputs.

    A send and a collective share the stage's link evenly, so a send is delayed by the time it takes
    alone, or by that of the collective if that is shorter. ``reduced`` has the time until which
    each stage reduces the gradients of parts whose last pass is over. Two further collectives begin
    with the pass after the sending one: the gather of the stage's next chunk, and the reductions of
    a weight-gradient pass.
    """

    def __init__(
        self,
        of_parts: Sequence[PartCollectives],
        passes: Sequence[StagePasses],
        reduced: dict[int, Any],
        maximum: Callable[[Any, Any], Any],
    ) -> None:
        self.of_parts, self.parts = of_parts, passes[0].placement.parts
        self.reduced, self.maximum = reduced, maximum
        self.next: dict[PassKey, StagePass] = {
            before.key: after for of_stage in passes for before, after in pairwise(of_stage)
        }

    def late_s(self, stage_pass: StagePass, end: Any, sent_s: Any) -> Any:
        """The seconds by which collectives delay the output of a pass that ends at ``end``, whose
        send takes ``sent_s`` alone; reductions of earlier parts get later by it.
        """
        stage, late_s = stage_pass.stage, 0.0
        if stage in self.reduced:
            late_s = self._beside(sent_s, self.reduced[stage] - end)
            self.reduced[stage] += late_s
        after = self.next.get(stage_pass.key)
        if after is None or after.phase not in ("first_forward", "last_backward"):
            return late_s
        part = self.parts[StageChunk(stage, after.chunk)]
        gather_s, reductions_s, first_block_s = self.of_parts[part]
        if after.kind == "F":
            return self.maximum(late_s, self._beside(sent_s, gather_s))
        if after.kind == "W":
            return self.maximum(late_s, self._beside(sent_s - first_block_s, reductions_s))
        return late_s

    def _beside(self, sent_s: Any, collective_s: Any) -> Any:
        """The shorter one of the times of a send and of a collective, at least zero."""
        longer_s = self.maximum(sent_s - collective_s, 0.0)
        return self.maximum(sent_s - longer_s, 0.0)
