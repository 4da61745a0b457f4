"""How long bytes take between GPUs, and between a GPU and its host: fitted lines.

A line is a latency and a bandwidth, good within the sizes that were measured.
"""

from dataclasses import dataclass, field

from mistlab.values.errors import refuse
from mistlab.values.units import GBYTES, MICROSECONDS
from mistlab.values.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds over bytes; ``smallest_mib`` to ``largest_mib`` were measured."""

    latency_us: float = field(metadata=bounded(minimum=0))
    gbytes_per_s: float = field(metadata=bounded(above=0))
    smallest_mib: float = field(metadata=bounded(above=0))
    largest_mib: float = field(metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.largest_mib < self.smallest_mib:
            problem = (
                f"{self.largest_mib:g} is below smallest_mib: give at least {self.smallest_mib:g}"
            )
            refuse("largest_mib", problem)

    @property
    def latency_s(self) -> float:
        """What any transfer takes at least."""
        return self.latency_us * MICROSECONDS

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of long transfers."""
        return self.gbytes_per_s * GBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTransfers:
    """The lines of one shape of communicating group; None where nothing was measured.

    A collective's bytes are of the whole message. Everything runs on all GPUs of the node at once:
    several groups share its links, and copies from and to the host its memory.
    """

    gpus_in_node: int = field(metadata=bounded(minimum=1))
    nodes: int = field(metadata=bounded(minimum=1))
    all_gather: Line | None = None
    reduce_scatter: Line | None = None
    all_reduce: Line | None = None
    host_to_device: Line | None = None
    device_to_host: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The lines of a machine, for each shape of group that was measured.

    ``in_node`` and ``across_nodes`` are of one GPU sending to one other.
    """

    groups: tuple[GroupTransfers, ...]
    in_node: Line | None = None
    across_nodes: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.groups:
            problem = "is empty: give at least one shape of group"
            refuse("groups", problem)
