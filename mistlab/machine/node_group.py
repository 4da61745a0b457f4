"""A group of equal nodes of a cluster that has nodes of several kinds."""

from dataclasses import dataclass, field

from mistlab.machine.hardware import Hardware
from mistlab.values.limits import MOST_NODES
from mistlab.values.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Neighbouring nodes of one hardware."""

    hardware: Hardware
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))

    def __post_init__(self) -> None:
        check_fields(self)
