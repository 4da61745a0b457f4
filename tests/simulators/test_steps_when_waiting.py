"""Optimizer steps run whenever the first forward pass waits, as the event simulator plays it."""

from itertools import product

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of


def seconds_of(stage: StagePlan, micro_batches: int = 1) -> list[float]:
    """The seconds of a single-stage plan on four L4: of the closed form, and as played."""
    samples = stage.data_parallel * stage.micro_batch * micro_batches
    workload = workload_of("gpt3-2.7b", 4096, samples, "fp16", layers=stage.layers)
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
    predictors = (
        make(workload=workload, cluster=cluster) for make in (SymbolicPredictor, EventSimulator)
    )
    plan = Plan(micro_batches=micro_batches, stages=(stage,))
    return [predictor.predict(plan).iteration_s for predictor in predictors]


RATIOS = [*product((0.0, 0.5), (0.0, 0.25), (0.0, 0.25), (0.0, 0.125))]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_run_while_weights_are_gathered_whatever_is_offloaded(zero: int) -> None:
    """The gather of the embedding takes longer than the steps of a dozen blocks."""
    for weights, gradients, optimizer, activations in RATIOS:
        offload = Offload(
            weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
        )
        stage = StagePlan(
            layers=32,
            data_parallel=4,
            tensor_parallel=1,
            micro_batch=2,
            zero=zero,
            checkpointed_layers=20,
            offload=offload,
        )
        closed_s, played_s = seconds_of(stage)
        assert closed_s == pytest.approx(played_s, rel=1e-9), offload


@pytest.mark.parametrize("gradients", [0.25, 1.0])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_gather_goes_before_a_reduction_that_is_ready_no_sooner(
    micro_batch: int, gradients: float
) -> None:
    """Layers of two samples compute for longer than their neighbours gather, those of one do not;
    then the reduction is ready first.
    """
    offload = Offload(weights=0.0, gradients=gradients, optimizer=0.0, activations=0.0)
    stage = StagePlan(
        layers=32,
        data_parallel=4,
        tensor_parallel=1,
        micro_batch=micro_batch,
        zero=3,
        checkpointed_layers=20,
        offload=offload,
    )
    closed_s, played_s = seconds_of(stage, micro_batches=2)
    assert closed_s == pytest.approx(played_s, rel=1e-9)


def test_steps_of_many_layers_run_ahead() -> None:
    """Those of 100 small blocks while the embedding is gathered, whose steps are no shorter."""
    stage = StagePlan(layers=100, data_parallel=4, tensor_parallel=1, micro_batch=1, zero=3)
    closed_s, played_s = seconds_of(stage)
    assert closed_s == pytest.approx(played_s, rel=1e-9)


def test_a_backward_pass_waits_for_activations_that_outlast_the_first_pass() -> None:
    """Those of a single block, beside which nothing else computes."""
    stage = StagePlan(
        layers=1,
        data_parallel=4,
        tensor_parallel=1,
        micro_batch=4,
        zero=2,
        offload=Offload(weights=0.0, gradients=0.5, optimizer=0.0, activations=1.0),
    )
    closed_s, played_s = seconds_of(stage, micro_batches=2)
    assert closed_s == pytest.approx(played_s, rel=1e-3)
