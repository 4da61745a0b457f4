"""The flat vectors that the optimizer steps: their data types, their division over device and host,
and staging buffers for offloaded ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from runtime.engine.storage.arena import Room
from runtime.engine.storage.layout import ALIGNMENT, kept_elements
from runtime.engine.storage.moment_codes import BLOCK, CODES
from runtime.engine.streams.lanes import Streams


class Kind(NamedTuple):
    """The data type of a vector, and for how many parameters it has an element."""

    dtype: torch.dtype
    each: int = 1


def kinds_stepped(moments: torch.dtype) -> tuple[Kind, ...]:
    """The vectors that the optimizer steps: master weights and two moments; scales of both follow
    where moments are codes.
    """
    wide, moment = Kind(torch.float32), Kind(moments)
    scales = (Kind(torch.float32, BLOCK),) * 2 if moments == CODES else ()
    return wide, moment, moment, *scales


def alignment_of(moments: torch.dtype) -> int:
    """The number of elements at whose multiples parameters, ranks' parts and offloaded tails begin:
    with codes, whole blocks, so that these are a parameter's own.
    """
    return BLOCK if moments == CODES else ALIGNMENT


# A partly offloaded vector: its beginning stays on the device, and its tail is on the host.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A flat vector whose tail is on the host."""

    resident: Tensor
    tail: Tensor

    @classmethod
    def of(
        cls,
        numel: int,
        ratio: float,
        kind: Kind,
        device: Room,
        host: Room,
        alignment: int = ALIGNMENT,
    ) -> Self:
        """Allocate a vector for ``numel`` parameters, of which the share ``ratio`` is on the host,
        in multiples of ``alignment``.
        """
        kept = kept_elements(numel, ratio, alignment)
        return cls(
            resident=device.take(kept // kind.each, kind.dtype),
            tail=host.take((numel - kept) // kind.each, kind.dtype),
        )

    @property
    def kept(self) -> int:
        """The number of elements of the vector that are kept on the device."""
        return self.resident.numel()

    def load(self, whole: Tensor) -> None:
        """Copy the resident and the offloaded part of the vector into ``whole``."""
        whole[: self.kept].copy_(self.resident)
        whole[self.kept :].copy_(self.tail, non_blocking=True)

    def store(self, whole: Tensor) -> None:
        """Copy ``whole`` into the resident and the offloaded part of the vector."""
        self.resident.copy_(whole[: self.kept])
        self.tail.copy_(whole[self.kept :], non_blocking=True)


# Staging buffers on the device for offloaded optimizer states, during optimizer steps.
#
# Each step allocates the buffers and frees them, since other tensors need the memory in between.


class Staging:
    """Staging buffers for offloaded optimizer states, used in turn: each has vectors for ``numel``
    parameters of the ``kinds`` that are stepped.
    """

    def __init__(
        self,
        entries: Iterable[int],
        kinds: Sequence[Kind],
        numel: int,
        device: torch.device,
    ) -> None:
        self._entries = sorted(set(entries)) if numel else []
        self._kinds, self._numel, self._device = kinds, numel, device
        self._slots: dict[int, tuple[Tensor, ...]] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes that the staging buffers occupy now."""
        return sum(slot.nbytes for slots in self._slots.values() for slot in slots)

    def open(self) -> None:
        """Allocate the staging buffers for offloaded states."""
        for entry in self._entries:
            self._slots[entry] = tuple(
                torch.empty(self._numel // kind.each, dtype=kind.dtype, device=self._device)
                for kind in self._kinds
            )

    def close(self, streams: Streams) -> None:
        """Free the staging buffers for offloaded states."""
        for slots in self._slots.values():
            for slot in slots:
                streams.spoil(slot)
        self._slots.clear()

    def of(self, entry: int, begin: int, numel: int) -> list[Tensor]:
        """The elements of ``numel`` parameters from ``begin`` on, of each vector of a staging
        buffer.
        """
        return [
            slot[begin // kind.each : (begin + numel) // kind.each]
            for slot, kind in zip(self._slots[entry], self._kinds, strict=True)
        ]
