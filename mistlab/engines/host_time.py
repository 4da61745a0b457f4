"""The time of an eager engine's host: Python that issues a layer's kernels, one by one."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds in which the host issues a block's forward pass, and its backward pass.

    A pass of the embedding, or of the head, takes ``end_s``. The GPU never waits for the host as
    long as the host is ahead, which it is wherever passes compute for longer. A step waits for the
    host always: a block's step takes ``step_s`` more, and another ``sharded_step_s`` if
    data-parallel ranks divide it.

    Where ``operators`` is not 0, the seconds of passes are those of a block with so many operators,
    and a block with more takes longer in proportion. Blocks with fewer were not measured, and take
    as long. Each kernel that context-parallel ranks launch beyond those of a single rank takes
    ``launch_s``.

    A host that ``waits_for_sends`` waits for the GPU after each message between the stages of a
    pipeline, if they run in the default order. So it is never a pass ahead, and a micro-batch goes
    through no stage faster than its host issues it.
    """

    forward_s: float
    backward_s: float
    end_s: float = 0.0
    step_s: float = 0.0
    sharded_step_s: float = 0.0
    operators: int = 0
    launch_s: float = 0.0
    waits_for_sends: bool = False

    def of_blocks(self, operators: float) -> Self:
        """The time of a host whose blocks have so many operators, in the mean."""
        if operators <= self.operators or not self.operators:
            return self
        share = operators / self.operators
        return replace(self, forward_s=self.forward_s * share, backward_s=self.backward_s * share)
