"""A rank's shards of a model's tensors, which can be re-sharded to another layout while serving.

The part of a new shard that the rank holds already is copied; the rest comes from ranks that hold
it, or from whole tensors in host memory. One layer of each stage moves at a time, and shards that
are no longer needed are freed before the next layer moves. So a rank never holds more than two
layers beyond those that it serves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor, nn

from mistlab.plan.workload import Workload
from mistlab.serving.resharding import Layout, Part, SentPart, common, pieces_to, width
from runtime.comm.group import Group, finished
from runtime.engine.work.stage_modules import (
    TABLE,
    TIED,
    LayerBuilder,
    initial_tensor,
    own_shapes,
    prefix_of,
    rotary_tables,
)
from runtime.models.attention import RotaryTables
from runtime.models.config import TYPE_OF_PRECISION, ModelConfig, config_of
from runtime.models.parallel import split_of
from runtime.models.ranks import OneRank, TensorParallel

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor of the whole model: its shape, the layers that need it, the axis along which ranks
    split it, and the sizes of the matrices along the axis that are split separately (None if every
    rank holds it whole).
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, tuple[int, ...]] | None
    layers: tuple[int, ...]

    def local_shape(self, part: Part) -> list[int]:
        """The shape of a rank's shard of the tensor."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split[0]] = int(shape[self.split[0]] * width(part))
        return shape

    def pieces(self, local: Tensor, held: Part, part: Part) -> list[Tensor]:
        """Views of a part of the tensor, in the shard of a rank that holds the part ``held``."""
        if self.split is None:
            return [local]
        axis, blocks = self.split
        views, first = [], 0
        for size in blocks:
            begin, count = int(size * (part[0] - held[0])), int(size * width(part))
            views.append(local.narrow(axis, first + begin, count))
            first += int(size * width(held))
        return views


def model_tensors(workload: Workload, config: ModelConfig) -> list[ModelTensor]:
    """All tensors of a model, layer by layer; a tied embedding table is needed by the first and the
    last layer.
    """
    builder = LayerBuilder(workload, config, OneRank(), rotary_tables(config, workload, CPU, None))
    blocks, tied, tensors = workload.model.layers, workload.model.tied_embeddings, []
    for layer in range(blocks + 2):
        module = builder.layer(layer)
        table = TIED if tied and layer > blocks else ""
        for name, shape in own_shapes(module, without=table).items():
            path, _, leaf = name.rpartition(".")
            split = split_of(module.get_submodule(path), leaf, shape)
            full = prefix_of(layer, blocks) + name
            shared = tied and full == TABLE
            tensors.append(
                ModelTensor(
                    name=full,
                    shape=shape,
                    split=None if split is None else (split[0], tuple(split[1])),
                    layers=(layer, blocks + 1) if shared else (layer,),
                )
            )
    return tensors


def config_over(workload: Workload, layouts: Sequence[Layout]) -> ModelConfig:
    """The sizes of a model whose vocabulary is padded for the ranks of all layouts."""
    vocab = workload.model.padded_vocab(lcm(*(layout.tp for layout in layouts)))
    return replace(config_of(workload), vocab=vocab, unused_vocab=vocab - workload.model.vocab)


# The type of a function that returns a whole parameter without padding, by name and shape.
Start = Callable[[str, tuple[int, ...]], Tensor]


def drawn_by(workload: Workload, seed: int) -> Start:
    """A function that draws a model's initial weights by a seed and the parameter's name."""
    tied = workload.model.tied_embeddings
    return lambda name, shape: initial_tensor(name, shape, seed, tied=tied)


def whole_tensors(
    workload: Workload, tensors: Sequence[ModelTensor], start: Start
) -> Iterator[tuple[ModelTensor, Tensor]]:
    """All whole tensors of a model; rows of padding are zero."""
    for model_tensor in tensors:
        shape = model_tensor.shape
        if model_tensor.name in (TABLE, TIED):
            shape = (workload.model.vocab, *shape[1:])
        begun = start(model_tensor.name, shape)
        rows = model_tensor.shape[0] - shape[0]
        yield model_tensor, nn.functional.pad(begun, (0, 0, 0, rows)) if rows else begun


