"""Averages of compressed gradients over a group of ranks, by gathering all messages or through
servers, with the compression errors that ranks carry over (``mistlab.reduction.feedbacks``).
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from mistlab.reduction.compression import Compressor
from mistlab.reduction.reduction_costs import OF_THE_MEAN, VECTORS_KEPT, Reduction
from mistlab.reduction.robust import LIE
from runtime.comm.group import Group, Pending
from runtime.devices.cuda import generator_of
from runtime.engine.work.compressed import (
    as_matrix,
    first_factor,
    message_of,
    orthogonal,
    vector_of,
)
from runtime.engine.work.scaling import Scaling

Answer = TypeVar("Answer")
# An exchange with other ranks, as a generator: it yields each collective that it waits for, and
# returns its result.
Exchange = Generator[Pending | None, None, Answer]
# Multipliers by which step, layer and rank are combined into a seed; in place of a rank, SERVER
# stands for a server.
_STEPS, _LAYERS = 1_000_003, 1_009
SERVER = 1_008


def drawing(device: torch.device, step: int, layer: int, rank: int) -> torch.Generator:
    """A random generator whose seed depends only on step, layer and rank."""
    seed = (step * _STEPS + layer) * _LAYERS + rank
    return generator_of(device).manual_seed(seed)


@dataclass(slots=True, kw_only=True, eq=False)
class Remembered:
    """The compression errors of one section of a layer that a rank carries over to the next step:
    ``own`` belong to the rank's messages, ``mean`` to the mean that servers return; empty where no
    errors are kept. If steps may be skipped, ``before`` has their values before the last step.
    """

    own: Tensor
    mean: Tensor
    before: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls, how: Reduction, group: Group, size: int, device: torch.device, *, skips: bool
    ) -> "Remembered":
        """Compression errors of zero, for the first step."""
        kept_size = size if VECTORS_KEPT[how.feedback] and group.size > 1 else 0
        mean = size if OF_THE_MEAN[how.feedback] and group.size > 1 else 0
        if how.kind == "server":
            mean = len(range(size)[_part(size, how.shards, group.rank)]) if mean else 0
        of_rank, of_mean = (torch.zeros(one, device=device) for one in (kept_size, mean))
        before = (of_rank.clone(), of_mean.clone()) if skips else None
        return cls(own=of_rank, mean=of_mean, before=before)

    def settle(self, overflow: Tensor) -> None:
        """If the last step was skipped, restore the compression errors from before it; otherwise
        make the current ones final.
        """
        if self.before is None:
            return
        for now, earlier in zip((self.own, self.mean), self.before, strict=True):
            now.copy_(torch.where(overflow > 0, earlier, now))
            earlier.copy_(now)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The compression errors that are kept, by name."""
        for name, vector in (("own", self.own), ("mean", self.mean)):
            if vector.numel():
                yield name, vector

    @property
    def nbytes(self) -> int:
        """The bytes that a rank's compression errors take."""
        nbytes = sum(vector.nbytes for _, vector in self.named())
        return nbytes if self.before is None else 2 * nbytes


