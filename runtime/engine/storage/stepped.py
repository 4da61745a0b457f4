"""The flat vectors that the optimizer steps: their data types, their parts on the device and on the
host, and buffers on the device for stepping offloaded parts.
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
    """The data type of a vector that the optimizer steps, and how many parameters share an
    element.
    """

    dtype: torch.dtype
    each: int = 1


def kinds_stepped(moments: torch.dtype) -> tuple[Kind, ...]:
    """The vectors that the optimizer steps: master weights, two moments, and the moments' scales if
    they are quantised.
    """
    wide, moment = Kind(torch.float32), Kind(moments)
    scales = (Kind(torch.float32, BLOCK),) * 2 if moments == CODES else ()
    return wide, moment, moment, *scales


def alignment_of(moments: torch.dtype) -> int:
    """Parameters, ranks' parts and offloaded tails begin at multiples of this number of elements:
    whole blocks if moments are quantised, so that no block spans two of them.
    """
    return BLOCK if moments == CODES else ALIGNMENT


# A partly offloaded vector: its beginning stays on the device, and its tail is in host memory.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A flat vector whose tail is offloaded to host memory."""

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
        """Allocate a vector for ``numel`` parameters, of which the share ``ratio`` is in host
        memory, in multiples of ``alignment``.
        """
        kept = kept_elements(numel, ratio, alignment)
        return cls(
            resident=device.take(kept // kind.each, kind.dtype),
            tail=host.take((numel - kept) // kind.each, kind.dtype),
        )

    @property
    def kept(self) -> int:
        """The number of elements of the vector that stay on the device."""
        return self.resident.numel()

    def load(self, whole: Tensor) -> None:
        """Copy both parts of the vector, on the device and on the host, into ``whole``."""
        whole[: self.kept].copy_(self.resident)
        whole[self.kept :].copy_(self.tail, non_blocking=True)

    def store(self, whole: Tensor) -> None:
        """Copy ``whole`` into both parts of the vector, on the device and on the host."""
        self.resident.copy_(whole[: self.kept])
        self.tail.copy_(whole[self.kept :], non_blocking=True)


# Buffers on the device into which offloaded optimizer states are copied for a step.
#
# They are allocated for each optimizer step and then freed, since other tensors need the memory
# between steps.


class Staging:
    """Buffers on the device for stepping offloaded optimizer states, which layers use in turn; each
    has vectors of the given ``kinds`` for ``numel`` parameters.
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
        """The bytes that the buffers occupy at present."""
        return sum(slot.nbytes for slots in self._slots.values() for slot in slots)

    def open(self) -> None:
        """Allocate the buffers for stepping offloaded optimizer states."""
        for entry in self._entries:
            self._slots[entry] = tuple(
                torch.empty(self._numel // kind.each, dtype=kind.dtype, device=self._device)
                for kind in self._kinds
            )

    def close(self, streams: Streams) -> None:
        """Free the buffers for stepping offloaded optimizer states."""
        for slots in self._slots.values():
            for slot in slots:
                streams.spoil(slot)
        self._slots.clear()

    def of(self, entry: int, begin: int, numel: int) -> list[Tensor]:
        """The elements for ``numel`` parameters from ``begin`` on, of each vector of a buffer."""
        return [
            slot[begin // kind.each : (begin + numel) // kind.each]
            for slot, kind in zip(self._slots[entry], self._kinds, strict=True)
        ]
