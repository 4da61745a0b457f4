"""The time of an eager engine's host: Python that issues a layer's kernels, one by one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds in which the host issues a block's forward pass, its backward pass, and its step.

    The GPU never waits for the host as long as the host is ahead, which it is wherever a pass
    computes for longer. A step waits for the host always; ``sharded_step_s`` is what a block's step
    takes more if data-parallel ranks divide it. With ``waits_for_arrivals`` a stage's host waits
    for each micro-batch that arrives, so it is never ahead by more than a pass.
    """

    forward_s: float
    backward_s: float
    step_s: float = 0.0
    sharded_step_s: float = 0.0
    waits_for_arrivals: bool = False
