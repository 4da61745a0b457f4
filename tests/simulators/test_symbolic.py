"""The closed form: plans one by one, many at once and as columns; bounds, memory, what fits."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.confidence import (
    SOURCES_OF_WIDER,
    PredictionBounds,
    bounds_of,
    known_sureness,
)
from mistlab.graph.stage_model import StageModel
from mistlab.job.prediction import Prediction, compared
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import EngineCalibration, MeasuredAt, OwnRuns
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch, StageFigures
from simulators import symbolic
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-2.7b", 2048, 64)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(layers=16, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
PLAN = Plan(micro_batches=32, stages=(replace(STAGE, checkpointed_layers=8), STAGE))
ALL_RECOMPUTED = replace(STAGE, layers=32, data_parallel=4, checkpointed_layers=32)


def predictor(cluster: Cluster = CLUSTER, work: Workload = WORK) -> SymbolicPredictor:
    return SymbolicPredictor(workload=work, cluster=cluster)


def plans() -> list[Plan]:
    offload = Offload(optimizer=0.5, activations=0.25)
    whole = Plan(micro_batches=16, stages=(ALL_RECOMPUTED,))
    return [
        PLAN,
        whole,
        replace(
            PLAN, stages=(replace(STAGE, layers=18, offload=offload), replace(STAGE, layers=14))
        ),
        replace(whole, engine="megatron"),
        replace(whole, engine="megatron", overlap_communication=False),
        replace(PLAN, engine="deepspeed"),
    ]


def test_many_plans_are_predicted_as_each_by_itself() -> None:
    together = predictor().predict_many(plans())
    assert together == [predictor().predict(plan) for plan in plans()]
    assert len({prediction.iteration_s for prediction in together}) == len(plans())
    assert predictor().predict_many([]) == []


def test_first_passes_of_stages_with_unlike_layers_do_not_disturb_one_another() -> None:
    """Both are computed layer by layer, one in more layers than the other."""
    fetched = Offload(weights=0.25, gradients=0.25, optimizer=1.0)
    first = replace(STAGE, layers=32, zero=2, checkpointed_layers=9, offload=fetched)
    fetched = Offload(weights=0.25, gradients=0.5, optimizer=0.25)
    second = replace(first, zero=0, checkpointed_layers=20, offload=fetched)
    plans = [Plan(micro_batches=8, stages=(stage,)) for stage in (first, second)]
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=2)
    work = workload_of("llama-7b", 1024, 16, "bf16")
    together = SymbolicPredictor(workload=work, cluster=cluster).predict_many(plans)
    for plan, prediction in zip(plans, together, strict=True):
        # A predictor keeps the costs of stages that it knows.
        alone = SymbolicPredictor(workload=work, cluster=cluster).predict(plan)
        assert prediction.iteration_s == alone.iteration_s


@pytest.mark.parametrize("most", [2, 1 << 14])
def test_a_stage_that_is_known_costs_what_it_does_anew(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where stages are forgotten because too many are known."""
    monkeypatch.setattr(symbolic, "MOST_KNOWN", most)
    first, second = PLAN.stages
    swapped = [replace(PLAN, stages=stages) for stages in ((second, first), (first, first))]
    one = predictor()
    for plan in (*plans(), *swapped, *plans()):
        assert one.predict(plan) == predictor().predict(plan)


def test_a_stage_is_worked_out_once_however_many_plans_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def counted(model: StageModel, batch: StageBatch) -> StageFigures:
        asked.append(len(batch))
        return figures(model, batch)

    figures = StageModel.figures
    monkeypatch.setattr(StageModel, "figures", counted)
    one, third = predictor(), replace(STAGE, checkpointed_layers=3)
    one.predict_many([PLAN] * 10)
    one.predict(PLAN)
    one.predict(replace(PLAN, stages=(PLAN.stages[0], third)))
    # Two stages, and one that is new.
    assert asked == [2, 1]


def test_a_prediction_says_what_its_stages_cost() -> None:
    batch = StageBatch.of_plan(PLAN)
    model = predictor()
    costs, prediction = model.stage_costs(batch), model.predict(PLAN)
    assert [stage.stable_s for stage in prediction.stages] == pytest.approx(costs.seconds.stable_s)
    assert [s.peak_reserved_bytes for s in prediction.stages] == pytest.approx(
        costs.peak_reserved_bytes, abs=1
    )
    assert prediction.fits == costs.fits.all()
    whole = replace(PLAN, stages=(replace(STAGE, offload=Offload(optimizer=0.5)), STAGE))
    host = [stage.host_bytes for stage in model.predict(whole).stages]
    of_rank = model.stage_costs(StageBatch.of_plan(whole)).host_bytes
    assert host == pytest.approx(2 * of_rank)
    assert host[0] > host[1] == 0
    (seconds,) = model.iterations(batch, np.array([PLAN.micro_batches]))
    assert prediction.iteration_s == seconds
    assert prediction.tokens_per_s == pytest.approx(64 * 2048 / seconds)


