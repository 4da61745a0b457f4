"""How many operators a host issues for one of a graph's, where these differ.

The gated delta rule is one operator of a graph. Megatron's ``GatedDeltaNet`` and the kernels of
flash-linear-attention run it as a chain, each of which Python issues. Forward these are copies in
another order of axes (7 before the rule, 1 after it), norms of queries and keys (2), their copies
for more heads (2), decays and rates (7), the kernels of chunks (6) and a norm apart from its gate
(1). Backward they are the kernels of chunks (9, of which two run the forward pass again and three
add up), decays and rates (9), sums over heads (2), norms (3), copies (3), and gradients that are
joined (2).
"""

from collections.abc import Mapping

ISSUED: Mapping[str, int] = {
    # Kernels that make what is converted to 8 bits do it in part.
    "mistlab.cast": 0,
    "mistlab.delta_rule": 26,
    "mistlab.delta_rule_backward": 28,
}
