"""How much a GPU's four streams (computation, GPU-to-GPU, host-to-device, device-to-host) slow one
another down when they overlap, as factors fitted to measurements; and by how much that lengthens
round trips through a pipeline.

``mistlab.cost.kernels`` finds the factors of a shape of group;
``mistlab.cost.side_by_side`` turns factors into times.
"""

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from mistlab.core.arrays import Floats, Ints
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


# Computes by how much a micro-batch's round trip through the pipeline (to the last stage and back)
# gets longer because sends and passes slow one another down.


def within_round_s(send_s: Floats, slowed: Floats, stages: Ints) -> Floats:
    """The seconds that one stage adds to a micro-batch's round trip (to the last stage and back)
    because sends and passes slow each other down, for each candidate.

    In a pipeline bound by its sends, a stage idles between passes. After a gradient has been sent
    back, the first stage of a round starts its next forward pass at once, and the last stage its
    backward pass. In between, the gaps differ: with equal stages, each stage's gap before its
    forward pass is longer than the gap of the stage in front. A pass whose gap is shorter than the
    send before it overlaps with the rest of the send, and both slow down.

    For K equal stages, in units of one send, with u(i) the gap of stage i before its forward pass,
    and ``slowed`` the share of their overlap that a pass and a send lose:

        u(0) = 0, u(K) = 2, u(i+1) = u(i) + short + slowed (max(1 - u(i), 0) + max(u(i+1) - 1, 0))

    where a micro-batch takes ``short`` less than both passes and both sends of a stage in sequence.
    The first stage sends nothing back, and so loses nothing. A round is therefore 2 - K short
    longer than without interference.

    A round trip that begins at the stage in front contains one stage more than one that begins at
    this stage, so this stage adds the difference of the two.
    """
    return send_s * (_lost(slowed, stages + 1) - _lost(slowed, stages))


def _lost(slowed: Floats, stages: Ints) -> Floats:
    """How much longer a micro-batch's round trip through this many equal stages takes because sends
    and passes slow each other down, in multiples of one send's seconds.
    """
    kept = 1 - slowed
    # Half of the stages lose time before their forward passes, the other half before their backward
    # passes; the middle one of an odd number of stages loses time before both.
    rest = kept ** np.maximum(stages // 2 - 1, 0)
    both = np.where(stages % 2 == 1, 2 * kept, 1.0)
    below = both + np.where(stages % 2 == 1, slowed, 0.0) - both * kept * rest
    loses = (stages > 2) & (slowed > 0)
    short = slowed * rest * both / np.where(loses, below, 1.0)
    return np.where(loses, np.maximum(2 - stages * short, 0.0), 0.0)
