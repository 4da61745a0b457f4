"""Cuts one tensor-parallel rank's part out of a whole model's tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime.models.parallel import ColumnLinear, RowLinear, VocabularyEmbedding


def shard_of(
    model: nn.Module, tensors: Mapping[str, Tensor], *, rank: int, ranks: int
) -> dict[str, Tensor]:
    """A rank's part of each tensor; ``tensors`` are like parameters of the unsplit ``model``."""
    modules = dict(model.named_modules())
    parts = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        parts[name] = _part(modules[path], leaf, tensor, rank, ranks)
    return parts


def _part(module: nn.Module, leaf: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    if isinstance(module, ColumnLinear):
        blocks = tensor.split(list(module.blocks))
        return torch.cat([block.chunk(ranks)[rank] for block in blocks])
    if isinstance(module, VocabularyEmbedding):
        return tensor.chunk(ranks)[rank]
    if isinstance(module, RowLinear) and leaf == "weight":
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor
