"""The command ``tempo``: the largest batch that fits, and gains over the better baseline."""

import pytest

from experiments.studies.tempo import (
    AGAIN,
    CASE,
    LEAN,
    PLAIN,
    OneGpu,
    beside_published,
    gains,
    largest,
)

ONE = dict(zip(CASE, ("bert-large", "a100-40gb", 512, "math", None, 1), strict=True))


def test_the_largest_batch_is_the_last_that_fits() -> None:
    case = OneGpu(model="bert-large", hardware="a100-40gb", length=512)
    for values in ({}, {"lean_layers": 24}, {"checkpointed_layers": 24}):
        batch, step = largest(case, values)
        assert step is not None
        assert step.fits
        assert step == case.predicted(batch, values)
        assert not case.predicted(batch + 1, values).fits


def test_a_gpu_without_room_for_one_sequence_has_none() -> None:
    case = OneGpu(model="bert-large", hardware="a100-40gb", length=512, memory_gib=4.0)
    assert largest(case, {}) == (0, None)


def row(way: str, batch: int, rate: float) -> dict[str, object]:
    return {"chapter": "ways", **ONE, "way": way, "batch": batch, "rate": rate}


def test_a_gain_is_over_the_better_of_plain_and_recomputed() -> None:
    (found,) = gains([row(PLAIN, 10, 50.0), row(AGAIN, 40, 60.0), row(LEAN, 15, 66.0)])
    assert found["gain"] == pytest.approx(0.1)
    assert found["over_plain"] == pytest.approx(0.32)
    assert found["batch_ratio"] == 1.5
    (near,) = beside_published([row(PLAIN, 10, 50.0), row(AGAIN, 9, 1.0), row(LEAN, 15, 60.0)])
    assert near["points"] == pytest.approx(20 - 16)


def test_nothing_is_compared_with_a_baseline_that_does_not_run() -> None:
    assert gains([row(PLAIN, 0, 0.0), row(AGAIN, 0, 0.0), row(LEAN, 1, 5.0)]) == []


def test_ranks_add_up_gradients_once_a_step() -> None:
    """So a larger batch of each rank pays: its computation covers the sum of gradients."""
    case = OneGpu(model="bert-large", hardware="v100-16gb", length=512, gpus=4)
    few, many = (case.predicted(batch, {}) for batch in (1, 8))
    exposed_s = [step.stages[0].exposed_communication_s for step in (few, many)]
    assert exposed_s[0] > exposed_s[1]
    assert exposed_s[0] > 0.1 * few.iteration_s
    assert many.iteration_s < 4 * few.iteration_s
