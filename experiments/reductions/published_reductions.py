"""Compares published training times with reduced communication with what the cost model predicts.

The published figures are from a lecture on communication-efficient training: ResNet-50 on 256 GPUs,
ImageNet on 4 to 32 nodes of 8 GPUs, BERT Large on 64 GPUs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.optimize import nnls

from mistlab.reduction.compression import VALUE_BYTES
from mistlab.reduction.reduction_costs import RankLink, Reduction, fitted_rate

RESNET_VALUES, RESNET_GPUS = 25_500_000, 256
ALL_REDUCE_S, PARTIAL_S = 0.278, 0.150
# The published hours of training on ImageNet, by number of nodes.
HOURS: Mapping[str, Mapping[int, float]] = {
    "all_reduce": {4: 11.6, 8: 6.3, 16: 3.7, 32: 2.2},
    "gossip": {4: 11.1, 8: 5.7, 16: 2.8, 32: 1.5},
}
FITTED_NODES = (4, 8)
BERT_VALUES, BERT_GPUS = 330_000_000, 64
BERT_HOURS = (59.02, 30.4)
PARTIAL = Reduction(kind="gossip", topology="one_peer")
Row = dict[str, Any]


def published_rows() -> Iterator[Row]:
    """A result row for each published training time to which nothing was fitted."""
    rate = fitted_rate(ALL_REDUCE_S, RESNET_VALUES, RESNET_GPUS)
    link = RankLink(latency_s=0, bytes_per_s=rate)
    partial_s = PARTIAL.exchange_s(RESNET_VALUES, RESNET_GPUS, link)
    yield _row("ResNet-50, 256 GPUs: seconds of a partial average", PARTIAL_S, partial_s)
    for kind, hours in predicted_hours().items():
        for nodes, predicted in hours.items():
            name = f"ImageNet, {nodes} nodes, {kind}: hours"
            yield _row(name, HOURS[kind][nodes], predicted)
    whole_s = Reduction().exchange_s(BERT_VALUES, BERT_GPUS, link)
    ratio = whole_s / PARTIAL.exchange_s(BERT_VALUES, BERT_GPUS, link)
    name = "BERT Large, 64 GPUs: hours of all-reduce over partial averages, exchanges alone"
    yield _row(name, BERT_HOURS[0] / BERT_HOURS[1], ratio)


def predicted_hours() -> dict[str, dict[int, float]]:
    """The predicted hours of training on ImageNet, for the numbers of nodes to which nothing was
    fitted.

    An epoch has a fixed number of images, so n nodes need 1/n of the steps. A step is computation
    and an exchange of gradients. Three coefficients (computation, transfer, latency) are fitted to
    all four runs on few nodes at once; none may be below zero.
    """
    fitted = [(kind, nodes) for kind in HOURS for nodes in FITTED_NODES]
    matrix = np.array([_terms(kind, nodes) for kind, nodes in fitted])
    hours = np.array([HOURS[kind][nodes] for kind, nodes in fitted])
    # The fit minimises the squares of relative errors, with coefficients of at least zero.
    terms, _ = nnls(matrix / hours[:, None], np.ones(len(hours)))
    return {
        kind: {
            nodes: float(np.dot(_terms(kind, nodes), terms))
            for nodes in measured
            if nodes not in FITTED_NODES
        }
        for kind, measured in HOURS.items()
    }


def _terms(kind: str, nodes: int) -> tuple[float, float, float]:
    """The numbers that multiply the coefficients of compute, transfer and latency: the number of
    steps, and for each step the bytes and the number of messages.
    """
    how = Reduction() if kind == "all_reduce" else PARTIAL
    latency = how.exchange_s(1, nodes, RankLink(latency_s=1.0, bytes_per_s=1e18))
    transfer = how.exchange_s(1, nodes, RankLink(latency_s=0.0, bytes_per_s=VALUE_BYTES))
    return 1 / nodes, transfer / nodes, latency / nodes


def _row(what: str, published: float, predicted: float) -> Row:
    error = predicted / published - 1
    return {
        "part": "published",
        "figure": what,
        "published": published,
        "predicted": predicted,
        "error": error,
    }
