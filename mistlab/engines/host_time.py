"""The time of an eager engine's host: Python that issues a layer's kernels, one by one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds in which the host issues a block's forward pass, and its backward pass.

    A pass of the embedding, or of the head, takes ``end_s``. The GPU never waits for the host as
    long as the host is ahead, which it is wherever passes compute for longer. A step waits for the
    host always: a block's step takes ``step_s`` more, and another ``sharded_step_s`` if
    data-parallel ranks divide it.
    """

    forward_s: float
    backward_s: float
    end_s: float = 0.0
    step_s: float = 0.0
    sharded_step_s: float = 0.0
