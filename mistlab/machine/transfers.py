"""How long transfers take between GPUs, and between a GPU and its host.

A time is a line over bytes: a latency and a bandwidth, which hold for the sizes that were measured.
"""

from dataclasses import dataclass, field

from mistlab.values.errors import refuse
from mistlab.values.limits import MOST_GPUS_OF_NODE, MOST_NODES
from mistlab.values.units import GBYTES, MICROSECONDS
from mistlab.values.value import bounded, check_fields, quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds over bytes, fitted to sizes from ``smallest_mib`` to ``largest_mib``."""

    latency_us: float = field(metadata=quantity(zero=True))
    gbytes_per_s: float = field(metadata=quantity())
    smallest_mib: float = field(metadata=quantity())
    largest_mib: float = field(metadata=quantity())

    def __post_init__(self) -> None:
        check_fields(self)
        if self.largest_mib < self.smallest_mib:
            problem = (
                f"{self.largest_mib:g} is below smallest_mib: give at least {self.smallest_mib:g}"
            )
            refuse("largest_mib", problem)

    @property
    def latency_s(self) -> float:
        """Seconds that every transfer takes at least."""
        return self.latency_us * MICROSECONDS

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of long transfers."""
        return self.gbytes_per_s * GBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTransfers:
    """The lines of one shape of communicating group; None for a transfer that was not measured.

    The bytes of a collective are the whole message. All GPUs of a node run the transfer at once, so
    groups share the node's links, and copies share the host's memory.
    """

    gpus_in_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))
    all_gather: Line | None = None
    reduce_scatter: Line | None = None
    all_reduce: Line | None = None
    all_to_all: Line | None = None
    host_to_device: Line | None = None
    device_to_host: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The lines of a machine, for each shape of group that was measured.

    ``in_node`` and ``across_nodes`` are the lines of one GPU that sends to another.
    """

    groups: tuple[GroupTransfers, ...]
    in_node: Line | None = None
    across_nodes: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.groups:
            problem = "is empty: give at least one shape of group"
            refuse("groups", problem)
