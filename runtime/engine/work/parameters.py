"""Relates a rank's parameters to the model's whole tensors, and computes the norm of all
gradients.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mistlab.plan.workload import Workload
from mistlab.stages.stage_shape import StageShape
from runtime.comm.group import Pending, then
from runtime.comm.topology import Connections, Sharers
from runtime.engine.storage.layout import Entry
from runtime.engine.storage.moment_codes import BLOCK, CODES, CodedSlice
from runtime.engine.storage.pieces import Piece, part_of, pieces_of
from runtime.engine.storage.state import Section, StageState
from runtime.engine.streams.lanes import LaneWork
from runtime.engine.work.stage_modules import TABLE, LayerModule, twin_of

# The norm of all gradients of a model, in which each parameter counts once over all ranks.


TIED_TABLE = -1
# The number of elements in a row: squares are summed within each row, and then over the rows.
ROW = 1024


class Squares:
    """The sums of squared gradients on a rank: one per layer, and one for a tied token table.

    ``counted`` has for each layer the ranges of the stepped vector that count on this rank, so that
    no element counts twice over all ranks. If no norm is ``wanted``, nothing is computed. Gradients
    are not copied, because the compute lane cannot reuse memory that another lane allocates.
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
        """Add up the squares of a layer's reduced gradients."""
        if self._wanted:
            self._note(layer, [gradients[part] for part in self._counted[layer]])

    def take_table(self, gradients: Tensor, *, counts: bool) -> None:
        """Add up the squares of the gradients of a table that embedding and head share."""
        if self._wanted:
            self._note(TIED_TABLE, [gradients] if counts else [])

    def total(self) -> Tensor:
        """The sum of squared gradients over all of this rank's layers."""
        return self._sums.sum()

    def _note(self, layer: int, parts: Sequence[Tensor]) -> None:
        total = self._sums[self._rows[layer]].zero_()
        for gradients in parts:
            cut = gradients.numel() // ROW * ROW
            for rows in (gradients[:cut].view(-1, ROW), gradients[cut:].view(1, -1)):
                if rows.numel():
                    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
                    total.add_(norms.square_().sum())


# Relates a rank's flat vectors to the model's whole tensors, for initial weights, checkpoints, the
# norm of gradients, and tied tables.


