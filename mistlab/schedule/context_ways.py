"""The ways in which context-parallel ranks exchange keys and values, by the value of a stage's
``context_exchange``.

Beside its messages each way launches kernels that a single rank does without. Their numbers are
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
# Names of the three ways of exchanging keys and values in texts for users, by number.
WORDS = ("ring of keys", "keys gathered", "heads exchanged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The number of extra kernels in one pass of a block on a context-parallel rank: a constant,
    plus a number for each other rank.
    """

    once: int
    further: int = 0

    def beside(self, further: Any) -> Any:
        """The number of extra kernels on a rank, given the number (at least 1) of other
        context-parallel ranks.
        """
        return further * self.further + self.once


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchesOfWay:
    """The numbers of extra kernels in a block's forward and backward pass, for one way to exchange
    keys and values.
    """

    forward: Launches
    backward: Launches


LAUNCHES: Mapping[int, LaunchesOfWay] = {
    # Forward: keys and values are packed, the first log-sums cloned and the first part rescaled;
    # for each other rank a send, a receive, attention, and a merge of log-sums and of outputs.
    # Backward: keys and values are copied, and three gradients of the first part; for each other
    # rank a send, a receive, attention, and three accumulated gradients.
    RING: LaunchesOfWay(forward=Launches(once=3, further=5), backward=Launches(once=4, further=6)),
    # Forward: keys and values are gathered and reordered, the second half of the queries has its
    # own attention, both halves are copied. Backward: the same; in addition, gradients of all keys
    # are zeroed, accumulated in four parts, reordered and reduce-scattered.
    GATHER: LaunchesOfWay(forward=Launches(once=7), backward=Launches(once=17)),
    # Each pass exchanges four tensors, with three copies and an all-to-all for each.
    HEADS: LaunchesOfWay(forward=Launches(once=16), backward=Launches(once=16)),
}
