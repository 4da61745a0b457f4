"""The profile of one cluster: what is slow there, and on no other cluster of the same hardware.

A profile is never a part of the hardware. A cluster has none unless it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mistlab.values.errors import refuse
from mistlab.values.units import MILLISECONDS
from mistlab.values.value import bounded, check_fields, quantity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ranks: TypeAlias = NDArray[np.int64]
    Flags: TypeAlias = NDArray[np.bool_]
    Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cluster's peculiarities, with their source.

    Where a pipeline reaches over several nodes and at least ``block_ranks`` ranks share a block, a
    host takes ``block_ms`` x (those ranks) ^ ``block_power`` longer to issue a block's forward and
    backward pass. From ``send_gpus`` GPUs on, and where at least ``send_ranks`` ranks share a
    block, a send between stages takes ``send_ms`` longer.

    So do sends over nodes beside whole gradients, which data-parallel ranks reduce under ZeRO-0:
    from ``whole_micro_batches`` micro-batches on, where there are at least ``whole_gpus`` GPUs or
    ``whole_ranks`` data-parallel ranks.
    """

    name: str
    block_ms: float = field(default=0.0, metadata=quantity(zero=True))
    block_ranks: int = field(default=2, metadata=bounded(minimum=2))
    block_power: float = field(default=1.0, metadata=quantity(zero=True))
    send_gpus: int = field(default=1, metadata=bounded(minimum=1))
    send_ranks: int = field(default=1 << 20, metadata=bounded(minimum=1))
    send_ms: float = field(default=0.0, metadata=quantity(zero=True))
    whole_micro_batches: int = field(default=1 << 20, metadata=bounded(minimum=1))
    whole_gpus: int = field(default=1, metadata=bounded(minimum=1))
    whole_ranks: int = field(default=2, metadata=bounded(minimum=2))
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            refuse("source", "is empty: name the runs that show these peculiarities")

    def block_s(self, ranks: Ranks, *, in_pipeline: Flags) -> Values:
        """Seconds that a block's two passes are issued later, over groups of so many ranks."""
        waits = in_pipeline & (ranks >= self.block_ranks)
        return waits * self.block_ms * MILLISECONDS * ranks**self.block_power

    def is_beside_whole(self, data_ranks: Ranks, micro_batches: Ranks, gpus: int) -> Flags:
        """Whether sends are late beside the whole gradients of so many data-parallel ranks."""
        is_wide = (data_ranks >= self.whole_ranks) | (gpus >= self.whole_gpus)
        return is_wide & (data_ranks > 1) & (micro_batches >= self.whole_micro_batches)

    def send_s(self, ranks: Ranks, gpus: int, *, beside_whole: Flags | bool = False) -> Values:
        """Seconds that a send takes longer between stages with blocks of so many ranks."""
        is_late = beside_whole | (ranks >= self.send_ranks) | (gpus >= self.send_gpus)
        late: Values = is_late.astype(float) * (self.send_ms * MILLISECONDS)
        return late
