"""How many candidate rows a second the memory and work expressions of a block take.

The rate is in ``extra_info``; that it does not fall with the number of rows is what the sizes
show. Run on one core: ``taskset -c 0 make benchmark``.
"""

import numpy as np
import pytest

from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.layer import expressions_of
from mistlab.symbolic.library import Variant, shipped
from mistlab.symbolic.states import HALF, gradients, optimizer, weights

GPT_22B = {"s": 2048, "h": 6144, "n": 64, "k": 64, "d": 96, "f": 24576, "V": 50304}


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    graph = shipped(Variant(family="gpt", attention="flash", precision="half"))
    block = expressions_of(graph.block)
    expressions = {
        "saved": block.saved_bytes,
        "checkpointed": block.checkpointed_bytes,
        "forward peak": block.forward_peak_bytes,
        "backward peak": block.backward_peak_bytes,
    }
    for phase in PHASES:
        expressions |= {
            f"{phase} flop": block.flop(phase),
            f"{phase} moved": block.moved_bytes(phase),
            f"{phase} collectives": block.collective_bytes(phase),
        }
    for state in (weights, gradients, optimizer):
        made = state(block.parameters, HALF)
        expressions |= {f"{state.__name__}": made.device, f"{state.__name__} host": made.host}
    columns = ("b", "tp", "dp", "z", "ww", "wg", "wo")
    return compile_expressions(expressions, columns=columns, constants=GPT_22B)


@pytest.mark.parametrize("rows", [10_000, 100_000, 1_000_000])
def test_rows_a_second(benchmark, compiled: Compiled, rows: int) -> None:
    draw = np.random.default_rng(0)
    columns = {
        "b": draw.integers(1, 5, rows),
        "tp": 2 ** draw.integers(0, 4, rows),
        "dp": 2 ** draw.integers(0, 4, rows),
        "z": draw.integers(0, 4, rows),
        **{ratio: draw.random(rows) for ratio in ("ww", "wg", "wo")},
    }

    values = benchmark(compiled, columns)

    assert values.shape == (16, rows)
    benchmark.extra_info["rows_per_s"] = rows / benchmark.stats["median"]