def _part(size: int, shards: int, shard: int) -> slice:
    """The slice of a vector that a server averages; empty for ranks that are no servers."""
    each = -(-size // shards)
    begin = min(size, shard * each) if shard < shards else size
    return slice(begin, min(size, begin + each) if shard < shards else size)


@dataclass(slots=True, kw_only=True, eq=False)
class GradientAverages:
    """Averages the gradients of a section's layers over ``group``, in compressed messages.

    Gradients are divided by the loss scale before they are averaged, since the scale may change
    from step to step, and compression errors are carried over. A rank whose gradients overflow
    sends NaN in every element. After a skipped step the compression errors from before the step are
    restored.
    """

    how: Reduction
    group: Group
    sizes: Mapping[int, int]
    device: torch.device
    scaling: Scaling | None = None
    step: int = 0
    remembered: dict[int, Remembered] = field(init=False)

    def __post_init__(self) -> None:
        skips = self.scaling is not None
        self.remembered = {
            layer: Remembered.of(self.how, self.group, size, self.device, skips=skips)
            for layer, size in self.sizes.items()
        }

    def average(self, layer: int, whole: Tensor) -> Exchange[None]:
        """Replace a layer's gradients, of which each rank has a summand, by their sum as the ranks
        receive it after compression. In a group of one rank the gradients stay as they are.
        """
        if self.group.size == 1:
            return
        wanted, kept = whole.float() * self.group.size, self.remembered[layer]
        if self.scaling is not None:
            kept.settle(self.scaling.overflow)
            wanted /= self.scaling.scale
            wanted = torch.where(wanted.isfinite().all(), wanted, torch.nan)
        if self.group.rank in self.how.liars:
            wanted *= LIE
        feedback = self.how.feedback
        if feedback == "ef21":
            sent_here, mean = yield from self._sent(layer, wanted - kept.own, kept)
            kept.own += sent_here
        else:
            if kept.own.numel():
                wanted += kept.own
            sent_here, mean = yield from self._sent(layer, wanted, kept)
            if kept.own.numel():
                torch.sub(wanted, sent_here, out=kept.own)
        whole.copy_(mean if self.scaling is None else mean * self.scaling.scale)

    def settle(self) -> None:
        """Make the compression errors final; if the last step was skipped, restore those from
        before it.
        """
        if self.scaling is not None:
            for kept in self.remembered.values():
                kept.settle(self.scaling.overflow)

    def _sent(
        self, layer: int, wanted: Tensor, kept: Remembered
    ) -> Exchange[tuple[Tensor, Tensor]]:
        """This rank's vector as other ranks decode it from its message, and the mean that all ranks
        receive.
        """
        if self.how.kind == "server":
            return (yield from self._by_servers(layer, wanted, kept))
        if self.how.trimmed:
            return wanted, (yield from self._trimmed(wanted))
        sent, mean = torch.zeros_like(wanted), torch.zeros_like(wanted)
        for turn in range(self._rounds):
            sent_here, of_all = yield from self._gathered(layer, wanted - sent, turn)
            sent, mean = sent + sent_here, mean + of_all
        return sent, self._answer(layer, mean, kept)[0]

    def _trimmed(self, vector: Tensor) -> Exchange[Tensor]:
        """The trimmed mean over the ranks: each rank receives its part of every rank's vector, and
        sends the part's trimmed mean to all.
        """
        group, size = self.group, vector.numel()
        each = -(-size // group.size)
        padded = torch.nn.functional.pad(vector, (0, each * group.size - size))
        received = torch.empty_like(padded)
        parts = [each] * group.size
        yield group.all_to_all(received, padded, parts, parts)
        mean = self._middle(received.view(group.size, each))
        whole = torch.empty_like(padded)
        yield group.all_gather(whole, mean)
        return whole[:size]

    def _middle(self, rows: Tensor) -> Tensor:
        """The mean over ranks (rows) of each column, without its smallest and largest values."""
        trimmed = self.how.trimmed
        if not trimmed:
            return rows.mean(dim=0)
        return rows.sort(dim=0).values[trimmed : len(rows) - trimmed].mean(dim=0)

    @property
    def _rounds(self) -> int:
        return self.how.rounds if self.how.feedback == "neolithic" else 1

    def _draws(self, layer: int, turn: int, rank: int) -> torch.Generator:
        return drawing(self.device, self.step * self._rounds + turn, layer, rank)

    def _gathered(self, layer: int, vector: Tensor, turn: int) -> Exchange[tuple[Tensor, Tensor]]:
        """This rank's vector as other ranks decode it from its message, and the mean of all ranks'
        decoded vectors; every rank gathers all messages.
        """
        how, group = self.how.compressor, self.group
        if how.kind == "power":
            return (yield from self._in_factors(vector, self._draws(layer, turn, SERVER)))
        message = message_of(how, vector, self._draws(layer, turn, group.rank))
        every = message.new_empty(group.size * message.numel())
        yield group.all_gather(every, message)
        read = [vector_of(how, one, vector.numel()) for one in every.chunk(group.size)]
        return read[group.rank], torch.stack(read).mean(dim=0)

    def _in_factors(self, vector: Tensor, draw: torch.Generator) -> Exchange[tuple[Tensor, Tensor]]:
        """Low-rank approximations of this rank's vector and of the mean over ranks. All-reduces
        average the factors; both approximations have the same left factor.
        """
        matrix, group = as_matrix(vector), self.group
        left = matrix @ first_factor(self.how.compressor, vector, draw)
        yield group.all_reduce(left)
        left = orthogonal(left / group.size)
        own_right = matrix.T @ left
        every = own_right.clone()
        yield group.all_reduce(every)
        read = (left @ own_right.T, left @ every.T / group.size)
        own_read, mean = (one.flatten()[: vector.numel()] for one in read)
        return own_read, mean

    def _answer(self, layer: int, mean: Tensor, kept: Remembered) -> tuple[Tensor, list[Tensor]]:
        """The mean as a server returns it to the ranks, and the messages in which it is encoded
        (none if it is not compressed).
        """
        feedback, how = self.how.feedback, self.how.compressor
        if feedback == "ef21":
            kept.mean += mean
            return kept.mean.clone(), []
        if feedback not in ("double", "neolithic"):
            return mean, []
        messages: list[Tensor] = []
        wanted, back = mean + kept.mean, torch.zeros_like(mean)
        for turn in range(self._rounds):
            message = message_of(how, wanted - back, self._draws(layer, turn, SERVER))
            messages.append(message)
            back = back + vector_of(how, message, mean.numel())
        kept.mean.copy_(wanted - back)
        return back, messages

    def _by_servers(
        self, layer: int, wanted: Tensor, kept: Remembered
    ) -> Exchange[tuple[Tensor, Tensor]]:
        """This rank's vector as servers decode it, a slice per server, and the mean that servers
        return.
        """
        how, group, shards = self.how.compressor, self.group, self.how.shards
        size, read_here, mean = wanted.numel(), torch.zeros_like(wanted), torch.zeros_like(wanted)
        parts = {shard: _part(size, shards, shard) for shard in range(shards)}
        parts = {shard: part for shard, part in parts.items() if part.start < part.stop}
        mine = parts.get(group.rank)
        others = [rank for rank in range(group.size) if rank != group.rank]
        summed = torch.zeros_like(wanted[mine]) if mine is not None else None
        heard: list[Tensor] = []
        for turn in range(self._rounds):
            sends, receives = [], []
            for shard, part in parts.items():
                vector = wanted[part] - read_here[part]
                message = message_of(how, vector, self._draws(layer, turn, group.rank))
                read = vector_of(how, message, vector.numel())
                read_here[part] += read
                if shard == group.rank:
                    assert summed is not None
                    summed += read
                    heard.append(read)
                    receives = [(torch.empty_like(message), rank) for rank in others]
                else:
                    sends.append((message, shard))
            yield group.exchange(sends, receives)
            if summed is not None:
                for message, _ in receives:
                    read = vector_of(how, message, summed.numel())
                    summed += read
                    heard.append(read)
        messages: list[Tensor] = []
        if summed is not None:
            middle = summed / group.size
            if self.how.trimmed:
                middle = self._middle(torch.stack(heard))
            mean[mine], messages = self._answer(layer, middle, kept)
        yield from self._answered(how, parts, mean, messages)
        return read_here, mean

    def _answered(
        self,
        how: Compressor,
        parts: Mapping[int, slice],
        mean: Tensor,
        messages: list[Tensor],
    ) -> Exchange[None]:
        """Send each server's slice of the mean to all ranks, as compressed ``messages`` or
        uncompressed.
        """
        group, rounds = self.group, self._rounds
        compresses = self.how.feedback in ("double", "neolithic")
        others = [rank for rank in range(group.size) if rank != group.rank]
        sends, receives = [], []
        if group.rank in parts:
            sent = torch.cat(messages) if compresses else mean[parts[group.rank]]
            sends = [(sent, rank) for rank in others]
        for shard, part in parts.items():
            if shard != group.rank:
                size = part.stop - part.start
                room = torch.empty(
                    rounds * how.sent_bytes(size), dtype=torch.uint8, device=mean.device
                )
                receives.append((room if compresses else mean.new_empty(size), shard))
        yield group.exchange(sends, receives)
        for room, shard in receives:
            part = parts[shard]
            if compresses:
                size = part.stop - part.start
                mean[part] = sum(vector_of(how, one, size) for one in room.chunk(rounds))
            else:
                mean[part] = room

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The compression errors that this rank carries over, by their names in a checkpoint."""
        for layer, kept in self.remembered.items():
            for name, vector in kept.named():
                yield f"{name}.{layer}", vector

    @property
    def nbytes(self) -> int:
        """The bytes of all compression errors that this rank carries over."""
        return sum(one.nbytes for one in self.remembered.values())
