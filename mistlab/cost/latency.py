"""The latency of an all-reduce of a message so small that only hops count.

A ring of n ranks passes the message on 2 (n - 1) times, so its latency grows with the ranks. A tree
of nodes goes up and down its levels, whose number is the logarithm of the nodes.
"""

from dataclasses import dataclass

import numpy as np

from mistlab.cost.links import LinkTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLatency:
    """Seconds of an all-reduce over a ring, over a tree of nodes, and over the faster one; None
    where all ranks are in one node, which has no tree."""

    ring_s: float
    tree_s: float | None
    fastest_s: float


def all_reduce_latency(links: LinkTimes, size_bytes: float) -> AllReduceLatency:
    """The latency over all GPUs of a cluster."""
    cluster = links.cluster
    link = links.collective("all_reduce", gpus_in_node=cluster.gpus_per_node, nodes=cluster.nodes)
    tree = link.instead
    return AllReduceLatency(
        ring_s=link.latency_s + size_bytes * link.s_per_byte,
        tree_s=None if tree is None else tree.latency_s + size_bytes * tree.s_per_byte,
        fastest_s=float(link(np.array([size_bytes]))[0]),
    )
