"""The norm of all gradients, every parameter counted once, whoever holds how many copies of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TIED_TABLE = -1
# Elements whose squares are summed up one by one; sums of rows are added as trees are.
ROW = 1024


class Squares:
    """Sums of squares of a rank's gradients: one number for each layer, and one for a tied table.

    ``counted`` are the ranges of what the rank steps of a layer that count on this rank; nothing is
    computed where no norm is wanted. No copy is made of gradients: memory that a lane allocates is
    never compute's again.
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
            self._note(layer, [gradients[part] for part in self._counted[layer]])

    def take_table(self, gradients: Tensor, *, counts: bool) -> None:
        """Note the gradients of the table that embedding and head share."""
        if self._wanted:
            self._note(TIED_TABLE, [gradients] if counts else [])

    def total(self) -> Tensor:
        """The sum over this rank's layers."""
        return self._sums.sum()

    def _note(self, layer: int, parts: Sequence[Tensor]) -> None:
        total = self._sums[self._rows[layer]].zero_()
        for gradients in parts:
            cut = gradients.numel() // ROW * ROW
            for rows in (gradients[:cut].view(-1, ROW), gradients[cut:].view(1, -1)):
                if rows.numel():
                    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
                    total.add_(norms.square_().sum())
