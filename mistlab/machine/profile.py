"""The profile of one cluster: what is slow there, and on no other cluster of the same hardware.

A profile is never a part of the hardware. A cluster has none unless it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mistlab.values.errors import refuse
from mistlab.values.units import MILLISECONDS
from mistlab.values.value import bounded, check_fields

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
    """

    name: str
    block_ms: float = field(default=0.0, metadata=bounded(minimum=0))
    block_ranks: int = field(default=2, metadata=bounded(minimum=2))
    block_power: float = field(default=1.0, metadata=bounded(minimum=0))
    send_gpus: int = field(default=1, metadata=bounded(minimum=1))
    send_ranks: int = field(default=1 << 20, metadata=bounded(minimum=1))
    send_ms: float = field(default=0.0, metadata=bounded(minimum=0))
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            refuse("source", "is empty: name the runs that show these peculiarities")

    def block_s(self, ranks: Ranks, *, in_pipeline: Flags) -> Values:
        """Seconds that a block's two passes are issued later, over groups of so many ranks."""
        waits = in_pipeline & (ranks >= self.block_ranks)
        return waits * self.block_ms * MILLISECONDS * ranks**self.block_power

    def send_s(self, ranks: Ranks, gpus: int) -> Values:
        """Seconds that a send takes longer between stages with blocks of so many ranks."""
        is_late = (ranks >= self.send_ranks) | (gpus >= self.send_gpus)
        late: Values = is_late.astype(float) * (self.send_ms * MILLISECONDS)
        return late
