"""How much a GPU's four streams (computation, GPU-to-GPU, host-to-device, device-to-host) slow one
another down when they overlap, as factors fitted to measurements.

The factors of a group's shape that was not measured are derived from the shapes that were;
``mistlab.cost.side_by_side`` turns factors into times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from mistlab.core.arrays import Floats
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


# Derives how much streams slow one another down while a group of ranks of any size communicates,
# from the sizes that were measured.

# Of the measured sizes of groups, nearer ones count more: a size that is this many doublings away
# has its weight divided by e.
NEAR_DOUBLINGS = 0.5
# The ridge penalty of the regression of slowdown factors on the size of the group; it limits
# extrapolation far from all measured sizes.
DAMPING = 0.02


def slowdowns_of_group(machine: Interference, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of ranks of this shape (GPUs in a node, nodes)
    communicates: measured, or derived from other shapes.
    """
    for group in machine.groups:
        if (group.gpus_in_node, group.nodes) == (gpus_in_node, nodes):
            return group
    return _derived(
        machine.groups,
        gpus_in_node=gpus_in_node,
        nodes=nodes,
        shared_links=machine.shared_links,
    )


def _derived(
    groups: Sequence[GroupSlowdowns], *, gpus_in_node: int, nodes: int, shared_links: bool
) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of this shape communicates, derived from those
    of the measured shapes.
    """
    alike = [group for group in groups if (group.nodes > 1) == (nodes > 1)] or groups
    influence = _influence([(g.gpus_in_node, g.nodes) for g in alike], (gpus_in_node, nodes))
    slowdowns = []
    for streams in SHARED_SETS:
        factors = np.array([group.factors(streams) for group in alike])
        work = [_work(streams, g.gpus_in_node * g.nodes, shared_links) for g in alike]
        capacities = np.sum(work / factors, axis=1)
        expected = np.exp(influence @ np.log(factors))
        capacity = np.exp(influence @ np.log(capacities))
        of_shape = _work(streams, gpus_in_node * nodes, shared_links)
        scaled = expected * np.where(of_shape > 0, np.sum(of_shape / expected) / capacity, 1)
        slowdowns.append(
            Slowdown(streams=streams, factors=tuple(float(f) for f in np.maximum(scaled, 1)))
        )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def _work(streams: tuple[str, ...], gpus: int, shared_links: bool) -> Floats:
    """How much each stream of a set loads the links if it runs alone; a host copy counts as 1.

    Communication uses both directions, and sends all but the GPU's own part of a message.
    """
    copies = sum(stream in ("host_to_device", "device_to_host") for stream in streams)
    traffic = (1 - 1 / gpus) if shared_links and copies else 1
    work = {"compute": 0, "gpu_to_gpu": traffic * max(copies, 1)}
    return np.array([work.get(stream, 1) for stream in streams], dtype=np.float64)


def _influence(measured: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Floats:
    """The weights by which values of measured shapes are averaged to get one of another shape."""
    sizes, size = _sizes(measured), _sizes([shape])[0]
    doublings = np.abs(np.log2(np.array(measured) / shape)).sum(axis=1)
    near = np.exp(-doublings / NEAR_DOUBLINGS)
    mean = near / near.sum()
    centred = sizes - mean @ sizes
    weighted = near * centred.T
    slopes = np.linalg.solve(weighted @ centred + DAMPING * np.eye(len(size)), weighted)
    # The slopes have no effect on a value that is equal for all measured shapes.
    return np.asarray(mean + (size - mean @ sizes) @ slopes)


def _sizes(shapes: Iterable[tuple[int, int]]) -> Floats:
    return np.array([(gpus / 2, np.log2(nodes)) for gpus, nodes in shapes])
