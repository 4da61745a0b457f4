"""Exchanges copies of tokens with the ranks that hold their experts, by all-to-alls on a device's
streams.

Copies are sorted by expert, so the copies for each rank are neighbouring rows. They arrive rank by
rank, and are sorted again by the receiving rank's experts. Ranks that split the same experts gather
one another's rows, and sum their results.

Axes: R rows, E experts of the model, G experts of a rank, P ranks with different experts, Q ranks
that split the same experts.
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
    """The all-to-all of a micro-batch's copies of tokens, whose numbers of rows this rank knows.

    ``sent`` and ``received`` are the rows to and from each of the P ranks, ``parts`` the rows that
    each of the Q ranks has received. ``order`` sorts all received rows by expert; None if they are
    sorted. ``counts`` (G) are the rows of each expert.
    """

    ranks: "StreamedExperts"
    sent: list[int]
    received: list[int]
    parts: list[int]
    order: Tensor | None
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of copies of tokens that this rank sends."""
        return sum(self.sent)

    def there(self, rows: Tensor) -> Tensor:
        """Send this rank's copies to their experts; returns the rows (R, ..) that this rank's
        experts receive, sorted by expert.
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
        """Send the outputs of this rank's experts back; returns the rows (R, ..) for this rank's
        copies, sorted by expert.
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
    """This rank's groups for experts: the ranks that hold different ``experts``, and the ranks that
    split the same experts.
    """

    def __init__(self, experts: Group, tensor: Group, streams: Streams) -> None:
        self.experts, self.tensor, self._streams = experts, tensor, streams

    @property
    def counts(self) -> ExpertRanks:
        """How many ranks hold and split experts, and this rank's index among them."""
        return ExpertRanks(
            parallel=self.experts.size,
            tensor=self.tensor.size,
            rank=self.experts.rank,
            tensor_rank=self.tensor.rank,
        )

    def trip(self, chosen: Tensor, each_has: int) -> StreamedTrip:
        """Plan the all-to-all of copies to the ``chosen`` experts, of which each rank holds
        ``each_has``. An index beyond the last expert marks a copy that is not sent.

        The host waits here until it knows how many rows arrive, because it allocates their memory
        next.
        """
        ranks, parts = self.experts.size, self.tensor.size
        flat = chosen.flatten()
        # ``scatter_add_`` counts without making the host wait, as ``bincount`` would twice. Dropped
        # copies have the index after the last expert, and are not counted.
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
    """The permutation that sorts received rows by expert; ``taken`` (sources, G) has the number of
    rows from each source rank for each expert.
    """
    ends = taken.flatten().cumsum(0)
    places = torch.arange(rows, device=taken.device)
    experts = torch.searchsorted(ends, places, right=True) % taken.shape[1]
    return experts.argsort(stable=True)
