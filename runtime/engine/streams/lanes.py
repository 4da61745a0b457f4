"""The interface of lanes, the queues on which a plan's executor runs concurrent work, and
tensor-parallel collectives on them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from mistlab.schedule.stage_passes import Lane
from runtime.comm.group import Group, Pending, together

# A lane is a queue (on a GPU a stream) on which the executor of a plan runs work in order.
#
# All lanes are the device's except one, which is the host's. Work can wait for events, which mark
# the end of other work; apart from these waits, lanes run concurrently. The issuing thread runs
# ahead of all lanes.


LaneWork = Callable[[], Pending | None]
Event = Any


class Streams(Protocol):
    """The lanes of one device, each a queue of work."""

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Queue work that waits for events; returns the event that marks the end of the work."""

    def settle(self, pending: Pending | None) -> None:
        """Let the current work wait for a collective that it has started."""

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Run a collective on the tensor-parallel lane, while ``work`` runs on the compute lane.

        It is called inside work on the compute lane, whose next work waits for both.
        """

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor; the host waits for them. Where tensors are simulated without
        values, all values are ``usual``.
        """

    def synchronize(self) -> None:
        """Block the calling thread until all work has ended."""

    def spoil(self, *tensors: Tensor) -> None:
        """Overwrite memory that must not be read any more, on lanes that check for such reads."""

    def spans(self) -> list[tuple[float, float]]:
        """Wait for all work; returns the start and end of each work since the last call, in
        seconds.
        """

    def close(self) -> None:
        """Accept no more work, because the run is over or has failed."""


# Tensor-parallel ranks of an executed model, with collectives inside a layer.


class StreamedRanks:
    """A tensor-parallel group whose collectives run inside a layer, while other lanes continue.

    In the backward pass the GEMMs of weight gradients are deferred, because the layer itself does
    not need their results. They overlap with the layer's next reduction, that of its input's
    gradient, or are collected for a separate weight-gradient pass.
    """

    def __init__(self, group: Group, streams: Streams, *, splits_tokens: bool = False) -> None:
        self._group, self._streams = group, streams
        self.size, self.rank = group.size, group.rank
        self.splits_tokens = splits_tokens and group.size > 1
        self._put_off: list[Callable[[], object]] = []
        self._kept: list[Callable[[], object]] | None = None

    @contextmanager
    def keeping(self) -> Iterator[list[Callable[[], object]]]:
        """Within the ``with`` block, collect deferred GEMMs in the yielded list."""
        kept: list[Callable[[], object]] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    @property
    def keeps_products(self) -> bool:
        """Whether GEMMs of weight gradients are collected for a separate weight-gradient pass."""
        return self._kept is not None

    def put_off(self, product: Callable[[], object]) -> None:
        """Defer a GEMM, so that it overlaps with the next reduction; with one rank it runs at
        once.
        """
        if self.size > 1 and self._kept is None:
            self._put_off.append(product)
        else:
            self.do(product)

    def do(self, product: Callable[[], object]) -> None:
        """Run a GEMM now, unless deferred GEMMs are being collected."""
        if self._kept is None:
            product()
        else:
            self._kept.append(product)

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """All-reduce over the group, in place, overlapped with the deferred GEMMs."""
        if self._put_off:
            self._streams.beside(lambda: self._group.all_reduce(tensor, operation), self._catch_up)
        elif self.size > 1:
            self._streams.settle(self._group.all_reduce(tensor, operation))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * tensor.numel())
        self._streams.settle(self._group.all_gather(parts, tensor.contiguous().flatten()))
        return torch.cat(parts.view(self.size, *tensor.shape).unbind(), -1)

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Concatenate the ranks' parts of sequences (batch, tokens, ..).

        Each sequence is gathered by a call of its own: one call for all sequences would put ranks
        before sequences, and need a copy to reorder them.
        """
        del again
        batch, tokens, width = tensor.shape
        whole = tensor.new_empty(batch, self.size * tokens, width)
        pairs = zip(whole, tensor.contiguous(), strict=True)
        self._streams.settle(
            together(self._group.all_gather(one.flatten(), own.flatten()) for one, own in pairs)
        )
        return whole

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Reduce-scatter whole sequences over the ranks, overlapped with the deferred GEMMs; one
        call per sequence.
        """
        del of_input
        batch, tokens, width = tensor.shape
        whole, part = tensor.contiguous(), tensor.new_empty(batch, tokens // self.size, width)

        def collective() -> Pending | None:
            pairs = zip(whole, part, strict=True)
            return together(
                self._group.reduce_scatter(one.flatten(), own.flatten()) for one, own in pairs
            )

        if self._put_off:
            self._streams.beside(collective, self._catch_up)
        else:
            self._streams.settle(collective())
        return part

    def _catch_up(self) -> None:
        products, self._put_off = self._put_off, []
        while products:
            # Each deferred GEMM is removed from the list as it runs, so that its tensors are freed
            # at once.
            products.pop(0)()
