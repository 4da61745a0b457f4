"""The norm of all gradients, every parameter counted once, whoever holds how many copies of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TIED_TABLE = -1


class Squares:
    """Sums of squares of a rank's gradients: one number for each layer, and one for a tied table.

    ``counted`` are the ranges of what the rank steps of a layer that count on this rank; nothing is
    computed where no norm is wanted.
    """

    def __init__(
        self,
        counted: Mapping[int, Sequence[slice]],
        device: torch.device,
        *,
        wanted: bool,
    ) -> None:
        self._counted = counted
        self._wanted = wanted
        self._rows = {layer: row for row, layer in enumerate((*counted, TIED_TABLE))}
        self._sums = torch.zeros(len(self._rows), device=device)

    def take(self, layer: int, gradients: Tensor) -> None:
        """Note a layer's gradients, summed up over everything."""
        if self._wanted:
            for_layer = self._sums[self._rows[layer]].zero_()
            for part in self._counted[layer]:
                for_layer.add_(gradients[part].float().square().sum())

    def take_table(self, gradients: Tensor, *, counts: bool) -> None:
        """Note the gradients of the table that embedding and head share."""
        if self._wanted:
            # A number that is assigned to an element would be copied, and the host wait for it.
            of_table = self._sums[self._rows[TIED_TABLE]].zero_()
            if counts:
                of_table.add_(gradients.float().square().sum())

    def total(self) -> Tensor:
        """The sum over this rank's layers."""
        return self._sums.sum()
