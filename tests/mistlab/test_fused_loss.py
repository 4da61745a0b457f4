"""A fused loss goes through its logits once forward and once backward, wherever it is counted."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from mistlab.cost.kernels import rule_of
from mistlab.engines.engine import ENGINES
from mistlab.graph.graph import LayerGraph
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from tests.workloads import workload_of

LLAMA = workload_of("llama3-8b", 4096, 8, "bf16")
# A vocabulary that is as large as nothing else is; the gradient of its table has no bytes.
SIZES = {"b": 1, "s": 1, "h": 0, "n": 1, "k": 1, "d": 1, "r": 1, "f": 1, "tp": 1, "V": 10**9}


def of_logits(text: object, sizes: Mapping[str, int] = SIZES) -> int:
    """The bytes for each logit of an expression."""
    return round(eval(str(text), {"__builtins__": {}}, dict(sizes)) / sizes["V"])


def moved(head: LayerGraph, engine: str, phase: str) -> float:
    """Bytes that an engine's loss moves for each logit in a phase."""
    rules = ENGINES[engine].kernels
    loss = (one for one in head.of_phase(phase) if one.module == "head")  # type: ignore[arg-type]
    return sum(
        rule.bytes_factor * of_logits(one.read_bytes + one.written_bytes)
        for one in loss
        if (rule := rule_of(one, head, rules, "flash")).runs and one.kind != "collective"
    )


@pytest.mark.parametrize(
    "work",
    [LLAMA, replace(LLAMA, precision="fp32"), workload_of("gpt3-2.7b", 2048, 8, "fp16")],
)
def test_logits_are_read_twice_and_written_once(work: Workload) -> None:
    width = 4 if work.precision == "fp32" else 2
    for graph in (graph_of, sequence_graph_of):
        plain, fused = graph(work), graph(work, fuses_loss=True)
        assert plain is not None
        assert fused is not None
        heads = plain.counts.head, fused.counts.head
        assert [moved(one, "mistlab", "forward") for one in heads] == [8 * width, width]
        assert [moved(one, "mistlab", "backward") for one in heads] == [2 * width] * 2
        tensors = [[of_logits(peak.size_bytes) for peak in one.peaks] for one in heads]
        assert max(tensors[0]) == 2 * max(tensors[1]) == 2 * width
        # What is kept, and the backward pass, are as full as before.
        logits = [[of_logits(one.size_bytes) for one in head.saved] for head in heads]
        assert logits[0] == logits[1]
        assert heads[0].peaks[1:][-1] == heads[1].peaks[1:][-1]


def test_sums_of_ranks_go_in_one_call() -> None:
    calls = [
        [one.read_bytes for one in graph.counts.head.operators if one.kind == "collective"]
        for graph in (graph_of(LLAMA), graph_of(LLAMA, fuses_loss=True))
    ]
    assert [len(one) for one in calls] == [4, 3]


def test_this_runtime_and_fused_trainers_have_it() -> None:
    rows = {name for name, row in ENGINES.items() if any(m.fuses_loss for m in row.memory.values())}
    assert rows == {"mistlab", "trainer-fused"}
    assert all(m.fuses_loss for name in rows for m in ENGINES[name].memory.values())


def test_further_tokens_have_it_too() -> None:
    model = replace(LLAMA.model, further_tokens=1)
    work = replace(LLAMA, model=model)
    heads = [graph_of(work, fuses_loss=fuses).counts.head for fuses in (False, True)]
    assert [moved(one, "mistlab", "forward") for one in heads] == [32, 4]


def test_a_stage_with_the_head_is_as_much_less_full_forward() -> None:
    plan = Plan(
        micro_batches=8,
        stages=(StagePlan(layers=32, micro_batch=1, data_parallel=1, tensor_parallel=1),),
    )
    work = replace(LLAMA, precision="fp16")
    ours, theirs = (
        StageModel.of(work, engine).figures(StageBatch.of_plan(plan))
        for engine in ("mistlab", "mist")
    )
    less = theirs.forward_peak_bytes[0] - ours.forward_peak_bytes[0]
    assert less == pytest.approx(2 * 4096 * LLAMA.model.vocab, rel=0.02)
    assert theirs.backward_peak_bytes[0] == pytest.approx(ours.backward_peak_bytes[0])
