"""What an engine keeps on a GPU while it trains in one precision."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine keeps in one precision, in bytes a parameter unless said otherwise.

    ``weight``, ``gradient`` and ``optimizer`` are there throughout, ``step_scratch`` while the
    rank's part is stepped. With ``rings`` layers come and go through buffers of two; without,
    gradients are reduced through a bucket of ``bucket_elements``, and at most ``gathered_elements``
    of sharded weights stay whole. With ``wide_logits`` a 32-bit copy of logits takes the place of
    their 16-bit gradient.
    """

    weight: int
    gradient: int
    optimizer: int
    step_scratch: int = 0
    rings: bool = False
    bucket_elements: int = 0
    gathered_elements: int = 0
    wide_logits: bool = False