def test_one_stage_takes_its_micro_batches_and_what_comes_once() -> None:
    (stage,) = predictor().predict(plans()[1]).stages
    extra = max(0.0, stage.delta_forward_s) + max(0.0, stage.delta_backward_s)
    expected = 16 * stage.stable_s + extra
    assert predictor().predict(plans()[1]).iteration_s == pytest.approx(expected)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fewer_micro_batches_than_stages_are_predicted(micro_batches: int) -> None:
    stages = tuple(
        StagePlan(
            layers=8,
            data_parallel=1,
            tensor_parallel=1,
            micro_batch=64 // micro_batches,
            zero=1,
            checkpointed_layers=8,
        )
        for _ in range(4)
    )
    prediction = predictor().predict(Plan(micro_batches=micro_batches, stages=stages))
    stable = sum(stage.stable_s for stage in prediction.stages)
    assert prediction.iteration_s >= stable


def test_stages_of_one_block_are_predicted() -> None:
    stages = tuple(replace(STAGE, layers=layers, data_parallel=1) for layers in (1, 30, 1))
    prediction = predictor().predict(Plan(micro_batches=64, stages=stages))
    first, middle, last = (stage.stable_s for stage in prediction.stages)
    assert 0 < first < middle
    assert 0 < last < middle


def test_classes_of_memory_add_up_to_the_peak() -> None:
    for prediction in predictor().predict_many(plans()):
        for stage in prediction.stages:
            assert stage.memory.total_bytes == stage.peak_allocated_bytes
            phases = stage.memory_by_phase
            highest = max(phases.forward, phases.backward, phases.step)
            assert highest == stage.peak_allocated_bytes < stage.peak_reserved_bytes


@pytest.mark.parametrize("override", ["memory_gib", "host_memory_gib"])
def test_too_little_memory_does_not_fit(override: str) -> None:
    plan = plans()[2]
    assert predictor().predict(plan).fits
    assert not predictor(replace(CLUSTER, **{override: 2.0})).predict(plan).fits


def test_sizes_that_do_not_divide_do_not_fit() -> None:
    batch = StageBatch.of_plan(PLAN).with_columns(tensor_parallel=np.array([1, 3]))
    assert predictor().stage_costs(batch).fits.tolist() == [True, False]


def half_width(bounds: PredictionBounds, gpus: int) -> float:
    below, above = bounds.around(gpus, 0.4)
    assert above - 1 == pytest.approx(1 - below)
    return above - 1


def test_an_unmeasured_engine_has_the_bounds_of_runs_of_its_kind_and_says_so() -> None:
    bare = replace(
        CLUSTER.hardware,
        engines=None,
        provenance=replace(CLUSTER.hardware.provenance, engines=None),
    )
    prediction = predictor(replace(CLUSTER, hardware=bare)).predict(PLAN)
    # No run of this engine is in the tables: bounds are those of dense models of any engine.
    (known,) = (one for one in known_sureness().kinds if one.name == "any: dense, 16 bits")
    runs = f"{known.runs:,} measured runs of kind {known.name!r} ({known.sources} sources)"
    words = f"engine mistlab is not calibrated on {bare.name}: bounds count {runs}"
    count = known.sources / (known.sources + SOURCES_OF_WIDER)
    assert prediction.notes == (f"{words} for {count:.0%}, and runs of wider kinds",)
    bounds = bounds_of(WORK, replace(CLUSTER, hardware=bare), "mistlab")
    spread = known_sureness().spread(bounds.kind, PLAN.num_gpus)
    below, above = spread.around(-np.log(prediction.mfu))
    assert prediction.iteration_s_low == pytest.approx(prediction.iteration_s * below)
    assert prediction.iteration_s_high == pytest.approx(prediction.iteration_s * above)
    assert 1.05 < 1 / below < above < 3


def test_bounds_of_an_unmeasured_engine_are_wider_where_gpus_compute_less_of_the_time() -> None:
    h100 = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=4)
    bounds = bounds_of(WORK, h100, "mistlab")
    (_, busy), (_, idle) = (bounds.around(4, mfu) for mfu in (0.5, 0.01))
    assert idle == pytest.approx(busy ** np.sqrt(np.log(0.01) / np.log(0.5)))
    # Megatron's runs elsewhere tell more of Megatron than those of all engines do.
    assert bounds_of(WORK, h100, "megatron").around(4, 0.5) != bounds.around(4, 0.5)


