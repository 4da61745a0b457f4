"""How sure times are: bounds that follow from errors of runs and of whole widths left out."""

from pathlib import Path

import numpy as np
import pytest

from experiments.calibration.published import PublishedRun, read_megatron
from experiments.calibration.whole_runs import FittedRuns, widths_left_out, with_engines
from mistlab import catalog
from mistlab.calibration.fitted_sureness import WIDTH_OF_MEAN, half_width_of
from mistlab.core.arrays import Floats

COLUMNS = (
    "gpus,global_batch,micro_batch,hidden,heads,layers,sequence_length,"
    "tensor_parallel,data_parallel,pipeline_parallel,iteration_ms"
)
WIDTHS = (1024, 2048, 4096)
RUNS_OF_WIDTH = 60


@pytest.fixture
def runs(tmp_path: Path) -> tuple[PublishedRun, ...]:
    """Equally many runs of each width, on four GPUs."""
    row = "4,{batch},1,{hidden},16,4,1024,1,4,1,1.0"
    lines = [
        row.format(hidden=hidden, batch=4 * (1 + number))
        for hidden in WIDTHS
        for number in range(RUNS_OF_WIDTH)
    ]
    path = tmp_path / "megatron.csv"
    path.write_text("\n".join([COLUMNS, *lines]) + "\n", encoding="utf-8")
    return read_megatron(path, catalog.hardware("a100-80gb")).runs


def found(runs: tuple[PublishedRun, ...], near: Floats, far: Floats) -> FittedRuns:
    """What runs showed: errors beside others at their place, and with their width left out."""
    return with_engines(
        FittedRuns(
            hardware=catalog.hardware("a100-80gb"), runs=runs, left_out=near, width_left_out=far
        )
    )


def test_many_errors_have_their_own_quantile_and_few_that_of_a_normal_distribution() -> None:
    # Of predictions, not of measurements: half as long as measured is 100 % off.
    assert half_width_of(np.full(40, -0.5)) == 1.0
    many = np.linspace(0, 0.2, 101)
    assert half_width_of(many) == pytest.approx(1 - 1 / 1.18, abs=1e-3)
    few = np.array([1 / 1.01 - 1, 1 / 0.97 - 1])
    assert half_width_of(few) == pytest.approx(WIDTH_OF_MEAN * 0.02, abs=1e-4)


def test_bounds_of_unmeasured_widths_are_those_of_the_width_predicted_worst(
    runs: tuple[PublishedRun, ...],
) -> None:
    draw = np.random.default_rng(0)
    near = 0.02 * draw.standard_normal(len(runs))
    worse = np.repeat([1.0, 2.0, 4.0], RUNS_OF_WIDTH)
    fitted = found(runs, near, worse * near)
    assert fitted.hardware.engines is not None
    (megatron,) = (one for one in fitted.hardware.engines if one.engine == "megatron")
    assert megatron.half_width == half_width_of(near)
    assert megatron.far_half_width == half_width_of(4 * near[-RUNS_OF_WIDTH:])
    assert megatron.reach == 1.0
    assert [place.hidden for place in megatron.at] == [*WIDTHS]


def test_each_width_is_judged_by_bounds_of_the_others(runs: tuple[PublishedRun, ...]) -> None:
    draw = np.random.default_rng(0)
    errors = 0.05 * draw.standard_normal(len(runs))
    honest = dict(_inside(found(runs, errors, errors)))
    assert [*honest] == [*WIDTHS]
    assert all(0.85 <= share <= 0.97 for share in honest.values())
    # A width that goes wrong by itself lies outside of what the others promise.
    astray = np.where(np.repeat(WIDTHS, RUNS_OF_WIDTH) == 2048, 5 * errors, errors)
    shares = dict(_inside(found(runs, errors, astray)))
    assert shares[2048] < 0.5
    assert shares[1024] > 0.99


def _inside(fitted: FittedRuns) -> list[tuple[int, float]]:
    return [(width.hidden, inside) for width, inside in widths_left_out(fitted, "megatron")]
