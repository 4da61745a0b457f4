"""The fitted factors by which the four streams slow one another down when they run side by side.

``mistlab.machine.slowdowns`` finds the factors of a shape of group;
``mistlab.cost.side_by_side`` turns factors into times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mistlab.core.values import MOST_GPUS_OF_NODE, MOST_NODES, bounded, check_fields, refuse

STREAMS = ("compute", "gpu_to_gpu", "host_to_device", "device_to_host")

# All sets of two or more streams, smaller sets first.
SHARED_SETS = tuple(chosen for size in (2, 3, 4) for chosen in combinations(STREAMS, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The factors of one set of busy streams, in the order of ``streams``."""

    streams: tuple[str, ...]
    factors: tuple[float, ...] = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.streams not in SHARED_SETS:
            problem = (
                f"{', '.join(self.streams)}: give two to four of {', '.join(STREAMS)}, in order"
            )
            refuse("streams", problem)
        if len(self.factors) != len(self.streams):
            problem = f"{len(self.factors)} for {len(self.streams)} streams: give one for each"
            refuse("factors", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlowdowns:
    """The slowdowns of all sets of streams, for one shape of communicating group."""

    gpus_in_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))
    slowdowns: tuple[Slowdown, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    def factors(self, streams: tuple[str, ...]) -> tuple[float, ...]:
        """The factors of a set of busy streams; all 1 for a set without a slowdown."""
        for slowdown in self.slowdowns:
            if slowdown.streams == streams:
                return slowdown.factors
        return (1.0,) * len(streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The slowdowns of a machine, for each shape of communicating group that was measured.

    ``shared_links`` says that GPUs communicate over the links that also carry copies to and from
    the host, as with PCIe. Otherwise they have links of their own, as with NVLink.
    """

    shared_links: bool = False
    groups: tuple[GroupSlowdowns, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.groups:
            problem = "is empty: give at least one shape of group"
            refuse("groups", problem)


# Streams that do not slow one another down, whatever runs beside.
NO_INTERFERENCE = Interference(groups=(GroupSlowdowns(gpus_in_node=1, nodes=1, slowdowns=()),))


# Derives the slowdowns of a shape of communicating group from those of measured shapes.
#
# A shape changes the joint speed of the streams, and how they share this speed. Both are expected
# to change smoothly with the size of the group, and factors follow from them. Each set of busy
# streams is treated by itself:
#
#     u_j   the work of stream j, in the time that a copy of its length would take alone
#     f_j   its factor, so 1 / f_j is its speed
#     C     what the copies and the communication get through together: the sum of u_j / f_j
#
# Logarithms of the f_j and of C are averaged over the measured shapes, with a slope in the size;
# the f_j are then scaled together until they get C through. Compute has no part in C.
#
# Axes: G measured shapes; J streams of a set.


# A shape at twice the size has 1/e^2 of the weight of a shape at the same size.
NEAR_DOUBLINGS = 0.5
# Slopes are damped as by this much measured weight, so that none is trusted far from all shapes.
DAMPING = 0.02

Values = NDArray[np.float64]


def slowdowns_of_group(machine: Interference, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdowns of a shape of group: as measured, or derived from those of other shapes."""
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
    """The slowdowns of a shape, from those of measured shapes.

    If the shape crosses nodes, they are derived from shapes that cross nodes, if there are any; if
    it does not, from shapes that do not.
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


def _work(streams: tuple[str, ...], gpus: int, shared_links: bool) -> Values:
    """The work (J) in each second of a stream alone; with shared links, bytes over one direction.

    Communication uses both directions, and sends all but the GPU's own part of a message.
    """
    copies = sum(stream in ("host_to_device", "device_to_host") for stream in streams)
    traffic = (1 - 1 / gpus) if shared_links and copies else 1
    work = {"compute": 0, "gpu_to_gpu": traffic * max(copies, 1)}
    return np.array([work.get(stream, 1) for stream in streams], dtype=np.float64)


def _influence(measured: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Values:
    """The weights (G) of values measured on each shape, for the expected value of another shape."""
    sizes, size = _sizes(measured), _sizes([shape])[0]
    doublings = np.abs(np.log2(np.array(measured) / shape)).sum(axis=1)
    near = np.exp(-doublings / NEAR_DOUBLINGS)
    mean = near / near.sum()
    centred = sizes - mean @ sizes
    weighted = near * centred.T
    slopes = np.linalg.solve(weighted @ centred + DAMPING * np.eye(len(size)), weighted)
    # The weighted, centred sizes sum to zero, so a constant over all shapes makes no slope.
    return np.asarray(mean + (size - mean @ sizes) @ slopes)


def _sizes(shapes: Iterable[tuple[int, int]]) -> Values:
    return np.array([(gpus / 2, np.log2(nodes)) for gpus, nodes in shapes])
