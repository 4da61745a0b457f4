"""Numbers for the symbols of a layer graph, from a workload and columns of candidates."""

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


def size_columns(workload: Workload, sizes: Mapping[str, Column]) -> dict[str, NDArray[Any]]:
    """All sizes as columns; ``sizes`` has the candidates' own columns, such as b and tp.

    Of each sequence a rank has its part: all tokens if there is one context-parallel rank (cp).
    """
    rows = len(sizes["tp"])
    vocab = [workload.model.padded_vocab(int(degree)) for degree in sizes["tp"]]
    ranks = sizes.get("cp", np.ones(rows))
    return {
        **{name: np.full(rows, float(size)) for name, size in constants_of(workload).items()},
        **sizes,
        "s": workload.sequence_length / ranks,
        "cp": ranks,
        "V": np.array(vocab),
    }
