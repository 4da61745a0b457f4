import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.core.values import FieldError, from_mapping, to_mapping
from mistlab.job.prediction import (
    Environment,
    Measurement,
    MemoryByClass,
    MemoryByPhase,
    Prediction,
    StageMeasurement,
    StagePrediction,
)

BYTES = st.integers(0, 2**50)
SECONDS = st.floats(0, 1e6)
STAGES = st.builds(
    StagePrediction,
    stable_s=SECONDS,
    delta_forward_s=SECONDS,
    delta_backward_s=SECONDS,
    step_s=SECONDS,
    exposed_communication_s=SECONDS,
    peak_allocated_bytes=BYTES,
    peak_reserved_bytes=BYTES,
    host_bytes=BYTES,
    memory=st.builds(MemoryByClass, **{entry.name: BYTES for entry in fields(MemoryByClass)}),
    memory_by_phase=st.builds(MemoryByPhase, forward=BYTES, backward=BYTES, step=BYTES),
)
POSITIVE = st.floats(1e-6, 1e6)
PREDICTIONS = st.tuples(POSITIVE, POSITIVE, POSITIVE).flatmap(
    lambda times: st.builds(
        Prediction,
        iteration_s_low=st.just(min(times)),
        iteration_s=st.just(sorted(times)[1]),
        iteration_s_high=st.just(max(times)),
        tokens_per_s=POSITIVE,
        mfu=st.floats(0, 1),
        fits=st.booleans(),
        predictor=st.text(),
        stages=st.lists(STAGES, max_size=3).map(tuple),
    )
)


@given(prediction=PREDICTIONS)
def test_a_prediction_comes_back_from_json(prediction: Prediction) -> None:
    text = json.dumps(to_mapping(prediction))
    assert from_mapping(Prediction, json.loads(text)) == prediction


def test_json_has_the_names_of_the_design() -> None:
    stage = {
        "stable_s",
        "delta_forward_s",
        "delta_backward_s",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "host_bytes",
        "memory",
    }
    whole = {
        "iteration_s",
        "iteration_s_low",
        "iteration_s_high",
        "tokens_per_s",
        "mfu",
        "fits",
        "predictor",
        "notes",
        "stages",
    }
    assert {entry.name for entry in fields(Prediction)} == whole
    assert stage <= {entry.name for entry in fields(StagePrediction)}


def test_memory_adds_up() -> None:
    sizes = {entry.name: 10**i for i, entry in enumerate(fields(MemoryByClass))}
    assert MemoryByClass(**sizes).total_bytes == 1_111_111


def test_bounds_lie_around_the_prediction() -> None:
    message = (
        r"^iteration_s: 5 is outside its bounds 1 to 3: give iteration_s_low and .* around it$"
    )
    with pytest.raises(FieldError, match=message):
        Prediction(
            iteration_s=5,
            iteration_s_low=1,
            iteration_s_high=3,
            tokens_per_s=1,
            mfu=0.5,
            fits=True,
            predictor="",
            stages=(),
        )


RUN = Measurement(
    iteration_s=2.0,
    iteration_s_low=1.0,
    iteration_s_high=3.0,
    tokens_per_s=10.0,
    mfu=0.5,
    fits=True,
    engine="mistlab",
    stages=(StageMeasurement(stable_s=0.5, peak_allocated_bytes=7),),
    samples_s=(1.0, 2.0, 3.0),
    environment=Environment(device="NVIDIA L4", num_devices=2, torch="2.11"),
)
NOTHING: dict[str, Any] = {
    "iteration_s": None,
    "iteration_s_low": None,
    "iteration_s_high": None,
    "tokens_per_s": None,
    "mfu": None,
    "samples_s": (),
    "fits": False,
}


@pytest.mark.parametrize("run", [RUN, replace(RUN, **NOTHING)], ids=["fits", "out of memory"])
def test_a_measurement_comes_back_from_json(run: Measurement) -> None:
    assert from_mapping(Measurement, json.loads(json.dumps(to_mapping(run)))) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_s": ()}, "samples_s: 0 samples, but fits is true: give at least one sample"),
        ({"fits": False}, "samples_s: 3 samples, but fits is false: give no samples"),
        ({"mfu": None}, "mfu: null, but fits is true: give the measured value"),
        ({**NOTHING, "iteration_s": 2.0}, "iteration_s: 2.0, but fits is false: leave it null"),
    ],
    ids=["no samples", "samples of nothing", "no utilisation", "time of nothing"],
)
def test_a_run_has_times_exactly_if_it_fits(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        replace(RUN, **change)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", [entry.name for entry in fields(StageMeasurement)])
def test_measured_stages_use_the_names_of_predicted_ones(name: str) -> None:
    assert name in {entry.name for entry in fields(StagePrediction)}
