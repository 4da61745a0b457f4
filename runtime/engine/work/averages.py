"""Builds a rank's averages of gradients or weights over replicas, as a plan's ``reduction``
says.
"""

from collections.abc import Sequence

import torch

from mistlab.reduction.reduction_costs import Reduction
from runtime.comm.topology import Connections
from runtime.engine.storage.state import Section
from runtime.engine.training import Training
from runtime.engine.work.gradient_averages import GradientAverages
from runtime.engine.work.scaling import Scaling
from runtime.engine.work.turn_server import TurnServer
from runtime.engine.work.weight_averages import WeightAverages

# A rank's averages over data-parallel ranks: one of gradients for each section (the parameters that
# one group of ranks shards), and one of weights, if any.
Averages = tuple[Sequence[GradientAverages | TurnServer], WeightAverages | None]


def averages_of(
    how: Reduction,
    connections: Connections,
    sections: Sequence[Section],
    training: Training,
    scaling: Scaling,
    device: torch.device,
    *,
    replicas: int,
) -> Averages:
    """The averages that a plan's reduction ``how`` requires: for each section, compressed gradients
    or an asynchronous server; and the average of weights over replicas. A plain all-reduce requires
    none.

    ``replicas`` is the number of ranks that reduce gradients. ``scaling`` has the loss scale, and
    the divisor and the overflow flag that follow from the norm of all gradients; it is used only if
    ``training`` needs the norm.
    """
    if how.is_apart and connections.peers.size > 1:
        return [], WeightAverages(how=how, peers=connections.peers, sections=sections)
    if how.is_plain or how.is_apart or replicas == 1:
        return [], None
    owned = list(zip(sections, connections.sharers, strict=True))
    if how.asynchronous:
        servers = [
            TurnServer(
                how=how,
                group=sharers.reduce,
                section=section,
                training=training,
                device=device,
                scaling=scaling if training.needs_norm else None,
            )
            for section, sharers in owned
        ]
        return servers, None
    gradients = [
        GradientAverages(
            how=how,
            group=sharers.reduce,
            sizes={layer: one.layout.numel for layer, one in section.layers.items()},
            device=device,
            scaling=None if training.loss_scale is None else scaling,
        )
        for section, sharers in owned
    ]
    return gradients, None
