"""Sums with the residual are counted as the kernels of ``runtime.models.residuals`` run them."""

from dataclasses import replace

import pytest

from mistlab.cost.kernels import rule_of
from mistlab.cost.layers import _kernels, bytes_factor
from mistlab.engines.engine import ENGINES, KernelRule
from mistlab.graph.graph import LayerGraph, Phase
from mistlab.graph.lean import lean
from mistlab.graph.library import graph_of
from mistlab.plan.workload import Workload
from tests.workloads import workload_of

LLAMA = workload_of("llama3-8b", 4096, 8, "bf16")
PLAIN = workload_of("gpt3-2.7b", 2048, 8, "bf16")
GPT = replace(PLAIN, model=replace(PLAIN.model, biases=True))
DROPS = replace(GPT, model=replace(GPT.model, dropout=0.1, attention_dropout=0.0))
# Tokens and channels are so many that vectors do not count.
SIZES = dict.fromkeys("kndrfV", 0) | {"b": 1000, "s": 1, "h": 1000, "tp": 1}


def value(text: object) -> float:
    return float(eval(str(text), {"__builtins__": {}}, dict(SIZES)))


def of_residuals(layer: LayerGraph, rules: tuple[KernelRule, ...], phase: Phase) -> list[float]:
    """Values of a residual's size that kernels move, and their number, in sums and norms."""
    names = ("aten.add", "aten.native_dropout", "aten.native_layer_norm", "mistlab.rms_norm")
    found = [0.0, 0.0]
    for one in layer.of_phase(phase):
        if one.name.removesuffix("_backward") in names:
            rule = rule_of(one, layer, rules, "flash")
            moved = value(one.read_bytes + one.written_bytes)
            found[0] += value(bytes_factor(rule)) * moved / 2 / 10**6
            found[1] += value(_kernels(rule))
    return found


@pytest.mark.parametrize(
    ("work", "engine", "forward", "backward"),
    [
        # A norm (read, write); sum and norm (two read, two written); a sum (two read, one written).
        (LLAMA, "mistlab", [2 + 4 + 3, 3], [8, 2]),
        (LLAMA, "mist", [2 + 3 + 2 + 3, 4], [12, 4]),
        (GPT, "mistlab", [2 + 4 + 3, 3], [8, 2]),
        (GPT, "mist", [2 + 2 + 3 + 2 + 2 + 3, 6], [12, 4]),
        # Backward, dropout reads and writes each half's gradient, as masks are drawn again.
        (DROPS, "mistlab", [2 + 4 + 3, 3], [8 + 2 * 2, 4]),
    ],
)
def test_sums_norms_and_biases_take_what_their_kernels_move(
    work: Workload, engine: str, forward: list[int], backward: list[int]
) -> None:
    block, rules = graph_of(work).counts.block, ENGINES[engine].kernels
    assert of_residuals(block, rules, "forward") == pytest.approx(forward, abs=0.03)
    assert of_residuals(block, rules, "backward") == pytest.approx(backward, abs=0.03)


def test_a_lean_norm_is_apart_and_adds_no_gradient() -> None:
    block = lean(graph_of(GPT).counts.block)
    rules = ENGINES["mistlab"].kernels
    sums = [o for o in block.of_phase("backward") if o.name == "aten.add"]
    assert sums
    assert all(rule_of(one, block, rules, "flash").bytes_factor == 1 for one in sums)


def test_a_norm_behind_no_sum_reads_its_input() -> None:
    """Nor does the norm of an encoder's embedding, behind a sum with positions, make its sum."""
    bert = workload_of("bert-large", 512, 8, "bf16")
    rules = ENGINES["mistlab"].kernels
    for layer, places in (("embedding", []), ("head", []), ("block", [0.5, 0.5])):
        own = getattr(graph_of(bert).counts, layer)
        norms = [o for o in own.of_phase("forward") if o.name == "aten.native_layer_norm"]
        factors = [rule_of(one, own, rules, "flash").bytes_factor for one in norms]
        assert factors == (places or [1.0] * len(norms))
