"""The numbers that stand for a graph's symbols, given a workload and columns of candidates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.values.stages import Column
from mistlab.values.workload import Workload


def constants_of(workload: Workload) -> Mapping[str, int]:
    """The sizes of a workload that are the same for every candidate."""
    model = workload.model
    return {
        "s": workload.sequence_length,
        "h": model.hidden,
        "n": model.heads,
        "k": model.kv_heads,
        "d": model.head_dim,
        "r": model.rotated_channels,
        "f": model.ffn,
    }


def size_columns(
    workload: Workload, micro_batch: Column, tensor_parallel: Column
) -> dict[str, NDArray[Any]]:
    """All sizes as columns, for columns of micro-batches and tensor-parallel degrees."""
    rows = len(micro_batch)
    vocab = [workload.model.padded_vocab(int(degree)) for degree in tensor_parallel]
    return {
        **{name: np.full(rows, float(size)) for name, size in constants_of(workload).items()},
        "b": micro_batch,
        "tp": tensor_parallel,
        "V": np.array(vocab),
    }
