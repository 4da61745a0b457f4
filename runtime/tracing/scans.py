"""The cost of scans over a sequence: of their products, and of the states that chunks pass on.

Kernels take a sequence in chunks (Dao and Gu 2024, section 6). In a chunk of Q tokens each group
multiplies its keys with its queries, each head multiplies these scores with its values, and each
head writes to a state and asks it. A token sees no later ones, so half of the scores is counted.

The gated delta rule (Yang et al. 2024, section 3.3) adds, for each head, the products that take
back what a state says already: of keys with keys, and of their inverse with keys and values.
"""

from mistlab.symbolic.graph import Phase
from runtime.models.sizes import Size

# Tokens of a chunk: as Nemotron's configurations and as kernels of the delta rule have it.
CHUNK, CHUNK_OF_DELTA_RULE = 128, 64
# Passes over the states of all chunks, which are in 32 bits. Forward they are made, passed on (read
# and written) and asked; backward this happens again, to gradients too, which are read twice.
READ: dict[Phase, int] = {"forward": 2, "backward": 5}
WRITTEN: dict[Phase, int] = {"forward": 2, "backward": 4}
# A product has two gradients.
PRODUCTS: dict[Phase, int] = {"forward": 1, "backward": 3}


def scan_flop(
    tokens: Size, heads: Size, sizes: list[Size], phase: Phase, *, by_delta_rule: bool
) -> Size:
    """Operations of a scan of tokens by heads; ``sizes`` are groups, channels and states.

    The backward pass computes what is inside of chunks again.
    """
    groups, channels, states = sizes
    if by_delta_rule:
        inside = CHUNK_OF_DELTA_RULE * heads * (3 * states + 2 * channels)
        through = 6 * heads * channels * states
    else:
        inside = CHUNK * (groups * states + heads * channels)
        through = 4 * heads * channels * states
    return PRODUCTS[phase] * tokens * (inside + through)


def state_bytes(tokens: Size, heads: Size, sizes: list[Size], *, by_delta_rule: bool) -> Size:
    """Bytes of the states of all chunks, in 32 bits."""
    _, channels, states = sizes
    chunk = CHUNK_OF_DELTA_RULE if by_delta_rule else CHUNK
    return 4 * tokens * heads * channels * states // chunk
