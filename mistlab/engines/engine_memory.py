"""The memory that an engine keeps on a GPU while it trains in one precision."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An engine's memory in one precision, in bytes for each parameter unless said otherwise.

    ``weight``, ``gradient`` and ``optimizer`` are kept all the time, ``step_scratch`` only while
    the rank's part is stepped. With ``rings`` layers come and go through rings of two buffers.
    Without rings, gradients are reduced through a bucket of ``bucket_elements``, and at most
    ``gathered_elements`` sharded weights stay gathered. The head needs ``wide_logits`` times the
    bytes of its logits more: one where a 32-bit copy takes the place of their 16-bit gradient.

    Data-parallel ranks reduce ``reduced`` bytes a parameter, if this is not as wide as the
    gradients that are kept. Blocks keep ``kept_gates`` tensors of the feed-forward network's width
    more than their graphs do. Where ranks split tokens, a block keeps ``whole_tensors`` tensors of
    all tokens until the GPU is done with them; the host is ahead of it by at most ``blocks_ahead``
    blocks. ``kept_by`` says what blocks keep where their operators are not the graph's (``eager``,
    ``compiled``). Workspaces and buckets take ``fixed_mib`` whatever the plan.
    """

    weight: int
    gradient: int
    optimizer: float
    step_scratch: int = 0
    rings: bool = False
    bucket_elements: int = 0
    gathered_elements: int = 0
    reduced: int = 0
    kept_gates: int = 0
    whole_tensors: int = 0
    blocks_ahead: int = 0
    kept_by: str = ""
    fixed_mib: int = 0
    wide_logits: int = 0

    @property
    def reduced_gradient(self) -> int:
        """Bytes a parameter that data-parallel ranks reduce."""
        return self.reduced or self.gradient
