"""Predictions held against measured runs: errors, orders, failures, repeats; and profiles."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.runs.configuration import configuration_of
from experiments.runs.dialects.dialect import row_of
from experiments.runs.judged import Judged, errors_of, judged, ranked, separation, spreads
from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import RunAnswer, answered
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.calibration.run_constants import ConstantSetting, fitted, values_of, with_values
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.confidence import bounds_of
from mistlab.cost.memory import room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.engines.nanotron import NANOTRON
from mistlab.job.job import dump_job, load_job
from mistlab.job.prediction import MemoryByClass, MemoryByPhase, Prediction, StagePrediction
from mistlab.machine.cluster import Cluster, Profile
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_runs import run

BYTES = {"weights": 1, "gradients": 1, "optimizer": 1, "activations": 1, "buffers": 0, "logits": 0}
H100 = catalog.hardware("h100-80gb")


def prediction(seconds: float, *, fits: bool = True, gib: float = 10.0) -> Prediction:
    stage = StagePrediction(
        stable_s=1.0,
        delta_forward_s=0.0,
        delta_backward_s=0.0,
        step_s=0.0,
        exposed_communication_s=0.0,
        peak_allocated_bytes=round(gib * GIB_BYTES),
        peak_reserved_bytes=round(gib * GIB_BYTES),
        host_bytes=0,
        memory=MemoryByClass(**BYTES, temporaries=0),
        memory_by_phase=MemoryByPhase(forward=1, backward=1, step=1),
    )
    return Prediction(
        iteration_s=seconds,
        iteration_s_low=0.9 * seconds,
        iteration_s_high=1.1 * seconds,
        tokens_per_s=1.0,
        mfu=0.5,
        fits=fits,
        predictor="symbolic",
        stages=(stage,),
    )


@pytest.mark.parametrize(
    ("memory_kind", "gib"),
    [
        ("torch peak, rank 0 (first stage)", 10.0),
        ("peak of Rank 0", 10.0),
        ("allocated on the last stage", 20.0),
        ("torch peak", 30.0),
        ("nvidia-smi, rounded", 15.0),
        ("", 30.0),
    ],
)
def test_a_measured_peak_is_held_against_the_stage_that_it_names(
    memory_kind: str, gib: float
) -> None:
    parts = [prediction(1.0, gib=part).stages[0] for part in (10.0, 15.0, 30.0, 20.0)]
    pipeline = replace(prediction(1.0), stages=tuple(parts))
    answer = RunAnswer(prediction=pipeline, stages_of_node=2)
    place = answer.place_of(row_of({"memory_kind": memory_kind}).peak_of)
    assert parts[place].peak_allocated_bytes == gib * GIB_BYTES


def judged_row(
    predicted_s: float | None, measured_s: float | None, *, fits: bool = True, **cells: str
) -> Judged:
    answer = RunAnswer(refused="line 2: no")
    if predicted_s is not None:
        answer = RunAnswer(prediction=prediction(predicted_s, fits=fits))
    row = TableRow(file="runs.csv", number=1, line=2, cells={"model": "m", "gpus": "8", **cells})
    return Judged(row=row, answer=answer, measured_s=measured_s, measured_gib=20.0)


def test_errors_are_raw_and_bounds_are_counted() -> None:
    rows = [judged_row(1.05, 1.0), judged_row(2.0, 1.0), judged_row(None, 1.0), judged_row(1, None)]
    found = errors_of("all", rows)
    assert (found.rows, found.refused, found.times) == (4, 1, 2)
    assert found.mean_time == pytest.approx((0.05 + 1.0) / 2)
    assert found.inside == 0.5
    assert found.mean_memory == pytest.approx(0.5)


def test_orders_of_runs_are_compared_within_a_model_on_equal_gpus() -> None:
    alike = [judged_row(s, s * s) for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    turned = [judged_row(6 - s, s, gpus="16") for s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    few = [judged_row(1.0, 1.0, gpus="32")] * 4
    first, second = ranked([*turned, *alike, *few])
    assert (second.name, second.correlation, second.regret) == ("m on 8 GPUs", 1.0, 1.0)
    assert (first.name, first.correlation, first.regret) == ("m on 16 GPUs", -1.0, 5.0)


@pytest.mark.parametrize("column", ["global_batch", "kv_heads", "sequence_length", "hardware"])
def test_a_run_of_another_task_is_no_choice(column: str) -> None:
    runs = [judged_row(s, s, **{column: "64"}) for s in (2.0, 3.0, 4.0, 5.0, 6.0)]
    shorter = judged_row(7.0, 1.0, **{column: "8"})
    (found,) = ranked([*runs, shorter])
    assert (found.runs, found.correlation, found.regret) == (5, 1.0, 1.0)


def test_orders_by_upper_bounds_may_differ() -> None:
    def row(predicted_s: float, longest_s: float, measured_s: float) -> Judged:
        found = judged_row(predicted_s, measured_s)
        assert found.answer.prediction is not None
        late = replace(found.answer.prediction, iteration_s_high=longest_s)
        return replace(found, answer=RunAnswer(prediction=late))

    runs = [row(s, s + 1, s) for s in (2.0, 3.0, 4.0, 5.0)] + [row(1.0, 9.0, 6.0)]
    (by_time,), (by_bound,) = ranked(runs), ranked(runs, by=lambda one: one.longest_s)
    assert by_time.regret == 3.0
    assert (by_bound.regret, by_bound.correlation) == (1.0, 1.0)


def test_runs_near_the_best_are_those_predicted_about_as_fast() -> None:
    times = [(1.0, 2.0), (1.04, 1.0), (1.06, 7.0), (2.0, 8.0), (3.0, 9.0)]
    (found,) = ranked([judged_row(*pair) for pair in times], near=0.05)
    assert found.near == (2.0, 1.0)
    assert found.regret == 2.0


def test_failed_runs_should_not_fit_and_a_refusal_is_wrong() -> None:
    rows = [
        judged_row(1.0, 1.0),
        judged_row(1.0, 1.0, fits=False),
        judged_row(1.0, None, fits=False, status="failed or out of memory"),
        judged_row(None, None, status="failed"),
    ]
    found = separation(rows)
    assert (found.ran, found.ran_right, found.failed, found.failed_right) == (2, 1, 2, 1)
    assert found.share == 0.5


def test_repeated_configurations_show_the_noise() -> None:
    rows = [judged_row(1.0, s) for s in (0.9, 1.0, 1.1)] + [judged_row(1.0, 7.0, gpus="16")]
    assert spreads(rows) == pytest.approx([0.2 / 3])


ROW = {
    "engine": "nanotron",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "vocab": "131072",
    "sequence_length": "4096",
    "micro_batch": "1",
    "global_batch": "64",
    "gpus": "16",
    "tp": "4",
    "pp": "2",
}


def row(**changes: str) -> TableRow:
    return TableRow(file="runs.csv", number=1, line=2, cells={**ROW, **changes})


def test_a_gpu_that_is_nearly_full_makes_a_run_slow_and_says_so() -> None:
    found = job_of(configuration_of(row()))
    free, full = answered(prediction(1.0), found), answered(prediction(1.0, gib=75), found)
    assert free.prediction is not None
    assert full.prediction is not None
    assert full.prediction.iteration_s == free.prediction.iteration_s * NANOTRON.crowded_factor
    assert any(note.startswith("memory is nearly full (75.0 of 79.1 GiB)") for note in full.notes)
    assert not any("nearly full" in note for note in free.notes)


@pytest.mark.parametrize(
    ("longest_s", "engine", "is_said"),
    [(3.0, "nanotron", True), (1.05, "nanotron", False), (3.0, "Megatron-LM", False)],
)
def test_a_run_that_is_longer_on_the_slowest_cluster_says_so(
    longest_s: float, engine: str, is_said: bool
) -> None:
    run = job_of(configuration_of(row(engine=engine)))
    bounds = bounds_of(run.job.workload, run.job.cluster, run.job.plan.engine)
    below, above = bounds.around(run.job.plan.num_gpus, prediction(1.0).mfu)
    found = replace(prediction(1.0), iteration_s_low=below, iteration_s_high=longest_s * above)
    notes = answered(found, run).notes
    said = "on the slowest cluster known it takes 3 s (--profile ultrascale)"
    assert (said in notes) == is_said
    assert is_said or not any("slowest" in note for note in notes)


@pytest.mark.parametrize(("gib", "reserved"), [(60, 70), (60, 90), (85, 90)])
def test_cached_memory_leaves_a_full_gpu_and_the_run_may_still_fail(
    gib: float, reserved: float
) -> None:
    found = prediction(1.0, gib=gib)
    stage = replace(found.stages[0], peak_reserved_bytes=int(reserved * GIB_BYTES))
    found = replace(found, fits=reserved < 79, stages=(stage,) * len(found.stages))
    run = job_of(configuration_of(row(recompute="none")))
    answer = answered(found, run)
    assert answer.prediction is not None
    room = room_of_plan(run.job.cluster, run.job.plan)[0]
    held = answer.prediction.stages[0].peak_reserved_bytes
    # Tensors that do not fit are no run of which anything is given back.
    capped = min(reserved * GIB_BYTES, int(room))
    assert held == (capped if gib * GIB_BYTES <= room else reserved * GIB_BYTES)
    # What is said of fitting counts all of it.
    assert answer.prediction.fits == found.fits
    assert answer.peak is not None
    assert (answer.peak.fit_probability > 0.5) == found.fits


def test_what_a_row_does_not_say_of_recomputation_fills_a_gpu_at_most() -> None:
    full = replace(prediction(1.0, gib=120), fits=False)
    unsaid = answered(full, job_of(configuration_of(row()))).prediction
    said = answered(full, job_of(configuration_of(row(recompute="none")))).prediction
    assert unsaid is not None
    assert said is not None
    assert unsaid.fits
    assert not said.fits
    assert unsaid.stages[0].peak_allocated_bytes < 80 * GIB_BYTES
    assert said.stages[0].peak_allocated_bytes == 120 * GIB_BYTES


def test_a_stage_beyond_head_cast_and_loss_keeps_nanotron_from_starting() -> None:
    runs = [configuration_of(row(pp=pp, gpus=str(4 * int(pp)))) for pp in ("8", "16")]
    starts, stops = (answered(prediction(1.0), job_of(run)).prediction for run in runs)
    assert starts is not None
    assert stops is not None
    assert (starts.fits, stops.fits) == (True, False)


def test_a_profile_is_asked_for_by_name_and_is_no_part_of_hardware() -> None:
    profile = catalog.profile("ultrascale")
    run = configuration_of(row())
    assert job_of(run).job.cluster.profile is None
    assert job_of(run, profile).job.cluster.profile == profile
    with pytest.raises(InputError, match="did you mean 'ultrascale'"):
        catalog.profile("ultrascal")


def test_a_plan_file_may_name_a_profile(tmp_path: Path) -> None:
    job = job_of(configuration_of(row()), catalog.profile("ultrascale")).job
    path = tmp_path / "plan.yaml"
    dump_job(job, path)
    assert "profile: ultrascale" in path.read_text()
    assert load_job(path) == job


def test_a_profile_slows_wide_groups_of_pipelines_alone() -> None:
    profile = Profile(name="x", block_ranks=4, block_ms=2.0, block_power=1.0, source="made up")
    ranks = np.array([1, 2, 4, 8])
    slow = profile.block_s(ranks, in_pipeline=np.array([True, True, True, True]))
    assert slow.tolist() == [0.0, 0.0, 8e-3, 16e-3]
    assert not profile.block_s(ranks, in_pipeline=np.zeros(4, dtype=bool)).any()


def test_a_profile_makes_sends_late_on_many_gpus_and_between_wide_groups() -> None:
    profile = Profile(name="x", send_gpus=512, send_ranks=32, send_ms=100.0, source="made up")
    ranks = np.array([1, 16, 32])
    assert profile.send_s(ranks, 64).tolist() == [0.0, 0.0, 0.1]
    assert profile.send_s(ranks, 512).tolist() == [0.1, 0.1, 0.1]


def test_a_profile_makes_sends_late_beside_whole_gradients_on_many_ranks_or_gpus() -> None:
    profile = Profile(
        name="x", whole_micro_batches=16, whole_ranks=4, whole_gpus=64, source="made up"
    )
    ranks, micro_batches = np.array([1, 2, 4, 8, 8]), np.array([64, 64, 16, 16, 15])
    found = profile.is_beside_whole(ranks, micro_batches, 32)
    assert found.tolist() == [False, False, True, True, False]
    found = profile.is_beside_whole(ranks, micro_batches, 64)
    assert found.tolist() == [False, True, True, True, False]


def test_a_profile_s_constants_can_be_fitted() -> None:
    setting = ConstantSetting(hardware=H100, engine=NANOTRON)
    assert "send_ms" not in values_of(setting)
    setting = replace(setting, profile=catalog.profile("ultrascale"))
    changed = with_values(setting, {"send_ms": 7.0})
    assert changed.profile is not None
    assert (changed.profile.send_ms, changed.hardware) == (7.0, H100)


def test_constants_are_read_and_written() -> None:
    setting = ConstantSetting(hardware=H100, engine=NANOTRON)
    values = values_of(setting)
    changed = with_values(setting, {"sustained": 0.5, "host_ms": 9.0, "node_gbytes_per_s": 100.0})
    assert changed.hardware.compute is not None
    assert changed.hardware.compute.sustained == 0.5
    again = values_of(changed)
    assert again["host_ms"] == pytest.approx(9.0)
    assert again["node_gbytes_per_s"] == pytest.approx(100.0, rel=1e-4)
    assert again["two_latency_us"] == pytest.approx(values["two_latency_us"])


def test_constants_of_experts_and_of_8_bits_can_be_fitted() -> None:
    setting = ConstantSetting(hardware=H100, engine=ENGINES["megatron-bridge-alltoall"])
    assert values_of(setting)["expert_us"] == pytest.approx(14)
    changed = with_values(setting, {"eight_bit_share": 0.9, "expert_us": 20, "exchange_ms": 1})
    assert changed.engine.eight_bit_on[H100.name] == 0.9
    assert changed.engine.expert_exchange.expert_s == pytest.approx(20e-6)
    assert changed.engine.expert_exchange.wait_s == pytest.approx(1e-3)
    assert "expert_us" not in values_of(ConstantSetting(hardware=H100, engine=NANOTRON))


def test_a_fit_sees_runs_with_their_own_order_and_overlap() -> None:
    found = job_of(run(engine="megatron-core", pp="2", dp="4", vpp="2", layers="32"))
    job = found.job
    assert job.plan.order == "interleaved-2"
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    plans = [job.plan, replace(job.plan, overlap_communication=False)]
    expected = [one.iteration_s for one in predictor.predict_many(plans)]
    assert predictor.iterations_of(plans, ENGINES["megatron-core"]) == expected


def test_a_fit_finds_the_constants_behind_times() -> None:
    setting = ConstantSetting(hardware=H100, engine=NANOTRON)

    def seconds(tried: ConstantSetting) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        assert tried.hardware.compute is not None
        return np.array([1.0, 2.0, 3.0]) / tried.hardware.compute.sustained

    measured = np.array([1.0, 2.0, 30.0]) / 0.6  # the last run is one of the slow ones
    found = fitted(setting, ["sustained"], seconds, measured, evaluations=20)
    assert found["sustained"] == pytest.approx(0.6, rel=0.1)


def test_a_cluster_without_a_profile_is_as_before() -> None:
    cluster = Cluster(hardware=H100, nodes=2, gpus_per_node=8)
    assert cluster.profile is None
    assert replace(cluster, profile=catalog.profile("ultrascale")) != cluster


@pytest.mark.parametrize(
    "changes",
    [{}, {"zero": "1"}, {"notes": ""}, {"gpus": "8"}, {"pp": "1"}, {"global_batch": "2"}],
)
def test_stages_that_share_a_table_without_zero_fail_in_nanotron(changes: dict[str, str]) -> None:
    cells = {"zero": "0", "notes": "tied embeddings", "recompute": "none", **changes}
    found = answered(prediction(1.0), job_of(configuration_of(row(**cells))))
    assert found.prediction is not None
    assert found.prediction.fits == bool(changes)
    assert any("share a table" in note for note in found.notes) == (not changes)


def test_a_peak_that_is_rounded_up_is_held_in_the_middle_of_what_it_may_be() -> None:
    def gib(kind: str) -> float | None:
        cells = {"memory_gib": "26", "memory_kind": kind}
        row = TableRow(file="runs.csv", number=1, line=2, cells=cells)
        return judged(row, RunAnswer(refused="line 2: no")).measured_gib

    assert (gib("nvidia-smi"), gib("nvidia-smi, rounded")) == (26.0, 26.0)
    assert gib("nvidia-smi, rounded up") == 25.5
