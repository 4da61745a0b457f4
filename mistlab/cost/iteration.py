"""Figures that follow from an iteration's time: its bounds, tokens a second, and MFU."""

from collections.abc import Mapping
from typing import Any

from mistlab.cost.bounds import PredictionBounds
from mistlab.values.workload import Workload


def iteration_figures(
    seconds: float,
    *,
    num_gpus: int,
    flop: float,
    workload: Workload,
    peak_flop_per_s: float,
    bounds: PredictionBounds,
    slowest_s: float = 0.0,
) -> Mapping[str, Any]:
    """The figures of a ``Prediction`` whose iteration takes ``seconds``.

    ``flop`` is the number of operations that all GPUs together do in the iteration,
    ``peak_flop_per_s`` the peak rate of one of them, ``slowest_s`` how long the iteration takes on
    the slowest cluster known.
    """
    mfu = flop / (seconds * num_gpus * peak_flop_per_s)
    below, above = bounds.around(num_gpus, mfu)
    return {
        "iteration_s": seconds,
        "iteration_s_low": seconds * below,
        "iteration_s_high": max(seconds, slowest_s) * above,
        "tokens_per_s": workload.tokens / seconds,
        "mfu": mfu,
    }