class ServedWeights:
    """A rank's shards of all tensors under the current layout; ``moved_bytes`` has the bytes
    received in each change of layout.
    """

    def __init__(
        self,
        tensors: Sequence[ModelTensor],
        blocks: int,
        layout: Layout,
        world: Group,
        dtype: torch.dtype,
    ) -> None:
        self.tensors, self.blocks, self.layout = tensors, blocks, layout
        self.world, self.dtype = world, dtype
        self.parts: dict[str, Tensor] = {}
        self.moved_bytes: list[int] = []

    def load(self, whole: Iterator[tuple[ModelTensor, Tensor]]) -> None:
        """Set this rank's shards from whole tensors."""
        part, ranks = self.layout.part_of(self.world.rank), self.world.rank
        for model_tensor, tensor in whole:
            if self._has(model_tensor, ranks, self.layout):
                local = torch.empty(model_tensor.local_shape(part), dtype=self.dtype)
                self._fill(model_tensor, local, part, part, tensor)
                self.parts[model_tensor.name] = local

    def _has(self, model_tensor: ModelTensor, rank: int, layout: Layout) -> bool:
        return any(layer in layout.layers_of(rank, self.blocks) for layer in model_tensor.layers)

    def _fill(
        self, model_tensor: ModelTensor, local: Tensor, held: Part, part: Part, whole: Tensor
    ) -> None:
        """Set a part of a shard from the whole tensor."""
        everything = Layout().part_of(0)
        sources = model_tensor.pieces(whole, everything, part)
        for to, come in zip(model_tensor.pieces(local, held, part), sources, strict=True):
            to.copy_(come)

    def change(self, after: Layout, host: Mapping[str, Tensor] | None = None) -> None:
        """Re-shard to another layout: from other ranks or, if ``host`` is given, from whole tensors
        in host memory.
        """
        moved = 0
        for tensors in self._rounds():
            moved += self._move(tensors, after, host)
        self.layout = after
        self.moved_bytes.append(moved)

    def _rounds(self) -> Iterator[list[ModelTensor]]:
        """The tensors that move together: first the tensors of the first layer of each stage, then
        of the second layer, and so on.
        """
        firsts = [self.layout.ranks_of(0, stage)[0] for stage in range(self.layout.pp)]
        round_of_layer = {
            layer: number
            for rank in firsts
            for number, layer in enumerate(self.layout.layers_of(rank, self.blocks))
        }
        for number in range(max(round_of_layer.values()) + 1):
            yield [one for one in self.tensors if round_of_layer[one.layers[0]] == number]

    def _move(
        self, tensors: Sequence[ModelTensor], after: Layout, host: Mapping[str, Tensor] | None
    ) -> int:
        rank = self.world.rank
        held, part = self.layout.part_of(rank), after.part_of(rank)
        fresh: dict[str, Tensor] = {}
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        places: list[list[Tensor]] = []
        moved = 0
        for model_tensor in tensors:
            if self._has(model_tensor, rank, after):
                fresh[model_tensor.name] = self._kept(model_tensor, held, part)
            for piece in self._pieces(model_tensor, after):
                if piece.target == rank:
                    views = model_tensor.pieces(fresh[model_tensor.name], part, piece.part)
                    moved += sum(view.numel() * view.itemsize for view in views)
                    if host is not None:
                        self._fill(
                            model_tensor,
                            fresh[model_tensor.name],
                            part,
                            piece.part,
                            host[model_tensor.name],
                        )
                        continue
                    count = sum(view.numel() for view in views)
                    receives.append((torch.empty(count, dtype=self.dtype), piece.source))
                    places.append(views)
                elif piece.source == rank and host is None:
                    views = model_tensor.pieces(self.parts[model_tensor.name], held, piece.part)
                    sends.append((torch.cat([view.flatten() for view in views]), piece.target))
        finished(self.world.exchange(sends, receives))
        for (values, _), views in zip(receives, places, strict=True):
            come = values.split([view.numel() for view in views])
            for view, numbers in zip(views, come, strict=True):
                view.copy_(numbers.view(view.shape))
        for model_tensor in tensors:
            self.parts.pop(model_tensor.name, None)
        self.parts |= fresh
        return moved

    def _kept(self, model_tensor: ModelTensor, held: Part, part: Part) -> Tensor:
        """Memory for a rank's new shard, filled with the values that the rank holds already."""
        old = self.parts.get(model_tensor.name)
        if old is not None and (held == part or model_tensor.split is None):
            return old
        local = torch.empty(model_tensor.local_shape(part), dtype=self.dtype)
        both = common(held, part)
        if old is not None and width(both):
            for to, come in zip(
                model_tensor.pieces(local, part, both),
                model_tensor.pieces(old, held, both),
                strict=True,
            ):
                to.copy_(come)
        return local

    def _pieces(self, model_tensor: ModelTensor, after: Layout) -> Iterator[SentPart]:
        """Which rank sends which part of a tensor to which rank; all ranks compute the same
        list.
        """
        before = self.layout
        for target in range(self.world.size):
            if not self._has(model_tensor, target, after):
                continue
            had = self._has(model_tensor, target, before)
            replica = before.replica_of(target)
            each = before.tp * before.pp
            holders = [
                peer
                for peer in range(replica * each, (replica + 1) * each)
                if self._has(model_tensor, peer, before)
            ]
            part = after.part_of(target)
            if model_tensor.split is None:
                if not had:
                    source = holders[target % len(holders)]
                    yield SentPart(source=source, target=target, part=part)
                continue
            kept = before.part_of(target) if had else None
            peers = [(peer, before.part_of(peer)) for peer in holders]
            yield from pieces_to(target, part, kept, peers)


class ServedLayers:
    """The modules of a rank's layers under a layout, whose parameters are the rank's shards."""

    def __init__(
        self,
        workload: Workload,
        config: ModelConfig,
        layers: range,
        ranks: TensorParallel,
        weights: ServedWeights,
    ) -> None:
        self.rotary: RotaryTables | None = rotary_tables(config, workload, CPU, None)
        blocks, tied = workload.model.layers, workload.model.tied_embeddings
        builder = LayerBuilder(workload, config, ranks, self.rotary)
        self.modules: dict[int, nn.Module] = {}
        for layer in layers:
            module, prefix = builder.with_norms(layer), prefix_of(layer, blocks)
            tensors = {}
            for name, _ in module.named_parameters():
                full = TABLE if tied and prefix + name == TIED else prefix + name
                tensors[name] = weights.parts[full]
            module.load_state_dict(tensors, assign=True)
            self.modules[layer] = module.eval()


def dtype_of(workload: Workload) -> torch.dtype:
    """The data type of a model's weights."""
    return TYPE_OF_PRECISION[workload.precision]
