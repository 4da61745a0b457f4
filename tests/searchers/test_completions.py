"""Bounds of what a partial pipeline can become."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mistlab.cost.chains import CHAINS, PASSES, Chains, Counts, Numbers, PassLengths, chained
from searchers.exact.candidates import StagePosition
from searchers.exact.partials import Completions


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


def drawn_stage(draw: np.random.Generator, spread: float) -> PassLengths[float]:
    """A stage of uneven passes. A micro-batch may wait for a small part of a pass alone; the first
    and the last pass may take much longer."""
    lengths = {name: float(draw.uniform(0.0, 0.3) * draw.integers(5)) for name in PASSES}
    for name, usual in (("forward", 1.0), ("backward", 2.0)):
        whole = float(draw.uniform(0.3, 2.0)) * usual
        passed = whole * float(draw.uniform(0.1, 1.0))
        lengths |= {f"{name}_s": whole, f"through_{name}_s": passed}
    slower = float(draw.choice([1.0, 1.0, spread]))
    lengths = {name: slower * seconds for name, seconds in lengths.items()}
    lengths["point_to_point_s"] *= float(draw.choice([0.0, 1.0, 3.0 * spread]))
    # Sends at the ends of an iteration take less than others, but some time.
    for name in ("end_send_late_s", "end_return_late_s"):
        lengths[name] = -0.4 * float(draw.uniform()) * lengths["point_to_point_s"]
    return PassLengths(**lengths)


def menu_of(stage: PassLengths[float]) -> Any:
    """A menu with a stage as its only candidate."""
    times = SimpleNamespace(**{name: np.array([getattr(stage, name)]) for name in PASSES})
    return SimpleNamespace(times=times, stable_s=times.forward_s + times.backward_s)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8, 21])
def test_no_completion_is_faster_than_its_bound(micro_batches: int) -> None:
    draw = np.random.default_rng(micro_batches)
    shares = []
    for number in range(150):
        # In every second pipeline some stages and links are slow by far.
        count, spread = 2 + number % 5, 4.0 if number % 2 else 1.0
        stages = [drawn_stage(draw, spread) for _ in range(count)]
        places = [StagePosition(("of", row), 0, 1, 1, False, False) for row in range(count)]  # type: ignore[arg-type]
        menus: Any = dict(zip(places, map(menu_of, stages), strict=True))
        bounds = Completions.of(menus, [[place] for place in places], micro_batches, count)
        chains, partials = Chains.of_nothing(0.0), []
        for behind, stage in enumerate(stages):
            chains = chained(Numbers(), stage, chains, Counts.of(micro_batches, behind + 1))
            columns = Chains(**{name: np.array([getattr(chains, name)]) for name in CHAINS})
            partials.append(SimpleNamespace(chains=columns, layers=np.array([behind + 1])))
        for behind, partial in enumerate(partials[:-1]):
            least_s = bounds.least_s(partial, behind + 1)[0]  # type: ignore[arg-type]
            assert least_s <= chains.whole * (1 + 1e-12)
            shares.append(least_s / chains.whole)
    # Bounds that say hardly anything leave nothing out.
    assert np.mean(shares) > 0.8
