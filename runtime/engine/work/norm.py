"""The norm of all gradients of a model, with every parameter counted once over all ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TIED_TABLE = -1
# Squares are summed within rows of so many elements, then the rows' sums are added.
ROW = 1024


class Squares:
    """Sums of squares of a rank's gradients: one for each layer, and one for a tied table.

    ``counted`` has, for each layer, the ranges of the stepped vector that count on this rank. If no
    norm is ``wanted``, nothing is computed. Gradients are not copied, because compute cannot reuse
    memory that another lane allocates.
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
        """Sum the squares of a layer's final gradients."""
        if self._wanted:
            self._note(layer, [gradients[part] for part in self._counted[layer]])

    def take_table(self, gradients: Tensor, *, counts: bool) -> None:
        """Sum the squares of the gradients of a table that embedding and head share."""
        if self._wanted:
            self._note(TIED_TABLE, [gradients] if counts else [])

    def total(self) -> Tensor:
        """The sum over all of this rank's layers."""
        return self._sums.sum()

    def _note(self, layer: int, parts: Sequence[Tensor]) -> None:
        total = self._sums[self._rows[layer]].zero_()
        for gradients in parts:
            cut = gradients.numel() // ROW * ROW
            for rows in (gradients[:cut].view(-1, ROW), gradients[cut:].view(1, -1)):
                if rows.numel():
                    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
                    total.add_(norms.square_().sum())
