"""Streaming outer steps as torchft does them: six histories of two scalar layers, to the digit, by
the runtime's averages and by the simulator's bookkeeping; and ranks that leave and come back."""

from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab.reduction.outer_steps import OuterRun, OuterSteps  # noqa: E402
from mistlab.reduction.reduction_costs import Reduction  # noqa: E402
from runtime.engine.work.weight_averages import WeightAverages  # noqa: E402
from tests.runtime.thread_ranks import Meeting, ThreadGroup, run_threads  # noqa: E402

CASES = [*product((0, 1), (0.0, 0.5, 1.0))]
EVERY, FRAGMENTS, REPLICAS = 6, 2, 2
# Five outer steps, as long as the published histories are.
STEPS = 15
GRADIENT, INNER_RATE, OUTER_RATE = 2.0, 1.0, 2.0
Histories = tuple[list[list[float]], list[list[float]]]


@dataclass
class TorchftFragment:
    """A fragment of one number, by the order of calls of torchft's fragments."""

    local: float = 1.0
    original: float = 1.0
    pseudo_gradient: float = field(default=0.0, init=False)

    def prepare_sync(self) -> None:
        # All replicas are equal, so that the mean is each one's.
        self.pseudo_gradient = self.original - self.local

    def perform_sync(self, alpha: float) -> None:
        kept, self.local = self.local, self.original
        self.local -= OUTER_RATE * self.pseudo_gradient
        self.original = self.local
        self.local += alpha * (kept - self.local)


def torchft_history(delay: int, alpha: float) -> Histories:
    """The weights after each inner step, and the original parameters, fragment by fragment."""
    fragments = [TorchftFragment() for _ in range(FRAGMENTS)]
    of_sync, local_step, committed = EVERY // FRAGMENTS, 0, 2
    weights, shared = [], []
    for _ in range(STEPS):
        for one in fragments:
            one.local -= INNER_RATE * GRADIENT
        local_step += 1
        turn = fragments[committed % FRAGMENTS]
        if local_step == of_sync - delay:
            turn.prepare_sync()
        if local_step == of_sync:
            turn.perform_sync(alpha)
            local_step, committed = 0, committed + 1
        weights.append([one.local for one in fragments])
        shared.append([one.original for one in fragments])
    return weights, shared


def averages_of(how: Reduction, peers: Any) -> tuple[list[Any], WeightAverages]:
    """The weights of two layers of one number, and their averages with a group."""
    layers = [torch.ones(1) for _ in range(FRAGMENTS)]
    states = {
        number: SimpleNamespace(optimizer=[SimpleNamespace(resident=weights)])
        for number, weights in enumerate(layers)
    }
    sections: Any = [SimpleNamespace(layers=states)]
    averages = WeightAverages(how=how, peers=peers, sections=sections)
    averages.begin()
    return layers, averages


def run_history(how: Reduction) -> Histories:
    def rank_of(rank: int, meeting: Meeting) -> Histories:
        peers = ThreadGroup(meeting, "peers", range(REPLICAS), rank)
        layers, averages = averages_of(how, peers)
        weights, shared = [], []
        for step in range(1, STEPS + 1):
            for one in layers:
                one.sub_(INNER_RATE * GRADIENT)
            if averages.is_due(step):
                averages.average(step)
            weights.append([one.item() for one in layers])
            shared.append([state.shared.item() for state in averages.outer.values()])
        return weights, shared

    first, second = run_threads(REPLICAS, rank_of)
    assert first == second
    return first


@pytest.mark.parametrize(("delay", "alpha"), CASES)
def test_the_runtime_and_the_simulator_have_torchfts_histories(delay: int, alpha: float) -> None:
    expected = torchft_history(delay, alpha)
    how = Reduction(
        kind="outer",
        every=EVERY,
        fragments=FRAGMENTS,
        delay=delay,
        mixed=alpha,
        rate=OUTER_RATE,
        momentum=0.0,
    )
    assert run_history(how) == expected
    steps = OuterSteps(
        every=EVERY, fragments=FRAGMENTS, delay=delay, mixed=alpha, rate=OUTER_RATE, momentum=0.0
    )
    played, found = OuterRun(steps, np.ones((REPLICAS, FRAGMENTS))), ([], [])
    for _ in range(STEPS):
        played.advance(lambda weights, _: np.full_like(weights, -INNER_RATE * GRADIENT))
        assert (played.weights[0] == played.weights[1]).all()
        found[0].append(played.weights[0].tolist())
        found[1].append(played.shared.tolist())
    assert found == expected


def test_the_first_case_has_the_published_numbers() -> None:
    weights, shared = torchft_history(0, 0.0)
    assert (weights[2], weights[5]) == ([-11, -5], [-17, -23])
    assert {step: shared[step - 1] for step in (3, 6, 9, 12)} == {
        3: [-11, 1],
        6: [-11, -23],
        9: [-35, -23],
        12: [-35, -47],
    }


AWAY = range(5, 9)


def gradient(rank: int, step: int) -> float:
    return 0.1 * (1 + rank) * step


def left_and_back(how: Reduction) -> list[list[float]]:
    """The weights of three ranks, the last of which is away for four steps."""

    def rank_of(rank: int, meeting: Meeting) -> list[float]:
        everyone = ThreadGroup(meeting, "everyone", range(3), rank)
        layers, averages = averages_of(how, everyone)
        found: list[float] = []
        for step in range(1, STEPS + 1):
            if step == AWAY.start and rank != 2:
                averages.with_peers(ThreadGroup(meeting, "others", range(2), rank))
            if step == AWAY.stop:
                averages.rejoin(everyone, 2)
            if rank == 2 and step in AWAY:
                # What it has is lost, as after a crash.
                for state in averages.outer.values():
                    state.shared.fill_(77.0)
                    state.momenta.fill_(77.0)
                continue
            for one in layers:
                one.sub_(gradient(rank, step))
            if averages.is_due(step):
                averages.average(step)
            found = [one.item() for one in layers]
        return found

    return run_threads(3, rank_of)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_rank_leaves_and_comes_back_under_outer_steps(delay: int) -> None:
    choices: dict[str, Any] = {
        "every": 4,
        "fragments": 2,
        "delay": delay,
        "rate": 0.5,
        "momentum": 0.9,
    }
    found = left_and_back(Reduction(kind="outer", **choices))
    run_ = OuterRun(OuterSteps(**choices), np.ones((3, FRAGMENTS)))
    for step in range(1, STEPS + 1):
        if step == AWAY.start:
            run_.leave(2)
        if step == AWAY.stop:
            run_.rejoin(2)
        run_.advance(
            lambda weights, number: np.stack(
                [np.full(FRAGMENTS, -gradient(rank, number)) for rank in range(3)]
            )
        )
    np.testing.assert_allclose(found, run_.weights, rtol=1e-5)
