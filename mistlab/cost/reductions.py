"""Computes the times of gradient reductions that send fewer bytes: compressed, through parameter
servers, or replaced by averaging weights.

Axes: T types of layers, S strategies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.graph.graph import Collective
from mistlab.network.link_times import GroupSpread, LinkTime, TierTimes
from mistlab.network.tiers import NETWORK
from mistlab.reduction.compression import BITS_A_BYTE, VALUE_BYTES
from mistlab.reduction.reduction_costs import Reduction
from mistlab.stages.stage_shape import Shapes

# The group of ranks, one in each replica of the model, that hold the same part of the weights.
REPLICAS = "state replicas"


class SendLink(Protocol):
    """A function that gives the time of a message to another GPU.

    Meanwhile ``at_once`` GPUs of a node send, and ``senders`` GPUs share an uplink of the network
    tier numbered ``tier``.
    """

    def __call__(
        self, *, across_nodes: bool, at_once: int, tier: int = NETWORK, senders: int = 1
    ) -> LinkTime:
        """The time of a message to another GPU, while this many GPUs send."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReductionTimes:
    """Computes the times of a workload's gradient reductions under each way to reduce them.

    ``over`` gives the seconds of a collective over a group. A whole gradient has ``gradient`` bytes
    a value; the error memory of compression has ``remembered`` bytes a value. A kernel takes
    ``moved_s`` for each byte that it reads or writes.
    """

    how: Reduction
    shapes: Shapes
    over: Callable[[str, Collective, Floats], Floats]
    send: SendLink
    tiers: TierTimes | None
    gpus_per_node: int
    gradient: int
    remembered: int
    moved_s: float

    def sent_less_s(self, group: str, values: Floats) -> Floats:
        """The seconds in which a group of ranks averages gradients that are compressed or go
        through parameter servers, for each type of layer and strategy.
        """
        if not values.any():
            return np.zeros_like(values)
        how, ranks = self.how, self.shapes.ranks[group]
        sent, answers = self._message_bytes(values, ranks)
        if how.asynchronous:
            return np.zeros_like(values)
        if how.kind == "server":
            seconds = self._served_s(group, sent, answers)
        elif how.trimmed:
            # Compressed gradients are averaged in two collectives: each rank gets the messages for
            # its part of the gradients, then sends the mean of its part to all.
            seconds = self.over(group, "all_to_all", sent) + self.over(group, "all_gather", sent)
        elif how.compressor.is_summable:
            seconds = self.over(group, "all_reduce", sent)
        else:
            answers = sent * ranks
            seconds = self.over(group, "all_gather", answers)
        if how.trimmed:
            # A rank reads each value that the other ranks have sent, and the means, once.
            moved = np.where(ranks > 1, 2 * sent + answers, 0.0)
            return np.asarray(seconds + moved * self.moved_s)
        if how.compressor.kind == "none":
            return seconds
        # A kernel reads gradients and the compression's error memory and writes messages and new
        # error memory; a second kernel reads received messages and writes their mean.
        each = self.gradient + VALUE_BYTES + 2 * self.remembered
        moved = np.where(ranks > 1, values * each + sent + answers, 0.0)
        return np.asarray(seconds + moved * self.moved_s)

    def asynchronous_s(self, group: str, values: Floats) -> tuple[Floats, Floats]:
        """The seconds in which a rank sends gradients to asynchronous parameter servers and gets
        their answers, and those for which a server is busy with all ranks' messages.

        The result is (2, T, S).
        """
        both_s, busy_s = np.zeros_like(values), np.zeros_like(values)
        sent, answers = self._message_bytes(values, self.shapes.ranks[group])
        shards = self.how.shards
        for rows, shape in self.shapes.of_several(group):
            link = self._to_server(shape)
            each = [link(one[..., rows] / shards) for one in (sent, answers)]
            both_s[..., rows] = shards * (each[0] + each[1])
            busy_s[..., rows] = shape.ranks * np.maximum(*each)
        return both_s, busy_s

    def averaged_s(self, values: Floats) -> Floats:
        """The seconds in which replicas of the model average their weights once, for each type of
        layer and strategy.
        """
        bits = self.how.outer_bits if self.how.kind == "outer" else BITS_A_BYTE * VALUE_BYTES
        size_bytes = values * bits / BITS_A_BYTE
        if self.how.kind != "gossip":
            return self.over(REPLICAS, "all_reduce", size_bytes)
        seconds = np.zeros_like(size_bytes)
        for rows, shape in self.shapes.of_several(REPLICAS):
            rounds = self.how.rounds_of_neighbours(shape.ranks)
            for offset in (offset for offsets in rounds for offset in offsets):
                links = self._links_to(offset, shape)
                longest_s = np.maximum.reduce([link(size_bytes[..., rows]) for link in links])
                seconds[..., rows] += longest_s / len(rounds)
        return seconds

    def _links_to(self, offset: int, shape: GroupSpread) -> list[LinkTime]:
        """The times of the links if every rank sends to the rank ``offset`` places after it: inside
        nodes, and between nodes.
        """
        gpus, nodes, ranks = shape.gpus_in_node, shape.nodes, shape.ranks
        away = min(offset, ranks - offset)
        links = [self.send(across_nodes=False, at_once=1)] if away < gpus else []
        if nodes > 1:
            # All groups of ranks in a node send at the same time, so they share its links.
            at_once = min(away, gpus) * max(1, self.gpus_per_node // gpus)
            link = self.send(across_nodes=True, at_once=at_once)
            links.append(link if self.tiers is None else self.tiers.to_offset(link, shape, away))
        return links

    def _served_s(self, group: str, sent: Floats, answers: Floats) -> Floats:
        """The seconds of sending gradients to parameter servers and receiving their answers, for
        each type of layer and strategy.

        Servers are ranks of the group, and each handles one message at a time.
        """
        shards, seconds = self.how.shards, np.zeros_like(sent)
        for rows, shape in self.shapes.of_several(group):
            link = self._to_server(shape)
            both_s = link(sent[..., rows] / shards) + link(answers[..., rows] / shards)
            seconds[..., rows] = shape.ranks * both_s
        return seconds

    def _to_server(self, shape: GroupSpread) -> LinkTime:
        """The time of a message to a parameter server while all servers receive messages."""
        shards = self.how.shards
        in_node = min(shape.gpus_in_node, -(-shards // shape.nodes))
        tier = NETWORK if self.tiers is None else self.tiers.place_of(shape)
        return self.send(across_nodes=shape.nodes > 1, at_once=in_node, tier=tier, senders=shards)

    def _message_bytes(self, values: Floats, ranks: Ints) -> tuple[Floats, Floats]:
        """The bytes of a rank's message with gradients, and those of a parameter server's
        answer.
        """
        if self.how.compressor.kind == "none":
            return values * self.gradient, values * self.gradient
        pairs = np.stack([values.ravel(), np.broadcast_to(ranks, values.shape).ravel()])
        distinct, index = np.unique(pairs, axis=1, return_inverse=True)
        sizes = np.array(
            [
                (self.how.message_bytes(size), self.how.answer_bytes(size, count))
                for size, count in distinct.round().astype(np.int64).T.tolist()
            ]
        )
        sent, answers = sizes[index.ravel()].T
        return sent.reshape(values.shape), answers.reshape(values.shape)
