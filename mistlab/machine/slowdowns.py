"""How much a GPU's four streams (computation, GPU-to-GPU, host-to-device, device-to-host) slow one
another down when they overlap, as factors fitted to measurements.

``mistlab.cost.kernels`` finds the factors of a shape of group;
``mistlab.cost.side_by_side`` turns factors into times.
"""

from dataclasses import dataclass, field
from itertools import combinations

from mistlab.core.values import (
    MOST_GPUS_OF_NODE,
    MOST_NODES,
    Checked,
    bounded,
    check_fields,
    refuse,
)

STREAMS = ("compute", "gpu_to_gpu", "host_to_device", "device_to_host")
COMPUTE = STREAMS.index("compute")

# All sets of two or more of the four streams (of ``STREAMS``), smaller sets first.
SHARED_SETS = tuple(chosen for size in (2, 3, 4) for chosen in combinations(STREAMS, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The factor by which each stream of a set is slowed down while all streams of the set are
    busy.

    Factors are in the order of ``streams``.
    """

    streams: tuple[str, ...]
    factors: tuple[float, ...] = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.streams not in SHARED_SETS:
            refuse(
                "streams",
                f"{', '.join(self.streams)}: streams that slow one another are at least two: give "
                f"two to four of {', '.join(STREAMS)}, in this order",
            )
        if len(self.factors) != len(self.streams):
            refuse(
                "factors",
                f"has {len(self.factors)} numbers for {len(self.streams)} streams: give as many",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlowdowns(Checked):
    """The slowdown factors of all sets of busy streams, for communication groups of one shape
    (ranks in a node, nodes).
    """

    gpus_in_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))
    slowdowns: tuple[Slowdown, ...]

    def factors(self, streams: tuple[str, ...]) -> tuple[float, ...]:
        """The slowdown factor of each stream while all of ``streams`` are busy; 1 for each if none
        was measured for this set.
        """
        for slowdown in self.slowdowns:
            if slowdown.streams == streams:
                return slowdown.factors
        return (1.0,) * len(streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The slowdown factors of a machine's streams, for each measured shape of communication groups
    (ranks in a node, nodes).

    ``shared_links`` says that GPUs communicate over the links that also carry copies to and from
    the host, as with PCIe. Otherwise they have links of their own, as with NVLink.
    """

    shared_links: bool = False
    groups: tuple[GroupSlowdowns, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.groups:
            refuse("groups", "is empty: give the slowdowns of at least one group of GPUs")


# The slowdown factors of a machine whose streams never slow one another down.
NO_INTERFERENCE = Interference(groups=(GroupSlowdowns(gpus_in_node=1, nodes=1, slowdowns=()),))
