"""The command ``tempo``: the largest batch that fits, and gains over the better baseline."""

from dataclasses import replace

import pytest

from experiments.studies.tempo import (
    AGAIN,
    CASE,
    LEAN,
    PLAIN,
    OneGpu,
    _of_way,
    _shares,
    beside_published,
    gains,
    largest,
)
from mistlab import catalog

# As Tempo's authors launched it, on this GPU.
LAUNCHED = OneGpu.launched("bert-large", "a100-40gb", 512)
V100 = OneGpu.launched("bert-large", "v100-16gb", 512, gpus=4)
ONE = {name: getattr(LAUNCHED, name) for name in CASE}


def test_the_launch_script_s_conditions_are_the_default() -> None:
    """32 bits, all GPUs of the node, whole models, gradients reduced after the backward pass."""
    assert (LAUNCHED.precision, LAUNCHED.gpus, LAUNCHED.engine) == ("fp32", 8, "ddp")
    for case in (LAUNCHED, V100):
        alone = replace(case, gpus=1).predicted(4, {})
        step = case.predicted(4, {})
        # A ring sends and receives twice the share of the others' gradients.
        link = catalog.hardware(case.hardware).node.intra_node_bytes_per_s
        moved = 2 * step.stages[0].memory.gradients * (case.gpus - 1) / case.gpus
        assert step.iteration_s - alone.iteration_s > moved / link
        held = [one.stages[0].memory for one in (alone, step)]
        assert held[0].weights + held[0].gradients == held[1].weights + held[1].gradients


def test_the_largest_batch_is_the_last_that_fits() -> None:
    case = LAUNCHED
    for values in ({}, {"lean_layers": 24}, {"checkpointed_layers": 24}):
        batch, step = largest(case, values)
        assert step is not None
        assert step.fits
        assert step == case.predicted(batch, values)
        assert not case.predicted(batch + 1, values).fits


def test_a_gpu_without_room_for_one_sequence_has_none() -> None:
    case = replace(LAUNCHED, memory_gib=4.0)
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


@pytest.mark.parametrize("case", [LAUNCHED, V100], ids=["a100", "v100"])
def test_a_larger_batch_saves_no_more_than_what_does_not_grow_with_it(case: OneGpu) -> None:
    """So a small share of a step bounds the gain of any batch; it is larger on smaller GPUs."""
    row = _shares(case)
    assert 0 < row["by_batch"] < row["most"]
    assert row["most"] == pytest.approx(1 / (1 - row["fixed"]) - 1)
    rate = {b: b / case.predicted(b, {}).iteration_s for b in (largest(case, {})[0], 1 << 12)}
    few, many = rate.values()
    assert many / few - 1 == pytest.approx(row["most"], rel=0.02)
    lean = _of_way(case, LEAN)["rate"] / _of_way(case, PLAIN)["rate"]
    assert (1 + row["by_batch"]) * (1 + row["by_operators"]) == pytest.approx(lean)


def test_less_of_a_step_is_fixed_on_a_larger_gpu() -> None:
    assert _shares(LAUNCHED)["fixed"] < 0.5 * _shares(V100)["fixed"]
