"""Sends copies of tokens to their experts on other ranks, and returns the experts' outputs, as
all-to-alls on a device's streams.

Copies lie in the order of experts, so each rank's are neighbouring rows. Where they arrive they
come rank by rank, and are put in the order of the rank's experts. Ranks with parts of the same
experts take one another's rows too, and sum what they make of them.

Axes: R rows, E experts of the model, G experts of a rank, P ranks with different experts, Q ranks
with parts of the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.comm.group import Group
from runtime.engine.streams.lanes import Streams
from runtime.models.config import ExpertRanks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedTrip:
    """The all-to-all of a micro-batch's token copies, with row counts that every rank knows.

    ``sent`` and ``received`` are the rows to and from each of the P ranks, ``parts`` the rows that
    each of the Q ranks has received. ``order`` puts all of them in the order of experts; None
    leaves them as they are. ``counts`` (G) are the numbers of each expert's rows.
    """

    ranks: "StreamedExperts"
    sent: list[int]
    received: list[int]
    parts: list[int]
    order: Tensor | None
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of token copies that this rank sends."""
        return sum(self.sent)

    def there(self, rows: Tensor) -> Tensor:
        """Send token copies to their experts: the rows (R, ..) that this rank's experts receive,
        sorted by expert.
        """
        ranks = self.ranks
        if ranks.experts.size > 1:
            rows = ranks.exchanged(ranks.experts, rows, self.received, self.sent)
        if ranks.tensor.size > 1:
            own_rows = sum(self.received)
            each = rows.repeat(ranks.tensor.size, *[1] * (rows.dim() - 1))
            rows = ranks.exchanged(ranks.tensor, each, self.parts, [own_rows] * ranks.tensor.size)
        return rows if self.order is None else rows.index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Return experts' outputs: the rows (R, ..) of this rank's token copies, sorted by
        expert.
        """
        ranks = self.ranks
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
        if ranks.tensor.size > 1:
            own_rows = sum(self.received)
            each = ranks.exchanged(ranks.tensor, rows, [own_rows] * ranks.tensor.size, self.parts)
            rows = each.unflatten(0, (ranks.tensor.size, own_rows)).sum(0)
        if ranks.experts.size > 1:
            rows = ranks.exchanged(ranks.experts, rows, self.sent, self.received)
        return rows


class StreamedExperts:
    """The groups of this rank for experts: the ranks with different ``experts``, and the ranks that
    split the same experts.
    """

    def __init__(self, experts: Group, tensor: Group, streams: Streams) -> None:
        self.experts, self.tensor, self._streams = experts, tensor, streams

    @property
    def counts(self) -> ExpertRanks:
        """The number of expert-parallel ranks, and this rank's index."""
        return ExpertRanks(
            parallel=self.experts.size,
            tensor=self.tensor.size,
            rank=self.experts.rank,
            tensor_rank=self.tensor.rank,
        )

    def trip(self, chosen: Tensor, each_has: int) -> StreamedTrip:
        """The all-to-all of token copies to the ``chosen`` experts, of which each rank has ``own``;
        an index beyond the last expert marks a copy that is not sent.

        The host waits here until it knows how many rows come: their memory is allocated next.
        """
        ranks, parts = self.experts.size, self.tensor.size
        flat = chosen.flatten()
        # ``bincount`` would synchronise the host twice. Dropped copies have the index after the
        # last expert.
        to_each = flat.new_zeros(ranks * each_has + 1).scatter_add_(0, flat, torch.ones_like(flat))
        to_each = to_each[:-1]
        from_each = to_each
        if ranks > 1:
            from_each = self.exchanged(
                self.experts, to_each, [each_has] * ranks, [each_has] * ranks
            )
        if parts > 1:
            size = from_each.numel()
            each = from_each.repeat(parts)
            from_each = self.exchanged(self.tensor, each, [size] * parts, [size] * parts)
        usual = chosen.numel() // (ranks * each_has)
        numbers = self._streams.read(torch.cat([to_each, from_each]), usual)
        sent = np.array(numbers[: ranks * each_has]).reshape(ranks, each_has)
        taken = np.array(numbers[ranks * each_has :]).reshape(parts, ranks, each_has)
        is_sorted = ranks * parts == 1
        return StreamedTrip(
            ranks=self,
            sent=sent.sum(1).tolist(),
            received=taken[self.tensor.rank].sum(1).tolist(),
            parts=taken.sum((1, 2)).tolist(),
            order=None if is_sorted else _order(from_each.view(-1, each_has), int(taken.sum())),
            counts=tuple(taken.sum((0, 1)).tolist()),
        )

    def exchanged(
        self, group: Group, rows: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> Tensor:
        """Exchange rows with the other ranks of a group by all-to-all."""
        received = rows.new_empty((sum(from_each), *rows.shape[1:]))
        self._streams.settle(group.all_to_all(received, rows.contiguous(), from_each, to_each))
        return received


def _order(taken: Tensor, rows: int) -> Tensor:
    """The permutation that sorts received rows by expert (G); ``taken`` (sources, G) has the number
    of rows by source rank and expert.
    """
    ends = taken.flatten().cumsum(0)
    places = torch.arange(rows, device=taken.device)
    experts = torch.searchsorted(ends, places, right=True) % taken.shape[1]
    return experts.argsort(stable=True)
