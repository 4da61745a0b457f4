"""Variability: what it changes and by how much, and that it changes nothing by default."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import FieldError
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.events import EventSimulator, Simulation
from simulators.variability import Quantiles, Variability
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 32)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=8)
SIMULATOR = EventSimulator(workload=WORK, cluster=CLUSTER)
STAGE = StagePlan(layers=6, data_parallel=1, tensor_parallel=1, micro_batch=2)
ALONE = Plan(stages=(replace(STAGE, layers=24),), micro_batches=16)
PIPELINE = Plan(stages=(STAGE,) * 4, micro_batches=16)
BUSY_STAGE = StagePlan(
    layers=12,
    data_parallel=2,
    tensor_parallel=1,
    micro_batch=2,
    zero=3,
    offload=Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5),
)
BUSY = Plan(stages=(BUSY_STAGE,) * 2, micro_batches=8)
PLANS = {
    "one stage": ALONE,
    "pipeline": PIPELINE,
    "all features": BUSY,
    "Megatron": replace(PIPELINE, engine="megatron"),
}
all_plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
SHAKEN = Variability(
    jitter=0.1,
    slow_stage=1,
    slow_stage_factor=1.5,
    slow_links_factor=2.0,
    clock_factor=1.25,
    seed=7,
)


def simulated(plan: Plan, variability: Variability | None = None) -> Simulation:
    return SIMULATOR.simulate(plan, variability=variability)


@all_plans
def test_defaults_change_nothing(plan: Plan) -> None:
    without, default = simulated(plan), simulated(plan, Variability())
    assert repr(default) == repr(without)
    assert repr(simulated(plan, Variability(seed=3))) == repr(without)
    drawn = SIMULATOR.monte_carlo(plan, Variability(), 3)
    assert drawn.q05_s == drawn.q50_s == drawn.q95_s == without.iteration_s
    assert drawn.mean_s == pytest.approx(without.iteration_s, rel=1e-15)


def test_equal_seeds_give_equal_results() -> None:
    assert simulated(BUSY, SHAKEN).times == simulated(BUSY, SHAKEN).times
    assert simulated(BUSY, SHAKEN).times != simulated(BUSY, replace(SHAKEN, seed=8)).times
    drawn = SIMULATOR.monte_carlo(BUSY, SHAKEN, 4)
    assert drawn == SIMULATOR.monte_carlo(BUSY, SHAKEN, 4)
    assert drawn != replace(SIMULATOR.monte_carlo(BUSY, replace(SHAKEN, seed=8), 4), seed=7)


def test_equal_seeds_give_equal_results_in_another_process() -> None:
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('variable', {__file__!r})\n"
        "sys.modules['variable'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(repr(module.simulated(module.BUSY, module.SHAKEN).times))\n"
        "print(repr(module.SIMULATOR.monte_carlo(module.BUSY, module.SHAKEN, 3)))\n"
    )
    expected = [
        repr(simulated(BUSY, SHAKEN).times),
        repr(SIMULATOR.monte_carlo(BUSY, SHAKEN, 3)),
    ]
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        assert printed.splitlines() == expected


def test_a_simulation_is_the_first_sample() -> None:
    drawn = SIMULATOR.monte_carlo(BUSY, SHAKEN, 1)
    first = simulated(BUSY, SHAKEN).iteration_s
    assert drawn == Quantiles(
        samples=1, seed=7, mean_s=first, q05_s=first, q50_s=first, q95_s=first
    )


def test_quantiles_are_of_the_samples() -> None:
    ramp = Quantiles.of([float(n) for n in range(101)], seed=3)
    assert ramp == Quantiles(samples=101, seed=3, mean_s=50.0, q05_s=5.0, q50_s=50.0, q95_s=95.0)


def computing_s(simulation: Simulation, stage: int, micro_batch: int | None = None) -> float:
    """What a stage's passes take by themselves, of one micro-batch or of all."""
    graph = simulation.graph
    return sum(
        seconds
        for task, seconds in enumerate(graph.seconds)
        if graph.stage(task) == stage
        and graph.labels[task][0] in "FB"
        and micro_batch in (None, graph.micro_batches[task])
    )


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_stage_is_the_bottleneck(slow: int) -> None:
    """It computes all micro-batches; those before it one first of all, and one last of all."""
    usual = simulated(PIPELINE)
    held_up = simulated(PIPELINE, Variability(slow_stage=slow, slow_stage_factor=2.0))
    before = sum(computing_s(usual, stage, micro_batch=0) for stage in range(slow))
    expected = before + 2 * computing_s(usual, slow)
    assert expected > usual.iteration_s
    assert held_up.iteration_s >= expected * (1 - 1e-9)
    assert held_up.iteration_s <= 2 * usual.iteration_s


