"""A server that waits for no rank: it steps with each rank's gradients as they come, and sends the
rank the weights of then.

In which order ranks come would decide what is learned, and no run could be repeated. So they come
in turn, the server's own rank last: after each step that rank has the server's weights, every other
one weights as many gradients older as ranks come after it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mistlab.reduction.reduction_costs import Reduction
from mistlab.reduction.robust import LIE
from runtime.comm.group import Group
from runtime.engine.storage.state import Section
from runtime.engine.training import Training
from runtime.engine.work.adamw import step_adamw
from runtime.engine.work.compressed import message_of, vector_of
from runtime.engine.work.gradient_averages import Exchange, drawing

SERVER_RANK = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TurnServer:
    """Steps a section's layers with the gradients of each rank of ``group``, one after another.

    The first rank's masters and moments are the server's; other ranks' masters are the weights that
    the server sent them last.
    """

    how: Reduction
    group: Group
    section: Section
    training: Training
    device: torch.device
    step: int = 0
    _kept: Mapping[int, Tensor] = field(default_factory=dict)

    def average(self, layer: int, whole: Tensor) -> Exchange[None]:
        """Let the server step a layer with the gradients of all ranks in turn, each a rank's share
        of a sum; this rank has the weights that it is sent."""
        wanted, group = whole.float() * self.group.size, self.group
        if group.rank in self.how.liars:
            wanted *= LIE
        master = self.section.layers[layer].optimizer[0].resident
        message = message_of(self.how.compressor, wanted, self._draws(layer))
        if group.rank != SERVER_RANK:
            yield group.exchange([(message, SERVER_RANK)], [])
            sent_back = torch.empty_like(master)
            yield group.exchange([], [(sent_back, SERVER_RANK)])
            master.copy_(sent_back)
            return
        others = [rank for rank in range(group.size) if rank != SERVER_RANK]
        rooms = [torch.empty_like(message) for _ in others]
        yield group.exchange([], [*zip(rooms, others, strict=True)])
        answers = []
        for turn, room in enumerate([*rooms, message]):
            read = vector_of(self.how.compressor, room, wanted.numel())
            self._step(layer, read, self.step * group.size + turn)
            answers.append(master.clone() if turn < len(others) else master)
        yield group.exchange([*zip(answers, others, strict=False)], [])

    def _step(self, layer: int, gradient: Tensor, before: int) -> None:
        """The optimizer's step of the server's weights, after so many others."""
        training = self.training
        vectors = [one.resident for one in self.section.layers[layer].optimizer]
        count = torch.full((), before + 1.0, device=self.device)
        step_adamw(training, vectors, gradient, count, training.learning_rate_at(self.step))

    def _draws(self, layer: int) -> torch.Generator:
        return drawing(self.device, self.step, layer, self.group.rank)

    def settle(self) -> None:
        """Note the weights of this rank, which a checkpoint keeps beside the server's."""
        layers = self.section.layers if self.group.rank != SERVER_RANK else {}
        self._kept = {layer: one.optimizer[0].resident.clone() for layer, one in layers.items()}

    def take_up(self) -> None:
        """Go on from the weights of this rank that were read from a checkpoint."""
        for layer, weights in self._kept.items():
            self.section.layers[layer].optimizer[0].resident.copy_(weights)
        self._kept = {}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that were noted, by the names that a checkpoint has for them."""
        for layer, weights in self._kept.items():
            yield f"worker.{layer}", weights

    @property
    def nbytes(self) -> int:
        """Bytes between steps beyond those of the optimizer: none."""
        return 0
