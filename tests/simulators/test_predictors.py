"""What holds of every predictor that is registered, whatever it does inside."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from mistlab import catalog
from mistlab.core.values import InputError, UncalibratedError
from mistlab.job.prediction import Prediction, Predictor
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from simulators.registry import PREDICTORS

WORK = Workload(
    model=ModelSpec.of(family="llama", hidden=2048, layers=8, heads=16, vocab=32000),
    sequence_length=1024,
    global_batch=16,
    attention="flash",
    precision="bf16",
)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(layers=4, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
PLAN = Plan(micro_batches=4, stages=(STAGE, STAGE))
WHOLE = Plan(micro_batches=2, stages=(replace(STAGE, layers=8, data_parallel=4),))


def plans() -> list[Plan]:
    """Several stages and one, every ZeRO level, offloading, recomputation, all engines."""
    (whole,) = WHOLE.stages
    swapped = replace(
        whole,
        zero=3,
        checkpointed_layers=8,
        offload=Offload(weights=1, gradients=0.5, optimizer=0.5, activations=0.25),
    )
    return [
        PLAN,
        WHOLE,
        replace(PLAN, stages=(replace(STAGE, layers=5, checkpointed_layers=2), _with(STAGE, 3))),
        *(replace(WHOLE, stages=(replace(whole, zero=zero),)) for zero in (0, 2, 3)),
        replace(WHOLE, stages=(swapped,)),
        replace(
            PLAN, stages=(replace(STAGE, data_parallel=1, tensor_parallel=2, micro_batch=4),) * 2
        ),
        replace(PLAN, engine="megatron"),
        replace(PLAN, engine="megatron", overlap_communication=False),
        replace(PLAN, engine="deepspeed"),
    ]


def _with(stage: StagePlan, layers: int) -> StagePlan:
    return replace(stage, layers=layers)


@pytest.fixture(params=[*PREDICTORS])
def name(request: pytest.FixtureRequest) -> str:
    """The name of a predictor."""
    return str(request.param)


def made(name: str, work: Workload = WORK, cluster: Cluster = CLUSTER) -> Predictor:
    return PREDICTORS[name](workload=work, cluster=cluster)


def seconds(predictions: Sequence[Prediction]) -> list[float]:
    return [prediction.iteration_s for prediction in predictions]


def test_many_plans_are_what_each_is_by_itself_in_order(name: str) -> None:
    together = made(name).predict_many(plans())
    assert list(together) == [made(name).predict(plan) for plan in plans()]
    assert list(made(name).predict_many(plans()[::-1])) == list(together)[::-1]
    assert len(set(seconds(together))) > len(plans()) // 2
    assert list(made(name).predict_many([])) == []


def test_predictions_name_their_predictor_and_lie_in_their_bounds(name: str) -> None:
    for plan, prediction in zip(plans(), made(name).predict_many(plans()), strict=True):
        assert prediction.predictor == name
        assert len(prediction.stages) == plan.num_stages
        low, high = prediction.iteration_s_low, prediction.iteration_s_high
        assert 0 < low < prediction.iteration_s < high < math.inf
        tokens = WORK.global_batch * WORK.sequence_length
        assert prediction.tokens_per_s == pytest.approx(tokens / prediction.iteration_s)
        assert 0 < prediction.mfu < 1


def test_the_classes_of_memory_make_up_its_peak_and_no_phase_is_above_it(name: str) -> None:
    for prediction in made(name).predict_many(plans()):
        for stage in prediction.stages:
            peak = stage.peak_allocated_bytes
            phases = [getattr(stage.memory_by_phase, e.name) for e in fields(stage.memory_by_phase)]
            assert stage.memory.total_bytes == pytest.approx(peak, abs=16)
            assert max(phases) == pytest.approx(peak, abs=16)
            assert stage.peak_reserved_bytes >= peak


def test_no_plan_is_faster_than_the_gpus_arithmetic(name: str) -> None:
    flop_per_s = CLUSTER.peak_flop_per_s(WORK.precision) * CLUSTER.num_gpus
    least_s = 6 * WORK.model.layers * 12 * WORK.model.hidden**2 * WORK.tokens / flop_per_s / 2
    for prediction in made(name).predict_many(plans()):
        assert prediction.iteration_s > least_s


def test_what_does_not_fit_is_a_prediction_like_any_other(name: str) -> None:
    small = replace(CLUSTER, memory_gib=2)
    roomy, tight = (made(name, cluster=one).predict(PLAN) for one in (CLUSTER, small))
    assert roomy.fits
    assert not tight.fits
    assert tight == replace(roomy, fits=False)


@pytest.mark.parametrize("plan", plans()[:3], ids=["two stages", "one stage", "uneven"])
def test_more_work_takes_longer(name: str, plan: Plan) -> None:
    twice = replace(WORK, global_batch=2 * WORK.global_batch)
    more = replace(plan, micro_batches=2 * plan.micro_batches)
    once_s = made(name).predict(plan).iteration_s
    assert once_s < made(name, twice).predict(more).iteration_s < 2.01 * once_s
    recomputed = replace(
        plan, stages=tuple(replace(one, checkpointed_layers=one.layers) for one in plan.stages)
    )
    assert once_s < made(name).predict(recomputed).iteration_s < 1.5 * once_s


def test_hardware_that_was_never_calibrated_is_refused_with_the_remedy(name: str) -> None:
    provenance = replace(CLUSTER.hardware.provenance, compute=None)
    bare = replace(CLUSTER.hardware, compute=None, provenance=provenance)
    with pytest.raises(InputError, match=r"has no compute rates: .*--operators") as caught:
        made(name, cluster=replace(CLUSTER, hardware=bare)).predict(PLAN)
    assert isinstance(caught.value, UncalibratedError)
