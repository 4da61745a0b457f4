"""The base classes of stages and search spaces, with one field for each dimension (each choice for
a stage), generated from ``mistlab.plan.dimensions.DIMENSIONS``.
"""

from mistlab.plan.made_fields import (
    check_lists,
    held_fields,
    listed_held_fields,
    made,
    space_fields,
    stage_fields,
)

Offload = made(
    __name__,
    "Offload",
    """Offload ratios: shares of a rank's own bytes, after sharding, that live in host memory.

    For activations it is the share of the bytes that a block saves for its backward pass.
    """,
    held_fields("offload"),
)
StageFields = made(
    __name__, "StageFields", "A stage's choices.", stage_fields({"offload": Offload}), is_base=True
)
OffloadRatios = made(
    __name__,
    "OffloadRatios",
    "The allowed ratios of each kind of offloading.",
    listed_held_fields("offload"),
    check_lists,
)
SpaceFields = made(
    __name__,
    "SpaceFields",
    "A space's choices.",
    space_fields({"offload": OffloadRatios}),
    is_base=True,
)
