"""Sends and receives activations and their gradients between stages: the tasks X and Y."""

import torch
from torch import Tensor

from mistlab.schedule.stage_program import Op
from mistlab.schedule.stage_shape import RING
from runtime.comm.group import Pending
from runtime.comm.topology import Connections, link_of
from runtime.engine.streams.lanes import LaneWork, Streams


class Boundary:
    """Tensors from and to neighbouring stages, in as many rooms as their order asks for."""

    def __init__(
        self,
        connections: Connections,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        rooms: int,
    ) -> None:
        self.connections = connections
        self.shape, self.dtype, self.device = shape, dtype, device
        self.streams = streams
        self.inbox: list[Tensor | None] = [None] * rooms
        self.outbox: list[Tensor | None] = [None] * RING

    def receive(self, op: Op) -> LaneWork:
        """Allocate a tensor, and return the work that receives into it."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.streams.spoil(tensor)
        self.inbox[op.room] = tensor
        return lambda: self._exchange(op, tensor, receives=True)

    def send(self, op: Op) -> LaneWork:
        """The work that sends the tensor in the outbox."""
        tensor = self.outbox[op.turn]
        assert tensor is not None
        return lambda: self._exchange(op, tensor, receives=False)

    def taken(self, room: int) -> Tensor:
        """Take the received tensor out of the inbox."""
        tensor = self.inbox[room]
        assert tensor is not None
        self.inbox[room] = None
        return tensor

    def _exchange(self, op: Op, tensor: Tensor, *, receives: bool) -> Pending | None:
        connections = self.connections
        name = link_of(op.lane, connections.place.stage)
        group, ranks = connections.links[name]
        sent, received = connections.topology.traffic(connections.rank, name)
        transfers = received if receives else sent
        messages = [(tensor[t.begin : t.end], ranks.index(t.peer)) for t in transfers]
        return group.exchange([], messages) if receives else group.exchange(messages, [])
