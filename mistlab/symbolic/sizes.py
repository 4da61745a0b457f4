"""Numbers for the symbols of a layer graph, from a workload and columns of candidates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.values.dimensions import DIMENSIONS
from mistlab.values.stages import Column
from mistlab.values.workload import Workload


def constants_of(workload: Workload) -> Mapping[str, float]:
    """The sizes of a workload that are the same for every candidate."""
    model = workload.model
    return {
        **_sizes_of_parts(workload),
        "s": workload.sequence_length,
        "h": model.hidden,
        "n": model.heads,
        "k": model.kv_heads,
        "d": model.head_dim,
        "r": model.rotated_channels,
        "f": model.ffn,
    }


def _sizes_of_parts(workload: Workload) -> Mapping[str, float]:
    """The sizes of parts of the model; 1 for those of parts that it does not have."""
    model = workload.model
    window, latent, experts, scan = model.window, model.latent, model.experts, model.state_space
    sizes = dict.fromkeys("wumvEaAjylqpge", 1.0)
    if window is not None:
        sizes["w"] = min(window.size, workload.sequence_length)
    if latent is not None:
        sizes |= {"u": latent.query_rank or 1, "m": latent.key_rank, "v": latent.value_dim}
    if experts is not None:
        mean, busiest = workload.expert_load
        sizes |= {"a": experts.active * mean, "A": experts.active * busiest}
        sizes |= {"E": experts.count, "j": experts.ffn, "y": experts.shared_ffn or 1}
        sizes |= {"l": experts.hidden or 1}
    if scan is not None:
        sizes |= {"q": scan.heads, "p": scan.channels, "g": scan.groups, "e": scan.states}
    return sizes


def size_columns(workload: Workload, sizes: Mapping[str, Column]) -> dict[str, NDArray[Any]]:
    """All sizes as columns; ``sizes`` has the candidates' own columns, such as b and tp.

    Omitted ones have the default of their dimension. Of each sequence a rank has its part: all
    tokens if there is one context-parallel rank (cp).
    """
    rows = len(sizes["tp"])
    omitted = {
        row.symbol: np.full(rows, row.default)
        for row in DIMENSIONS.values()
        if row.is_size and row.default is not None
    }
    vocab = [workload.model.padded_vocab(int(degree)) for degree in sizes["tp"]]
    ranks = sizes.get("cp", np.ones(rows))
    return {
        **{name: np.full(rows, float(size)) for name, size in constants_of(workload).items()},
        **omitted,
        **sizes,
        "s": workload.sequence_length / ranks,
        "cp": ranks,
        "V": np.array(vocab),
    }
