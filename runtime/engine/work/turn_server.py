"""An asynchronous parameter server: it steps with each rank's gradients in turn, and sends the rank
the weights after that step.

If the server took gradients in the order of their arrival, no run could be repeated. So ranks take
turns in a fixed order, the server's own rank last. The gradients of the other ranks are computed
with older weights: the earlier a rank's turn, the more steps behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mistlab.reduction.reduction_costs import Reduction
from mistlab.reduction.robust import LIE
from runtime.comm.group import Group, finished, in_turn
from runtime.engine.storage.state import Section
from runtime.engine.training import Training
from runtime.engine.work.adamw import step_adamw
from runtime.engine.work.compressed import message_of, vector_of
from runtime.engine.work.gradient_averages import Exchange, drawing
from runtime.engine.work.scaling import Scaling

SERVER_RANK = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TurnServer:
    """Asynchronous server for a section's layers: it steps with the gradients of each rank of
    ``group``, one rank after another.

    The first rank is the server and holds the master weights and moments; the master weights of
    other ranks are those that the server sent them last. With a ``scaling`` each rank divides its
    gradients by its own loss scale and clips them to its own norm, so layers are served only after
    all passes, when the norms of all ranks are known. Ranks whose ``overflow`` is 1 are left out.
    """

    how: Reduction
    group: Group
    section: Section
    training: Training
    device: torch.device
    scaling: Scaling | None = None
    overflow: Tensor = field(init=False)
    step: int = 0
    _kept: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.overflow = torch.zeros(self.group.size, device=self.device)

    def average(self, layer: int, whole: Tensor) -> Exchange[None]:
        """Serve a layer whose gradients are complete; does nothing if serving must wait for
        gradient norms.
        """
        if self.scaling is None:
            yield from self.serve(layer, whole)

    def serve(self, layer: int, whole: Tensor) -> Exchange[None]:
        """Step a layer on the server with each rank's gradients in turn; this rank gets the weights
        after the step with its gradients.
        """
        wanted, group = whole.float() * self.group.size, self.group
        if self.scaling is not None:
            wanted /= self.scaling.divisor
            wanted = torch.where(self.overflow[group.rank] > 0, 0.0, wanted)
        if group.rank in self.how.liars:
            wanted *= LIE
        master = self.section.layers[layer].optimizer[0].resident
        message = message_of(self.how.compressor, wanted, self._draws(layer))
        if group.rank != SERVER_RANK:
            yield group.exchange([(message, SERVER_RANK)], [])
            sent_back = torch.empty_like(master)
            yield group.exchange([], [(sent_back, SERVER_RANK)])
            master.copy_(sent_back)
            if self.scaling is not None:
                # This rank's step count follows the server's, which the checkpoint holds.
                self.section.layers[layer].step.add_((1 - self.overflow).sum())
            return
        others = [rank for rank in range(group.size) if rank != SERVER_RANK]
        rooms = [torch.empty_like(message) for _ in others]
        yield group.exchange([], [*zip(rooms, others, strict=True)])
        answers = []
        for turn, room in enumerate([*rooms, message]):
            read = vector_of(self.how.compressor, room, wanted.numel())
            self._step(layer, read, turn)
            answers.append(master.clone() if turn < len(others) else master)
        yield group.exchange([*zip(answers, others, strict=False)], [])

    def _step(self, layer: int, gradient: Tensor, turn: int) -> None:
        """Step the server's weights with the gradients of the rank whose turn it is."""
        training, size = self.training, self.group.size
        vectors = [one.resident for one in self.section.layers[layer].optimizer]
        rate = training.learning_rate_at(self.step)
        if self.scaling is None:
            count = torch.full((), self.step * size + turn + 1.0, device=self.device)
            step_adamw(training, vectors, gradient, count, rate)
            return
        count, left_out = self.section.layers[layer].step, self.overflow[(turn + 1) % size]
        count += 1
        step_adamw(training, vectors, gradient, count, rate, (self.overflow.new_ones(()), left_out))
        count -= left_out

    def _draws(self, layer: int) -> torch.Generator:
        return drawing(self.device, self.step, layer, self.group.rank)

    def settle(self) -> None:
        """Record this rank's weights, which a checkpoint stores beside the server's."""
        layers = self.section.layers if self.group.rank != SERVER_RANK else {}
        self._kept = {layer: one.optimizer[0].resident.clone() for layer, one in layers.items()}

    def take_up(self) -> None:
        """Restore this rank's master weights from those that a checkpoint recorded."""
        for layer, weights in self._kept.items():
            self.section.layers[layer].optimizer[0].resident.copy_(weights)
        self._kept = {}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The recorded weights, by their names in a checkpoint."""
        for layer, weights in self._kept.items():
            yield f"worker.{layer}", weights

    @property
    def nbytes(self) -> int:
        """Zero: between steps a server keeps nothing besides optimizer states."""
        return 0


@dataclass(slots=True, kw_only=True, eq=False)
class LateServers:
    """A rank's servers (one per section) that can serve only once the gradient norms of all ranks
    are known.
    """

    servers: Sequence[TurnServer]
    scaling: Scaling
    norms: Tensor

    @classmethod
    def of(cls, averages: Sequence[object]) -> "LateServers | None":
        """The servers in ``averages`` that wait for gradient norms; None if there are none."""
        servers = [one for one in averages if isinstance(one, TurnServer)]
        scaling = servers[0].scaling if servers else None
        if scaling is None:
            return None
        norms = torch.zeros_like(servers[0].overflow)
        return cls(servers=servers, scaling=scaling, norms=norms)

    def squares(self, squares_here: Tensor) -> Tensor:
        """A vector with this rank's sum of squared gradients at its index and 0 for other ranks,
        without the loss scale. ``squares_here`` is the sum for this rank's share of the mean
        gradient.
        """
        of_ranks = torch.zeros_like(self.norms)
        of_ranks[self._rank] = squares_here * (len(of_ranks) / self.scaling.scale) ** 2
        return of_ranks

    def judge(self, squares: Tensor) -> None:
        """Set this rank's divisor of gradients, overflow flag and loss scale, from the squared
        norms of all ranks.
        """
        self.norms.copy_(squares.sqrt())
        self.scaling.judge(squares[self._rank] * self.scaling.scale**2)

    def serve(self) -> bool:
        """Let the servers step with each rank's gradients, layer by layer; returns whether all
        ranks overflowed. The reported norm is the mean over ranks whose gradients did not overflow.
        """
        overflow = self.norms.isfinite().logical_not().float()
        for server in self.servers:
            server.overflow = overflow
            for layer in server.section.layers:
                finished(in_turn(server.serve(layer, server.section.sums(layer, 0))))
        norms = torch.where(overflow > 0, 0.0, self.norms)
        self.scaling.norm.copy_(norms.sum() / (1 - overflow).sum().clamp(min=1))
        return bool(overflow.min().item())

    @property
    def _rank(self) -> int:
        return self.servers[0].group.rank
