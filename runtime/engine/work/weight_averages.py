"""Averages of weights over replicas that step independently: with neighbours, with all replicas, or
by outer steps (``mistlab.reduction.outer_steps``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mistlab.reduction.reduction_costs import Reduction
from runtime.comm.group import Group, finished
from runtime.engine.storage.state import Section
from runtime.engine.work.compressed import packed, unpacked

WHOLE_BITS = 32


@dataclass(slots=True, kw_only=True, eq=False)
class OuterState:
    """The state that outer steps keep for a vector of weights: the weights that all replicas share,
    the outer momentum, and the mean change that is still to be applied.
    """

    shared: Tensor
    momenta: Tensor
    change: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class WeightAverages:
    """Averages a rank's master weights with those of its peers, which hold the same weights in
    other replicas.
    """

    how: Reduction
    peers: Group
    sections: Sequence[Section]
    outer: dict[tuple[int, int], OuterState] = field(default_factory=dict)

    def begin(self) -> bool:
        """Record the initial weights as shared by all replicas, before the first outer step;
        returns whether it recorded them, which is false after reading a checkpoint.
        """
        if self.how.kind != "outer" or self.outer:
            return False
        for weights_key, weights in self._masters():
            # Without a delay a mean change is applied at once and need not be kept.
            self.outer[weights_key] = OuterState(
                shared=weights.clone(),
                momenta=torch.zeros_like(weights),
                change=torch.zeros_like(weights) if self.how.delay else weights.new_empty(0),
            )
        return True

    def is_due(self, step: int) -> bool:
        """Whether weights are averaged or changed after this step, counted from 1."""
        if self.how.kind == "outer":
            schedule = self.how.schedule
            return schedule.starting(step) is not None or schedule.due(step) is not None
        return step % self.how.every == 0

    @property
    def cycle(self) -> int:
        """The number of steps after which the schedule of weight averages repeats."""
        if self.how.kind == "gossip":
            return len(self.how.rounds_of_neighbours(self.peers.size))
        return self.how.every

    def average(self, step: int) -> None:
        """Average the weights after this step, as the kind of average says."""
        if self.how.kind == "gossip":
            offsets = self.how.neighbours(self.peers.size, step - 1)
            for _, weights in self._masters():
                self._mix(weights, offsets)
        elif self.how.kind == "local":
            for _, weights in self._masters():
                finished(self.peers.all_reduce(weights))
                weights.div_(self.peers.size)
        else:
            self._outer_steps(step)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The vectors that outer steps keep (shared weights, momentum, mean change), by their names
        in a checkpoint.
        """
        for (section, layer), state in self.outer.items():
            vectors = {"shared": state.shared, "momenta": state.momenta, "change": state.change}
            for name, vector in vectors.items():
                if vector.numel():
                    yield f"{name}.{section}.{layer}", vector

    @property
    def nbytes(self) -> int:
        """The bytes of all vectors that outer steps keep."""
        return sum(vector.nbytes for _, vector in self.named())

    def with_peers(self, peers: Group) -> None:
        """From now on average with these peers only, because other peers are away."""
        self.peers = peers

    def rejoin(self, peers: Group, newcomer: int) -> None:
        """Readmit the peer ``newcomer``, which was away: it continues from the shared weights.
        Another peer sends it the shared weights, the outer momentum, and the mean change to be
        applied. All peers call this.
        """
        self.peers = peers
        sender = 0 if newcomer else 1
        for weights_key, weights in self._masters():
            state = self.outer[weights_key]
            for vector in (state.shared, state.momenta, state.change):
                if vector.numel():
                    sends = [(vector, newcomer)] if peers.rank == sender else []
                    receives = [(vector, sender)] if peers.rank == newcomer else []
                    finished(peers.exchange(sends, receives))
            if peers.rank == newcomer:
                weights.copy_(state.shared)

    def _masters(self, fragment: int | None = None) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """This rank's master weights of each layer and section. With a ``fragment`` (streaming
        outer steps), only the weights of every ``fragments``-th layer.
        """
        for number, section in enumerate(self.sections):
            for turn, layer in enumerate(sorted(section.layers)):
                if fragment is None or turn % self.how.fragments == fragment:
                    yield (number, layer), section.layers[layer].optimizer[0].resident

    def _mix(self, weights: Tensor, offsets: Sequence[int]) -> None:
        """Average weights with the replicas at the given offsets from this rank, all with equal
        weight.
        """
        size, rank = self.peers.size, self.peers.rank
        received = [torch.empty_like(weights) for _ in offsets]
        sends = [(weights, (rank - offset) % size) for offset in offsets]
        pairs = zip(received, offsets, strict=True)
        receives = [(room, (rank + offset) % size) for room, offset in pairs]
        finished(self.peers.exchange(sends, receives))
        for neighbour in received:
            weights.add_(neighbour)
        weights.div_(1 + len(offsets))

    def _outer_steps(self, step: int) -> None:
        schedule = self.how.schedule
        starting, due = schedule.starting(step), schedule.due(step)
        changes: dict[tuple[int, int], Tensor] = {}
        if starting is not None:
            for weights_key, weights in self._masters(starting):
                changes[weights_key] = self._averaged(self.outer[weights_key].shared - weights)
                if self.how.delay:
                    self.outer[weights_key].change.copy_(changes[weights_key])
        if due is not None:
            for weights_key, weights in self._masters(due):
                state = self.outer[weights_key]
                self._outer_step(
                    weights, state, state.change if self.how.delay else changes[weights_key]
                )

    def _outer_step(self, weights: Tensor, state: OuterState, change: Tensor) -> None:
        """Nesterov's step on the shared weights; then this replica's weights become a mixture of
        its own and the shared ones.
        """
        momentum = self.how.momentum
        state.momenta.mul_(momentum).add_(change)
        ahead = change + momentum * state.momenta if momentum else change
        state.shared.sub_(self.how.rate * ahead)
        weights.mul_(self.how.mixed).add_((1 - self.how.mixed) * state.shared)

    def _averaged(self, change: Tensor) -> Tensor:
        """The mean over all replicas of a change of weights, sent in the number of bits of outer
        steps.
        """
        if self.how.outer_bits == WHOLE_BITS:
            finished(self.peers.all_reduce(change))
            return change / self.peers.size
        most = 2 ** (self.how.outer_bits - 1) - 1
        scale = change.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        codes = (change / scale * most).round().long() + most
        message = torch.cat([scale[None].view(torch.uint8), packed(codes, self.how.outer_bits)])
        every = message.new_empty(self.peers.size * message.numel())
        finished(self.peers.all_gather(every, message))
        read = [self._read(one, change.numel(), most) for one in every.chunk(self.peers.size)]
        return torch.stack(read).mean(dim=0)

    def _read(self, message: Tensor, size: int, most: int) -> Tensor:
        scale = message[:4].clone().view(torch.float32)
        codes = unpacked(message[4:], self.how.outer_bits, size) - most
        return scale * codes.float() / most
