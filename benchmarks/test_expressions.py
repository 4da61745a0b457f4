"""Measures how many candidates' memory and work are computed per second, for a block and for a
stage.

``extra_info`` has the rate; the sizes show that it does not fall with the number of candidates. Run
on one core: ``taskset -c 0 make benchmark``.
"""

from typing import Any

import numpy as np
import pytest
import sympy

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.graph.compiled import Compiled, compile_expressions
from mistlab.graph.graph import PHASES
from mistlab.graph.layer_types import expressions_of
from mistlab.graph.library import Variant, shipped
from mistlab.graph.stage_expressions import Parameters, gradients, optimizer, weights
from mistlab.graph.stage_model import StageModel
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch

GPT_22B = {"s": 2048, "h": 6144, "n": 64, "k": 64, "d": 96, "f": 24576, "V": 50304}


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    graph = shipped(Variant(family="gpt", attention="flash", precision="half"))
    block = expressions_of(graph.block)
    expressions = {
        "saved": block.saved_bytes,
        "checkpointed": block.input_bytes,
        "forward peak": block.forward_peak_bytes,
        "backward peak": block.backward_peak_bytes,
    }
    for phase in PHASES:
        expressions |= {
            f"{phase} flop": block.flop(phase),
            f"{phase} moved": block.moved_bytes(phase),
            f"{phase} collectives": block.collective_bytes(phase),
        }
    blocks = Parameters(every=block.parameters, experts=block.expert_parameters)
    no_ends = blocks.times(sympy.Integer(0))
    for state in (weights, gradients, optimizer):
        made = state(blocks, no_ends, ENGINES["mistlab"].memory["fp16"])
        expressions |= {f"{state.__name__}": made.device, f"{state.__name__} host": made.host}
    columns = ("b", "tp", "dp", "cp", "rp", "z", "ww", "wg", "wo")
    return compile_expressions(expressions, columns=columns, constants=GPT_22B)


ROWS = pytest.mark.parametrize("rows", [10_000, 100_000, 1_000_000])


@pytest.fixture(scope="module")
def stages() -> StageModel:
    work = Workload(
        model=catalog.model("gpt3-22b"),
        sequence_length=2048,
        global_batch=64,
        attention="flash",
        precision="fp16",
    )
    return StageModel.of(work)


@ROWS
def test_rows_of_a_stage_a_second(benchmark: Any, stages: StageModel, rows: int) -> None:
    draw = np.random.default_rng(0)
    layers = draw.integers(1, 49, rows)
    kinds = ("weights", "gradients", "optimizer", "activations")
    batch = StageBatch(
        layers=layers,
        checkpointed_layers=draw.integers(0, layers + 1),
        data_parallel=2 ** draw.integers(0, 4, rows),
        tensor_parallel=2 ** draw.integers(0, 4, rows),
        micro_batch=draw.integers(1, 5, rows),
        zero=draw.integers(0, 4, rows),
        in_flight=draw.integers(1, 9, rows),
        has_embedding=draw.integers(0, 2, rows),
        has_head=draw.integers(0, 2, rows),
        first_rank=np.zeros(rows, dtype=int),
        **{f"offload_{kind}": draw.integers(0, 9, rows) / 8 for kind in kinds},
    )

    figures = benchmark(stages.figures, batch)

    assert figures.peak_bytes.shape == (rows,)
    assert figures.feasible.all()
    benchmark.extra_info["rows_per_s"] = rows / benchmark.stats["median"]


@ROWS
def test_rows_of_a_block_a_second(benchmark: Any, compiled: Compiled, rows: int) -> None:
    draw = np.random.default_rng(0)
    columns = {
        "b": draw.integers(1, 5, rows),
        "tp": 2 ** draw.integers(0, 4, rows),
        "dp": 2 ** draw.integers(0, 4, rows),
        "cp": np.ones(rows, dtype=int),
        "rp": np.ones(rows, dtype=int),
        "z": draw.integers(0, 4, rows),
        **{ratio: draw.random(rows) for ratio in ("ww", "wg", "wo")},
    }

    values = benchmark(compiled, columns)

    assert values.shape == (16, rows)
    benchmark.extra_info["rows_per_s"] = rows / benchmark.stats["median"]
