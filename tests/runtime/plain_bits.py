"""Frozen weights of few bits, dequantised, written apart from the runtime's packing: value by value
from the definition of NF4 and of scales."""

from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from mistlab.plan.workload import Workload


def nf4() -> np.ndarray:
    """Four bits for normal values (Dettmers et al. 2023, equation 4): quantiles of a normal
    distribution, eight above zero and seven below, each side scaled to 1."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = np.array([*map(quantile, np.linspace(offset, 0.5, 9)[:-1])])
    below = -np.array([*map(quantile, np.linspace(offset, 0.5, 8)[:-1])])
    every = np.sort(np.concatenate([above, below, [0.0]]))
    return (every / every.max()).astype(np.float32)


def kept_coarsely(work: Workload, name: str, weight: Tensor) -> Tensor:
    """A first weight as it is where the workload's base has few bits: those of blocks' products."""
    of_product = name.endswith((".qkv.weight", ".output.weight", ".up.weight", ".down.weight"))
    if work.base == "16bit" or ".adapter." in name or not of_product:
        return weight
    by_columns = name.endswith((".output.weight", ".down.weight"))
    rows, inputs = weight.shape
    parts = weight.numpy().reshape(rows, inputs // 64, 64)
    if by_columns:
        parts = parts.swapaxes(0, 1)
    coarse = [nf4_blocks, int8_blocks][work.base == "8bit"](parts.reshape(-1, 64))
    if by_columns:
        coarse = coarse.reshape(inputs // 64, rows, 64).swapaxes(0, 1)
    return torch.from_numpy(coarse.reshape(rows, inputs).copy())


def nf4_blocks(blocks: np.ndarray) -> np.ndarray:
    """Blocks of 64 values with a scale each, of 8 bits in the unit of the largest of 256."""
    values, made = nf4(), []
    for first in range(0, len(blocks), 256):
        group = blocks[first : first + 256]
        unit = np.abs(group).max() / np.float32(255)
        for block in group:
            largest = np.abs(block).max()
            steps = max(np.rint(largest / unit), 1)
            nearest = np.abs(block[:, None] / largest - values).argmin(1)
            made.append(values[nearest] * (unit * np.float32(steps)))
    return np.stack(made).astype(np.float32)


def int8_blocks(blocks: np.ndarray) -> np.ndarray:
    """4,096 values in a row have one scale, and steps of its 127th."""
    made = []
    for first in range(0, len(blocks), 64):
        group = blocks[first : first + 64]
        unit = np.abs(group).max() / np.float32(127)
        made.append(np.rint(group / unit) * unit)
    return np.concatenate(made).astype(np.float32)