def test_a_slow_stage_slows_what_it_computes_alone() -> None:
    usual = simulated(BUSY).graph
    graph = simulated(BUSY, Variability(slow_stage=1, slow_stage_factor=2.0)).graph
    slowed = 0
    for task, (seconds, before) in enumerate(zip(graph.seconds, usual.seconds, strict=True)):
        computes = graph.stage(task) == 1 and graph.labels[task][0] in "FBS"
        assert seconds == before * (2 if computes else 1)
        slowed += computes
    assert 0 < slowed < len(graph)


@all_plans
def test_slow_links_slow_what_is_transferred_alone(plan: Plan) -> None:
    usual = simulated(plan).graph
    graph = simulated(plan, Variability(slow_links_factor=2.0)).graph
    for task, (seconds, before) in enumerate(zip(graph.seconds, usual.seconds, strict=True)):
        transfers = graph.lane(task) != "compute" or graph.labels[task][0] == "X"
        assert seconds == before * (2 if transfers else 1)
    assert (graph.seconds == usual.seconds) == (plan is ALONE)


@pytest.mark.parametrize("factor", [2.0, 1.1, 3.7])
def test_a_clock_scales_a_plan_without_communication(factor: float) -> None:
    usual, slow = simulated(ALONE), simulated(ALONE, Variability(clock_factor=factor))
    assert set(map(usual.graph.lane, range(len(usual)))) == {"compute"}
    exactly = factor * usual.iteration_s
    assert slow.iteration_s == (exactly if factor == 2 else pytest.approx(exactly, rel=1e-12))


def test_all_clocks_and_links_scale_everything() -> None:
    slow = Variability(clock_factor=2.0, slow_links_factor=2.0)
    assert simulated(BUSY, slow).iteration_s == 2 * simulated(BUSY).iteration_s


def test_factors_multiply() -> None:
    """In a plan of one stage, a slow stage is a slow clock."""
    both = Variability(slow_stage=0, slow_stage_factor=2.0, clock_factor=2.0)
    assert simulated(ALONE, both).times == simulated(ALONE, Variability(clock_factor=4.0)).times


def test_jitter_is_lognormal_with_mean_one() -> None:
    usual, shaken = simulated(PIPELINE).graph, simulated(PIPELINE, Variability(jitter=0.2)).graph
    ratios = np.array(shaken.seconds) / np.array(usual.seconds)
    assert len(ratios) > 500
    error = 0.2 / np.sqrt(len(ratios))
    assert abs(ratios.mean() - 1) < 4 * error
    assert ratios.std() == pytest.approx(0.2, rel=0.15)
    logs = np.log(ratios)
    assert logs.mean() == pytest.approx(-np.log1p(0.2**2) / 2, abs=4 * error)


def test_jitter_takes_a_pipeline_no_less_on_average() -> None:
    """Waiting for the last of several takes longer than each on average, but not much."""
    usual = simulated(PIPELINE).iteration_s
    drawn = SIMULATOR.monte_carlo(PIPELINE, Variability(jitter=0.1, seed=1), 50)
    assert drawn.samples == 50
    assert drawn.seed == 1
    assert 0.99 * usual <= drawn.mean_s <= 1.05 * usual
    assert drawn.q05_s < drawn.q50_s < drawn.q95_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"jitter": -0.1}, "jitter: -0.1 is too small: give a number between 0 and 10"),
        ({"jitter": 11}, "jitter: 11.0 is too large: give a number between 0 and 10"),
        ({"jitter": True}, "jitter: true is not a number: give a number between 0 and 10"),
        (
            {"slow_stage": -1},
            "slow_stage: -1 is too small: give a whole number of at least 0",
        ),
        (
            {"slow_stage": 0, "slow_stage_factor": 0.5},
            "slow_stage_factor: 0.5 is too small: give a number of at least 1",
        ),
        (
            {"slow_stage_factor": 2},
            "slow_stage_factor: 2 needs slow_stage: give the stage that it slows",
        ),
        (
            {"slow_links_factor": 0.9},
            "slow_links_factor: 0.9 is too small: give a number of at least 1",
        ),
        (
            {"clock_factor": float("nan")},
            "clock_factor: nan is not a finite number: give a number of at least 1",
        ),
        ({"seed": -1}, "seed: -1 is too small: give a whole number of at least 0"),
        ({"seed": 1.5}, "seed: 1.5 is not a whole number: give a whole number of at least 0"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        Variability(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_stage_that_the_plan_lacks_is_refused() -> None:
    with pytest.raises(FieldError) as caught:
        simulated(PIPELINE, Variability(slow_stage=4, slow_stage_factor=2.0))
    remedy = "4 is not a stage of the plan: give 0 to 3, or leave it out"
    assert str(caught.value) == f"slow_stage: {remedy}"


@pytest.mark.parametrize("samples", [0, -1])
def test_no_samples_are_refused(samples: int) -> None:
    message = f"^samples: {samples} is too small: give a whole number of at least 1$"
    with pytest.raises(FieldError, match=message):
        SIMULATOR.monte_carlo(PIPELINE, SHAKEN, samples)
    with pytest.raises(FieldError, match=r"^samples: 0 is too small"):
        Quantiles.of([], seed=0)
