"""The collectives inside layers: what each collective of a layer graph exchanges, and with whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mistlab.values.context_ways import GATHER, HEADS, RING

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
# Kernels beside which a collective can run: in a backward pass the products that make gradients of
# weights, or those that make the gradient of a layer's input; in both passes attention.
Beside = Literal["weights", "input", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A collective; its key in ``EXCHANGES`` is the name of its operator.

    Ranks of a ``group`` of the mesh call it. It can run ``beside`` kernels: beside attention
    always, beside products if the engine's slot table overlaps them.
    """

    collective: Collective
    group: str = "tensor"
    beside: Beside | None = None


EXCHANGES: Mapping[str, Exchange] = {
    "mistlab.all_reduce_": Exchange(collective="all_reduce", beside="weights"),
    # Sequence parallelism: tokens enter and leave products whose weights are split over ranks.
    "mistlab.gather_tokens": Exchange(collective="all_gather"),
    "mistlab.gather_again": Exchange(collective="all_gather", beside="input"),
    "mistlab.scatter_tokens": Exchange(collective="reduce_scatter"),
    # Context parallelism: keys and values go round a ring, timed as a gather.
    "mistlab.ring_keys": Exchange(collective="all_gather", group="context", beside="attention"),
    # Or each rank gathers them all; or ranks exchange tokens for heads.
    "mistlab.gather_keys": Exchange(collective="all_gather", group="context"),
    "mistlab.scatter_keys": Exchange(collective="reduce_scatter", group="context"),
    "mistlab.exchange_heads": Exchange(collective="all_to_all", group="context"),
    "mistlab.scatter_gradient": Exchange(collective="reduce_scatter", beside="weights"),
    # Experts: tokens go to the ranks that have their experts, and to all that have a part of them.
    "mistlab.all_to_all": Exchange(collective="all_to_all", group="experts"),
    "mistlab.gather_rows": Exchange(collective="all_gather", group="expert tensor"),
    "mistlab.scatter_rows": Exchange(collective="reduce_scatter", group="expert tensor"),
}

# Kernels around attention that context parallelism alone needs, and the way to which they belong:
# partial outcomes are joined, keys put into order, heads put together.
JOINS: Mapping[str, int] = {
    "mistlab.join_parts": RING,
    "mistlab.order_keys": GATHER,
    "mistlab.order_heads": HEADS,
}