def test_own_runs_of_a_hardware_file_narrow_the_bounds_of_their_engine_and_say_so() -> None:
    hardware = catalog.hardware("h100-80gb")
    own = OwnRuns(engine="megatron", offset=0.1, runs=6)
    h100 = Cluster(hardware=hardware, nodes=1, gpus_per_node=4)
    known = replace(h100, hardware=replace(hardware, own_runs=(own,)))
    for engine, is_narrower in (("megatron", True), ("fsdp", False)):
        plain, told = (bounds_of(WORK, one, engine) for one in (h100, known))
        widths = [one.around(4, 0.4)[1] / one.around(4, 0.4)[0] for one in (plain, told)]
        assert (widths[1] < 0.95 * widths[0]) == is_narrower
        assert (
            any("narrowed by 6 runs of your own" in note for note in told.notes(4)) is is_narrower
        )


def test_bounds_widen_with_the_distance_to_what_was_measured_and_say_by_what() -> None:
    at = MeasuredAt(hidden=WORK.model.hidden, gpus=4, sequence_length=WORK.sequence_length)
    far = EngineCalibration(
        engine="mistlab", half_width=0.1, far_half_width=0.25, reach=3.0, runs=9, at=(at,)
    )
    hardware = replace(CLUSTER.hardware, engines=(far,))
    here = bounds_of(WORK, replace(CLUSTER, hardware=hardware), "mistlab")
    assert here.notes(4) == ()
    assert here.notes(8) == (
        "number of GPUs differs by a factor of 2.0 from the nearest runs measured",
    )
    # From the one to the other over the first doubling; three reach as far as was tried.
    widths = [half_width(here, gpus) for gpus in (4, 8, 32, 64)]
    assert widths == pytest.approx([0.1, 0.25, 0.25, 0.25 * 1.5])
    assert 0.1 < half_width(here, 5) < half_width(here, 6) < 0.25
    # Below what was measured is as far away as above.
    assert half_width(here, 2) == half_width(here, 8)


def test_bounds_are_those_of_the_nearest_runs() -> None:
    places = tuple(
        MeasuredAt(hidden=hidden, gpus=gpus, sequence_length=WORK.sequence_length)
        for hidden, gpus in ((WORK.model.hidden, 4), (WORK.model.hidden * 8, 4))
    )
    far = EngineCalibration(
        engine="mistlab", half_width=0.1, far_half_width=0.25, reach=3.0, runs=9, at=places
    )
    cluster = replace(CLUSTER, hardware=replace(CLUSTER.hardware, engines=(far,)))
    # A width between two that were measured is no measured one.
    between = replace(WORK, model=replace(WORK.model, hidden=WORK.model.hidden * 2))
    assert half_width(bounds_of(between, cluster, "mistlab"), 4) == pytest.approx(0.25)


def bounded(seconds: float, width: float) -> Prediction:
    prediction = predictor().predict(PLAN)
    return replace(
        prediction,
        iteration_s=seconds,
        iteration_s_low=seconds * (1 - width),
        iteration_s_high=seconds * (1 + width),
    )


def test_plans_are_told_apart_beyond_the_bounds_of_both() -> None:
    close, far = (compared(bounded(1.0, 0.03), bounded(t, 0.04)) for t in (1.04, 1.06))
    assert close.ratio == pytest.approx(1.04)
    assert not close.exceeds_bounds
    assert far.exceeds_bounds
    assert compared(bounded(1.06, 0.03), bounded(1.0, 0.04)).exceeds_bounds


def test_hardware_without_an_allocator_is_named() -> None:
    hardware = CLUSTER.hardware
    bare = replace(
        hardware, allocator=None, provenance=replace(hardware.provenance, allocator=None)
    )
    with pytest.raises(InputError, match=r"l4-24gb has no allocator .*: .*run .*--runs"):
        predictor(replace(CLUSTER, hardware=bare)).predict(PLAN)


@pytest.mark.parametrize("name", catalog.hardware_names())
def test_every_hardware_of_the_catalogue_predicts(name: str) -> None:
    cluster = Cluster(hardware=catalog.hardware(name), nodes=2, gpus_per_node=4)
    stage = replace(STAGE, data_parallel=4, checkpointed_layers=16)
    prediction = predictor(cluster).predict(Plan(micro_batches=16, stages=(stage, stage)))
    assert 0 < prediction.mfu < 1
    assert prediction.iteration_s > 0
