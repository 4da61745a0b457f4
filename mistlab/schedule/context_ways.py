"""Lists the ways in which context-parallel ranks exchange keys and values for attention, and how
many kernels each needs.

Each way launches messages and further kernels that a single rank does not need. Their numbers are
those of Transformer Engine's ``context_parallel.py`` (``AttnFuncWithCPAndKVP2P``,
``AttnFuncWithCPAndKVAllGather``, ``AttnFuncWithCPAndQKVOA2A``), for causal attention in 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Ring attention: ranks pass keys and values round a ring, and attend to those that they have at the
# moment.
RING = 0
# Each rank gathers the keys and values of all context-parallel ranks before it attends.
GATHER = 1
# An all-to-all before attention gives each rank all tokens of some heads; one after attention
# reverses it.
HEADS = 2
# The names of the three ways of exchanging keys and values, in texts for users.
WORDS = ("ring of keys", "keys gathered", "heads exchanged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The number of extra kernels in one pass of a block on a context-parallel rank: a fixed
    number, and a number for each other rank.
    """

    once: int
    further: int = 0

    def beside(self, further: Any) -> Any:
        """The number of extra kernels if there are this many other context-parallel ranks (at least
        1).
        """
        return further * self.further + self.once


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchesOfWay:
    """The numbers of extra kernels in a block's forward and backward pass, for one way of
    exchanging keys and values.
    """

    forward: Launches
    backward: Launches


LAUNCHES: Mapping[int, LaunchesOfWay] = {
    # In the forward pass, a rank packs keys and values, and clones the log-sum-exps and rescales
    # the outputs of its first part of attention. For each other rank it sends, receives, attends,
    # and merges log-sum-exps and outputs. In the backward pass it copies keys and values and
    # computes the first part's three gradients; for each other rank it sends, receives, attends,
    # and accumulates three gradients.
    RING: LaunchesOfWay(forward=Launches(once=3, further=5), backward=Launches(once=4, further=6)),
    # In the forward pass, a rank gathers and reorders keys and values, attends with each half of
    # its queries, and copies both halves. In the backward pass it does the same, and gradients of
    # all keys are zeroed, accumulated in four parts, reordered and reduce-scattered.
    GATHER: LaunchesOfWay(forward=Launches(once=7), backward=Launches(once=17)),
    # Each pass exchanges four tensors, and needs three copies and an all-to-all for each.
    HEADS: LaunchesOfWay(forward=Launches(once=16), backward=Launches(once=16)),
}
