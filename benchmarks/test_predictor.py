"""Measures how many stage candidates, and how many whole plans, a second the closed form predicts.

The candidates are stages of GPT-3 22B on four nodes of eight L4: thousands of strategies, each with
every number of blocks, checkpointed blocks and micro-batches in flight that a pipeline of four
stages can have. Rates are in ``extra_info``. Run on one core: ``taskset -c 0 make benchmark``.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from simulators.symbolic import SymbolicPredictor

STRATEGIES = tuple(
    product(
        ((8, 1), (4, 2), (2, 4), (1, 8)),  # data and tensor parallel
        (1, 2, 4),  # micro-batch
        (1, 2, 3),  # ZeRO
        (0.0, 0.5),  # weights
        (0.0, 0.5, 1.0),  # gradients
        (0.0, 0.25, 0.5, 0.75, 1.0),  # optimizer state
        (0.0, 0.25, 0.5, 0.75, 1.0),  # activations
    )
)
LAYERS = tuple(
    (layers, checkpointed, in_flight)
    for layers in range(10, 15)
    for checkpointed in range(layers + 1)
    for in_flight in (1, 2, 3, 4)
)


@pytest.fixture(scope="module")
def predictor() -> SymbolicPredictor:
    work = Workload(
        model=catalog.model("gpt3-22b"),
        sequence_length=2048,
        global_batch=512,
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=4, gpus_per_node=8)
    return SymbolicPredictor(workload=work, cluster=cluster)


def batch_of(strategies: int) -> StageBatch:
    """A batch of stage candidates: the first ``strategies``, each with every row of ``LAYERS``."""
    degrees, micro_batch, zero, *ratios = zip(*STRATEGIES[:strategies], strict=True)
    data, tensor = zip(*degrees, strict=True)
    layers, checkpointed, in_flight = (np.array(column) for column in zip(*LAYERS, strict=True))
    rows = strategies * len(LAYERS)

    def of_strategy(column: object) -> np.ndarray:
        return np.repeat(np.array(column), len(LAYERS))

    kinds = ("weights", "gradients", "optimizer", "activations")
    return StageBatch(
        layers=np.tile(layers, strategies),
        checkpointed_layers=np.tile(checkpointed, strategies),
        in_flight=np.tile(in_flight, strategies),
        data_parallel=of_strategy(data),
        tensor_parallel=of_strategy(tensor),
        micro_batch=of_strategy(micro_batch),
        zero=of_strategy(zero),
        has_embedding=np.zeros(rows, dtype=int),
        has_head=np.zeros(rows, dtype=int),
        first_rank=np.full(rows, 8),
        **{f"offload_{kind}": of_strategy(r) for kind, r in zip(kinds, ratios, strict=True)},
    )


@pytest.mark.parametrize("strategies", [540, 5400])
def test_stage_candidates_a_second(
    benchmark: Any, predictor: SymbolicPredictor, strategies: int
) -> None:
    batch = batch_of(strategies)

    costs = benchmark.pedantic(predictor.stage_costs, (batch,), rounds=5, warmup_rounds=1)

    assert len(costs.fits) == strategies * len(LAYERS)
    assert 0 < costs.fits.mean() < 1
    assert (costs.seconds.stable_s > 0).all()
    median = benchmark.stats["median"]
    benchmark.extra_info["candidates_per_s"] = len(batch) / median
    benchmark.extra_info["strategies_per_s"] = strategies / median


def test_candidates_in_no_order_a_second(benchmark: Any, predictor: SymbolicPredictor) -> None:
    batch = batch_of(540)
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = batch.chosen(order)

    costs = benchmark.pedantic(predictor.stage_costs, (shuffled,), rounds=5, warmup_rounds=1)

    in_order = predictor.stage_costs(batch)
    assert np.allclose(costs.seconds.stable_s, in_order.seconds.stable_s[order], rtol=1e-12, atol=0)
    benchmark.extra_info["candidates_per_s"] = len(batch) / benchmark.stats["median"]


def plans_of(number: int, draw: np.random.Generator, *, alike: bool) -> list[Plan]:
    """Plans of four stages; similar plans share many of their stages, different ones hardly any."""
    return [
        Plan(micro_batches=64, stages=tuple(_stage(draw, alike=alike) for _ in range(4)))
        for _ in range(number)
    ]


def _stage(draw: np.random.Generator, *, alike: bool) -> StagePlan:
    kinds = ("optimizer",) if alike else ("weights", "gradients", "optimizer", "activations")
    ratios = np.arange(0.0, 0.75, 0.25) if alike else np.arange(0.0, 1.01, 0.01)
    return StagePlan(
        layers=12,
        data_parallel=8,
        tensor_parallel=1,
        micro_batch=1,
        zero=1,
        checkpointed_layers=int(draw.integers(0, 13)),
        offload=Offload(**{kind: float(draw.choice(ratios)) for kind in kinds}),
    )


@pytest.mark.parametrize("alike", [True, False], ids=["stages alike", "no stage twice"])
@pytest.mark.parametrize("at_once", [1, 2000])
def test_plans_a_second(
    benchmark: Any, predictor: SymbolicPredictor, at_once: int, alike: bool
) -> None:
    """Measure whole plans a second; each round has new plans."""
    draw, number = np.random.default_rng(0), 2000
    predictor.predict_many(plans_of(500, draw, alike=alike))

    def predict(plans: list[Plan]) -> list[Prediction]:
        starts = range(0, number, at_once)
        parts = (predictor.predict_many(plans[start : start + at_once]) for start in starts)
        return [prediction for part in parts for prediction in part]

    predictions = benchmark.pedantic(
        predict, setup=lambda: ((plans_of(number, draw, alike=alike),), {}), rounds=5
    )

    assert len(predictions) == number
    benchmark.extra_info["plans_per_s"] = number / benchmark.stats["median"]
    benchmark.extra_info["best_plans_per_s"] = number / benchmark.stats["min"]
