"""How an engine sends copies of tokens to the ranks that have their experts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """The exchanges of an engine between ranks with different experts.

    At each exchange the GPU waits ``wait_s`` for its host, which has to know how many rows come,
    and sorts them by the rank's experts; where a rank has one expert there is nothing to sort.
    ``expert_s`` is the time of the small kernels that each of a rank's experts needs for itself,
    for each exchange. Of the bytes' time the share ``hidden`` goes on beside another micro-batch.
    With ``once_a_node`` a token goes to each node once, however many of its experts are there, and
    is passed on inside the node.

    ``operator_s`` is the time in which the host issues one operator of a block with experts. It
    learns how many rows come in each such block, so it is never a block ahead of its GPU: a pass of
    the block takes as long as its operators do. 0 counts no host.

    With ``weights_of_all`` a copy takes the token's weights of all experts of a node with it, and
    ranks tell one another which experts all of their tokens chose.
    """

    wait_s: float = 0.0
    expert_s: float = 0.0
    operator_s: float = 0.0
    hidden: float = 0.0
    once_a_node: bool = False
    weights_of_all: bool = False

    def waits_s(self, experts: float) -> float:
        """Seconds of an exchange beyond its bytes' time, for a rank with so many experts."""
        return (self.wait_s if experts > 1 else 0.0) + experts * self.expert_s


AT_ONCE = ExpertExchange()
