"""Measures how long searches take, and how that grows with the numbers of GPUs and of blocks."""

from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor


def problem_of(
    model: str, layers: int | None, hardware: str, nodes: int, batch: int, gpus: int = 8
) -> Problem:
    spec = catalog.model(model)
    return Problem(
        workload=Workload(
            model=spec if layers is None else replace(spec, layers=layers),
            sequence_length=2048,
            global_batch=batch,
            attention="flash",
            precision="fp16",
        ),
        cluster=Cluster(hardware=catalog.hardware(hardware), nodes=nodes, gpus_per_node=gpus),
    )


def timed(benchmark: Any, problem: Problem, space: str) -> None:
    """Time one search, including the time to compile the predictor's expressions."""

    def search() -> None:
        predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
        searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
        result = searcher.search(problem, space_of(space), Budget(seconds=300), 0)
        assert result.prediction is not None
        benchmark.extra_info["iteration_s"] = result.prediction.iteration_s
        benchmark.extra_info["stage_evaluations"] = result.stage_evaluations

    benchmark.pedantic(search, rounds=1, warmup_rounds=0)


# A search of space ``wide`` takes a minute.
@pytest.mark.parametrize("space", ["mist", pytest.param("wide", marks=pytest.mark.slow)])
def test_gpt_22b_on_32_gpus(benchmark: Any, space: str) -> None:
    timed(benchmark, problem_of("gpt3-22b", None, "l4-24gb", 4, 512), space)


def test_gpt_175b_on_1024_gpus(benchmark: Any) -> None:
    timed(benchmark, problem_of("gpt3-175b", None, "a100-80gb", 128, 1536), "mist")


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 32])
def test_growth_with_gpus(benchmark: Any, nodes: int) -> None:
    timed(benchmark, problem_of("gpt3-7b", None, "l4-24gb", nodes, 512), "mist")


@pytest.mark.parametrize("layers", [12, 24, 48, 96])
def test_growth_with_blocks(benchmark: Any, layers: int) -> None:
    timed(benchmark, problem_of("gpt3-7b", layers, "l4-24gb", 4, 512), "mist")