class Parameters:
    """The part of each parameter that this rank holds, and that its optimizer steps."""

    def __init__(
        self,
        workload: Workload,
        shape: StageShape,
        state: StageState,
        layers: Mapping[int, LayerModule],
        connections: Connections,
    ) -> None:
        self.shape, self.state, self.layers = shape, state, layers
        self.connections = connections
        self.device = next(iter(state.layers.values())).step.device
        self.twin = twin_of(workload.model)
        self.tied = bool(self.twin) and not shape.shares_table
        self.table_numel = workload.model.vocab * workload.model.hidden
        self._table: Tensor | None = None

    def set_masters(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Set a layer's master weights from the layer's whole tensors."""
        parts = self.layers[layer].part_of(tensors, self.connections.tensor)
        for section in self.state.sections_of(layer):
            layout = section.layers[layer].layout
            flat = torch.zeros(layout.numel, device=next(iter(tensors.values())).device)
            for name, view in layout.views(flat).items():
                view.copy_(parts[name])
            part = flat[layout.own] if self.shape.zero >= 1 else flat
            section.layers[layer].optimizer[0].store(part)
        if self.state.frozen is not None:
            self._set_frozen(self.state.frozen, layer, parts)

    def _set_frozen(self, section: Section, layer: int, parts: Mapping[str, Tensor]) -> None:
        """Set a layer's frozen weights, which have no master weights."""
        module, layout = self.layers[layer], section.layers[layer].layout
        weights = section.layers[layer].weights
        flat = torch.zeros(layout.numel, dtype=weights.resident.dtype)
        for name, view in layout.views(flat).items():
            view.copy_(module.kept_as(name, parts[name]))
        weights.store(flat[layout.own] if self.shape.zero >= 3 else flat)

    def pieces(self, layer: int) -> Iterator[Piece]:
        """The rectangular slices of the model's tensors that this rank's optimizer steps in a
        layer.

        Each slice is entirely on the device or entirely on the host, like its optimizer states.
        """
        before = 0
        for section in self.state.sections_of(layer):
            yield from self._pieces_of(section, layer, before)
            before += len(_stepped(section, layer))

    def _pieces_of(self, section: Section, layer: int, before: int) -> Iterator[Piece]:
        module, ranks = self.layers[layer], self.connections.tensor
        stepped = _stepped(section, layer)
        begin, end = stepped.start, stepped.stop
        kept = begin + section.layers[layer].optimizer[0].kept
        for entry in section.layers[layer].layout.entries:
            path, _, leaf = entry.name.rpartition(".")
            part = part_of(
                *(module.module.get_submodule(path), leaf, entry.shape),
                rank=ranks.rank,
                ranks=ranks.size,
                used=module.whole_shapes[entry.name][0],
            )
            for first, last in ((begin, kept), (kept, end)):
                low, high = max(first, entry.offset), min(last, entry.offset + entry.numel)
                yield from pieces_of(
                    *(module.prefix + entry.name, entry.shape, part),
                    *(low - entry.offset, high - entry.offset, before + low - begin),
                )

    def values(self, layer: int, kind: int, piece: Piece) -> tuple[Tensor, CodedSlice | None]:
        """The memory of a slice's master weights (``kind`` 0) or moments (1, 2), on the device or
        on the host; if moments are quantised, also their codes and scales.
        """
        begin, end = piece.begin, piece.begin + piece.numel
        for section in self.state.sections_of(layer):
            splits = section.layers[layer].optimizer
            for on_host in (False, True):
                flats = [split.tail if on_host else split.resident for split in splits]
                flat = flats[kind]
                if begin < flat.numel():
                    values = flat[begin:end].view(piece.sizes)
                    if flat.dtype != CODES:
                        return values, None
                    return values, CodedSlice(
                        codes=values,
                        scales=flats[kind + 2][begin // BLOCK : -(-end // BLOCK)],
                        first=begin % BLOCK,
                        signed=kind == 1,
                    )
                begin, end = begin - flat.numel(), end - flat.numel()
        raise AssertionError(piece)

    def counted(
        self, section: Section, sharers: Sharers, *, each: bool = False
    ) -> dict[int, list[slice]]:
        """For each layer of a section, the ranges of the stepped vector that this rank counts in
        the norm of gradients, so that no element counts twice over all ranks. With ``each`` all
        ranges count, for ranks that each hold all parameters.
        """
        if self.shape.zero == 0 and sharers.replica > 0 and not each:
            return {layer: [] for layer in section.layers}
        return {layer: self._counted(section, sharers, layer) for layer in section.layers}

    def add_up(self, squares: Squares) -> LaneWork:
        """The work that sums the gradients of a tied token table over embedding and head.

        On each rank the gradients are a range of the table's elements, which depends on the degrees
        and ZeRO levels of its stage. So each rank copies its range into a whole table of zeros, the
        table is summed over the ranks, and each rank copies its range back. The whole table is in
        memory of the compute lane until ``drop_table``.
        """
        group = self.connections.tied
        assert group is not None
        self._table = whole = torch.empty(self.table_numel, device=self.device)
        parts = [
            (gradients, slice(at, at + len(gradients))) for gradients, at in self._table_gradients()
        ]
        holds = self.shape.zero > 0 or self.connections.replica == 0

        def work() -> Pending | None:
            whole.zero_()
            for gradients, at in parts:
                if holds:
                    whole[at] += gradients
            return then(group.all_reduce(whole), take)

        def take() -> None:
            for gradients, at in parts:
                gradients.copy_(whole[at])
            squares.take_table(whole, counts=self.connections.rank == 0)

        return work

    def drop_table(self) -> None:
        """Free the memory of the whole table, once the compute lane has waited for its use."""
        self._table = None

    def _counted(self, section: Section, sharers: Sharers, layer: int) -> list[slice]:
        module, stepped = self.layers[layer], _stepped(section, layer)
        begin, end = stepped.start, stepped.stop
        slices = []
        for entry in section.layers[layer].layout.entries:
            is_mine = sharers.splitters.rank == 0 or module.is_split(entry.name)
            if is_mine and not (self.tied and module.prefix + entry.name in (TABLE, self.twin)):
                low, high = max(begin, entry.offset), min(end, entry.offset + entry.numel)
                if low < high:
                    slices.append(slice(low - begin, high - begin))
        return slices

    def _table_gradients(self) -> Iterator[tuple[Tensor, int]]:
        """This rank's gradients of the token table, and the index in the whole table of their first
        element.
        """
        for layer, module in self.layers.items():
            for entry in self.state.layers[layer].layout.entries:
                if module.prefix + entry.name in (TABLE, self.twin):
                    stepped = _stepped(self.state.sections[0], layer)
                    begin, end = stepped.start, stepped.stop
                    low = max(begin, entry.offset)
                    high = min(end, entry.offset + self._unpadded(entry))
                    gradients = self.state.sections[0].stepped_gradients(layer, 0)
                    first = self.connections.place.tensor * entry.numel - entry.offset
                    if low < high:
                        yield gradients[low - begin : high - begin], first + low

    def _unpadded(self, entry: Entry) -> int:
        """The number of elements in this rank's part of the table that are not padding."""
        return min(entry.numel, self.table_numel - self.connections.place.tensor * entry.numel)

    def masters(self, layer: int) -> Tensor:
        """A copy in host memory of the master weights that this rank steps in a layer."""
        splits = [one.layers[layer].optimizer[0] for one in self.state.sections_of(layer)]
        return torch.cat([part for one in splits for part in (one.resident.cpu(), one.tail)])

    def writes(self, piece: Piece) -> bool:
        """Whether this rank writes a slice to a checkpoint, if several ranks hold it.

        Of two tied tables only the embedding's table is written.
        """
        if self.tied and piece.name == self.twin:
            return False
        sharers = self.connections.sharers[1 if piece.is_of_experts else 0]
        is_first = self.shape.zero > 0 or sharers.replica == 0
        return is_first and (piece.is_split or sharers.splitters.rank == 0)


def _stepped(section: Section, layer: int) -> range:
    """The range of a layer's flat vector that this rank's optimizer steps."""
    layout = section.layers[layer].layout
    part = layout.own if section.shape.zero >= 1 else slice(0, layout.numel)
    return range(part.start, part.stop)
