"""Builds a stage's layers as modules without storage, and draws their first weights by seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn

from mistlab.schedule.stage_shape import StageShape
from mistlab.values.workload import Workload
from runtime.comm.group import Group
from runtime.devices.table import generator_of
from runtime.engine.storage.layout import shapes_of
from runtime.models.attention import RotaryTables
from runtime.models.config import ModelConfig, config_of, structure_of
from runtime.models.ranks import OneRank, TensorParallel
from runtime.models.shard import shard_of
from runtime.models.transformer import Block, Embedding, Head
from runtime.runnable import check_model

INITIAL_STD = 0.02
HOST = torch.device("cpu")
# Names of the table of token vectors, and of the head's weight, which may be tied to it.
TABLE, TIED = "embedding.tokens.weight", "head.projection.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerModule:
    """A layer on one tensor-parallel rank; its parameters' full names begin with ``prefix``."""

    prefix: str
    module: nn.Module
    whole_shapes: Mapping[str, tuple[int, ...]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the rank's parts of the layer's own parameters, without a borrowed table."""
        shapes = shapes_of(self.module)
        return {name: shape for name, shape in shapes.items() if name in self.whole_shapes}

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The unsplit shape of a parameter, by the parameter's full name."""
        return self.whole_shapes[name.removeprefix(self.prefix)]

    def part_of(self, tensors: Mapping[str, Tensor], ranks: Group) -> dict[str, Tensor]:
        """The rank's part of the layer's unsplit tensors; padding of the vocabulary is zeros."""
        padded = {
            name: _padded(tensor, ranks.size * self.module.get_parameter(name).shape[0])
            if self.prefix + name in (TABLE, TIED)
            else tensor
            for name, tensor in tensors.items()
        }
        return shard_of(self.module, padded, rank=ranks.rank, ranks=ranks.size)

    def initial(self, seed: int, *, tied: bool, device: torch.device = HOST) -> dict[str, Tensor]:
        """The layer's unsplit first weights."""
        return {
            name: initial_tensor(self.prefix + name, shape, seed, tied=tied, device=device)
            for name, shape in self.whole_shapes.items()
        }


def initial_tensor(
    name: str, shape: tuple[int, ...], seed: int, *, tied: bool, device: torch.device = HOST
) -> Tensor:
    """First weights of a parameter, drawn on a device.

    They depend on the seed and the parameter's name, so they are the same for every plan. Kinds of
    devices draw different values.
    """
    if tied and name == TIED:
        name = TABLE
    if len(shape) == 1:
        fill = 1.0 if name.endswith("weight") else 0.0
        return torch.full(shape, fill, device=device)
    generator = generator_of(device).manual_seed(crc32(name.encode()) + (seed << 32))
    return torch.empty(shape, device=device).normal_(std=INITIAL_STD, generator=generator)


def layer_modules(
    workload: Workload, shape: StageShape, ranks: TensorParallel, device: torch.device
) -> dict[int, LayerModule]:
    """A stage's layers, by number in the whole model."""
    check_model(workload)
    config = config_of(workload, tensor_parallel=ranks.size)
    build = _Builder(workload, config, ranks, _rotary(config, workload, device))
    unsplit = _Builder(workload, config_of(workload), OneRank(), build.rotary)
    return {
        layer: LayerModule(
            prefix=_prefix(layer, workload.model.layers),
            module=build.layer(layer),
            whole_shapes=_own_shapes(unsplit.layer(layer), borrows=shape.borrows_table(layer)),
        )
        for layer in shape.layers
    }


def _own_shapes(module: nn.Module, *, borrows: bool) -> dict[str, tuple[int, ...]]:
    shapes = shapes_of(module)
    if borrows:
        del shapes[TIED.removeprefix("head.")]
    return shapes


class _Builder:
    def __init__(
        self,
        workload: Workload,
        config: ModelConfig,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        self.structure = structure_of(workload.model)
        self.blocks = workload.model.layers
        self.config, self.ranks, self.rotary = config, ranks, rotary

    def layer(self, layer: int) -> nn.Module:
        with torch.device("meta"):
            if layer == 0:
                return Embedding(self.config, self.structure, self.ranks)
            if layer <= self.blocks:
                return Block(self.config, self.structure, self.ranks, self.rotary)
            return Head(self.config, self.structure, self.ranks)


def _rotary(config: ModelConfig, workload: Workload, device: torch.device) -> RotaryTables | None:
    if structure_of(workload.model).position != "rotary":
        return None
    with torch.device(device):
        return RotaryTables(config)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def _prefix(layer: int, blocks: int) -> str:
    if layer == 0:
        return "embedding."
    return f"blocks.{layer - 1}." if layer <= blocks else "head."
