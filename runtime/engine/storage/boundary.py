"""Sends and receives activations and their gradients between pipeline stages (tasks X and Y).

Between two model chunks of one stage nothing is sent: the stage keeps the tensor.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mistlab.plan.workload import Workload
from mistlab.schedule.stage_passes import PassKey, StagePass
from mistlab.stages.stage_program import Op
from mistlab.stages.stage_shape import RING
from runtime.comm.group import Pending
from runtime.comm.topology import Connections, link_of
from runtime.engine.streams.lanes import LaneWork, Streams
from runtime.models.wide_attention import CurrentDocuments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentShape:
    """The shape of the activations that a rank sends or receives for a micro-batch: ``whole``
    (sequences, tokens, channels), or as the documents of the step say. Each sequence is split over
    ``parts`` ranks.
    """

    whole: tuple[int, int, int]
    parts: int
    documents: CurrentDocuments

    @classmethod
    def of(
        cls, sequences: int, workload: Workload, parts: int, documents: CurrentDocuments
    ) -> Self:
        """The shape of sent activations where each sequence is split over ``parts`` ranks."""
        whole = (sequences, workload.sequence_length // parts, workload.model.hidden)
        return cls(whole=whole, parts=parts, documents=documents)

    def of_batch(self, number: int) -> tuple[int, ...]:
        """The sequences, tokens and channels of a micro-batch on this rank."""
        if not self.documents.of_step:
            return self.whole
        sequences, length = self.documents.of_step[number].positions.shape
        return sequences, length // self.parts, self.whole[2]


class Boundary:
    """The activations and gradients that a stage exchanges with neighbouring stages, received into
    as many buffers as the order of passes needs.
    """

    def __init__(
        self,
        connections: Connections,
        sent: SentShape,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        rooms: int,
    ) -> None:
        self.connections = connections
        self.sent, self.dtype, self.device = sent, dtype, device
        self.streams = streams
        self.inbox: list[Tensor | None] = [None] * rooms
        self.outbox: list[Tensor | None] = [None] * RING
        # Outputs that another model chunk of this stage takes as its input, by the pass that
        # produced each.
        self._kept: dict[PassKey, Tensor] = {}

    def receive(self, op: Op) -> LaneWork:
        """Allocate a receive buffer; returns the work that receives an activation or a gradient
        into it.
        """
        *_, number = _pass(op).key
        shape = self.sent.of_batch(number)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.streams.spoil(tensor)
        self.inbox[op.room] = tensor
        return lambda: self._exchange(op, tensor, receives=True)

    def send(self, op: Op) -> LaneWork:
        """The work that sends a pass's output to a neighbouring stage."""
        tensor = self.outbox[op.turn]
        assert tensor is not None
        return lambda: self._exchange(op, tensor, receives=False)

    def leave(self, op: Op, outcome: Tensor) -> None:
        """Store a pass's output until it is sent to another stage, or read by another model chunk
        of this stage.
        """
        stage_pass = _pass(op)
        if stage_pass.is_sent:
            self.outbox[op.turn] = outcome
        else:
            self._kept[stage_pass.key] = outcome

    def taken(self, op: Op) -> Tensor:
        """Remove and return a pass's input, which was received or was produced by another model
        chunk of this stage.
        """
        stage_pass = _pass(op)
        if not stage_pass.is_received:
            assert stage_pass.needs is not None
            return self._kept.pop(stage_pass.needs)
        tensor = self.inbox[op.room]
        assert tensor is not None
        self.inbox[op.room] = None
        return tensor

    def _exchange(self, op: Op, tensor: Tensor, *, receives: bool) -> Pending | None:
        connections = self.connections
        name = link_of_message(op)
        group, ranks = connections.links[name]
        sent, received = connections.topology.traffic(connections.rank, name)
        transfers = received if receives else sent
        messages = [(tensor[t.begin : t.end], ranks.index(t.peer)) for t in transfers]
        return group.exchange([], messages) if receives else group.exchange(messages, [])


def link_of_message(op: Op) -> str:
    """The link over which a task X sends a message, or a task Y receives one."""
    stage_pass = _pass(op)
    other = stage_pass.goes_to if op.name == "X" else stage_pass.comes_from
    assert other is not None
    ends = (stage_pass.stage, other.stage) if op.name == "X" else (other.stage, stage_pass.stage)
    return link_of(stage_pass.kind, *ends)


def _pass(op: Op) -> StagePass:
    assert op.of is not None
    return op.of
