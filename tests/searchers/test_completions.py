"""Bounds of what a partial pipeline can become."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from searchers.joining.candidates import StagePosition
from searchers.joining.completions import Completions


def place(tensor: int) -> Any:
    """A stage of three blocks on two GPUs, which are split in one way or another."""
    mesh: Any = ("tensor parallel", tensor)
    return StagePosition(mesh, 0, 3, 1, is_first=True, is_last=True)


def options(seconds: float) -> Any:
    names = ("through_forward_s", "within_forward_s", "through_backward_s", "within_backward_s")
    times = SimpleNamespace(**dict.fromkeys(names, np.array([seconds])))
    return SimpleNamespace(times=times, stable_s=np.array([seconds]))


def test_of_places_with_equally_many_blocks_the_fastest_counts_whichever_comes_last() -> None:
    for order in ([1, 2], [2, 1]):
        places = [place(tensor) for tensor in order]
        menus: Any = {one: options(5.0 * one.mesh[1]) for one in places}
        found = Completions.of(menus, [places], micro_batches=4, layers=3)
        assert found.slowest_s[0, 3] == 5.0
        assert found.through_s[0, 3] == 20.0
