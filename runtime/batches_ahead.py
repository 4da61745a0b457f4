"""Copies the next step's batches to the device while the current step runs.

The copy comes from pinned memory, so the host does not wait for it; it is queued behind the work of
the current step. When the host has the step's results, all work has ended, including the copy, and
the pinned buffer is free for the next step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.devices.cuda import driver_of
from runtime.engine.executor import Batches
from runtime.engine.storage.arena import Arena

HOST = torch.device("cpu")
# The type of a function that returns tokens and targets of each micro-batch of a step, on the host.
# The positions and beginnings of packed documents may follow.
Made = Callable[[int], Sequence[tuple[Tensor, ...]]]


class BatchesAhead:
    """The batches of consecutive steps, copied to the device one step ahead; ``made`` returns the
    batches of a step, by its number.
    """

    def __init__(self, made: Made, device: torch.device) -> None:
        self._made, self._device = made, device
        self._ready: tuple[int, Batches] | None = None
        self._memory: Arena | None = None
        self._host: Tensor | None = None

    def of(self, step: int) -> Batches:
        """The batches of a step; if they were not prepared, they are made now."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == step else self._copied(step)

    def prepare(self, step: int) -> None:
        """Make the batches of a step and start copying them; the previous copy must have ended."""
        self._ready = (step, self._copied(step))

    def release(self) -> None:
        """Unpin the host memory of the batches, after its last use."""
        if self._memory is not None:
            self._memory.release()

    def _copied(self, step: int) -> Batches:
        batches = self._made(step)
        if not batches:
            return []
        whole = [one for batch in batches for one in batch]
        host = self._pinned(sum(one.numel() for one in whole), whole[0].dtype)
        begin, copies = 0, []
        for tensor in whole:
            pinned = host[begin : begin + tensor.numel()].view(tensor.shape)
            begin += tensor.numel()
            pinned.copy_(tensor)
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            copies.append(copy.copy_(pinned, non_blocking=True))
        each = [iter(copies)] * len(batches[0])
        return list(zip(*each, strict=True))

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The pinned buffer. It is reused, and allocated anew for batches that are larger."""
        if self._host is None or self._host.numel() < numel:
            self.release()
            size_bytes = numel * dtype.itemsize
            self._memory = Arena(size_bytes, HOST, pins_for=driver_of(self._device))
            self._host = self._memory.take(numel, dtype)
        return self._host
