"""The ways in which context-parallel ranks exchange keys and values, by their number in the plan's
dimension ``context_exchange``.

Beside its messages each way launches kernels that a single rank does without. Their numbers are
those of Transformer Engine's ``context_parallel.py`` (``AttnFuncWithCPAndKVP2P``,
``AttnFuncWithCPAndKVAllGather``, ``AttnFuncWithCPAndQKVOA2A``), for causal attention in 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys and values go round a ring, while each rank attends to those that it has.
RING = 0
# Each rank gathers all keys and values before it attends.
GATHER = 1
# Ranks exchange tokens for heads before attention, and heads for tokens after it.
HEADS = 2
# How texts name the three ways.
WORDS = ("ring of keys", "keys gathered", "heads exchanged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The number of kernels in a block's pass on one of several context-parallel ranks: a constant,
    and a number for each further rank.
    """

    once: int
    further: int = 0

    def beside(self, further: Any) -> Any:
        """The number of kernels on a rank beside this many other ranks, at least one."""
        return further * self.further + self.once


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchesOfWay:
    """The numbers of kernels in a block's forward and backward pass for one way to exchange keys
    and values.
    """

    forward: Launches
    backward: Launches


LAUNCHES: Mapping[int, LaunchesOfWay] = {
    # Forward: keys and values are packed, the first log-sums cloned and the first part rescaled.
    # For each further rank a send, a receive, attention, and a merge of log-sums and output.
    # Backward: keys and values are copied, and the first part's three gradients. For each further
    # rank a send, a receive, attention, and three accumulated gradients.
    RING: LaunchesOfWay(forward=Launches(once=3, further=5), backward=Launches(once=4, further=6)),
    # Forward: keys and values are gathered and reordered, the second half of the queries has its
    # own attention, both halves are copied. Backward: likewise; gradients of all keys are zeroed,
    # four parts are accumulated into them, and they are reordered and reduce-scattered.
    GATHER: LaunchesOfWay(forward=Launches(once=7), backward=Launches(once=17)),
    # Four tensors in each pass: three copies and an all-to-all each.
    HEADS: LaunchesOfWay(forward=Launches(once=16), backward=Launches(once=16)),
}
