"""Losses in chunks of tokens: trained by plans, they equal those of all logits at once, and what is
held is what is predicted."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.engines.engine import CHUNK_TOKENS  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.engine.work import stage_modules  # noqa: E402
from runtime.models.parallel import TokenLosses  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from simulators.events import EventSimulator  # noqa: E402
from simulators.symbolic import SymbolicPredictor  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.test_lean_blocks import kept_bytes, predicted  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    assert_alike,
    by_plan,
    plainly,
    ratios,
    stage,
    workload,
)
from tests.sweep import sweep  # noqa: E402

PLANS = {
    "alone": Plan(micro_batches=2, stages=(stage(4, micro_batch=4),)),
    "ranks": Plan(
        micro_batches=2,
        stages=(stage(tensor_parallel=2, data_parallel=2, zero=3, offload=ratios(0.5, 0, 1, 0.5)),),
    ),
    "split tokens": Plan(
        micro_batches=2, stages=(stage(tensor_parallel=2, micro_batch=4, sequence_parallel=1),)
    ),
    "stages": Plan(micro_batches=4, stages=(stage(2), stage(2, checkpointed_layers=1))),
    "parts of sequences": Plan(
        micro_batches=2, stages=(stage(context_parallel=2, micro_batch=4, zero=2),)
    ),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"biases": True, "tied_embeddings": True}),
    "a padded vocabulary": ("llama", {"vocab": 97, "kv_heads": 2}),
    "an encoder": ("bert", {}),
}
CASES = [
    (model, plan)
    for plan in PLANS
    for model in MODELS
    if model != "an encoder" or plan not in ("split tokens", "parts of sequences")
]


@pytest.mark.parametrize(("model", "plan"), sweep(CASES, first=8))
def test_a_plan_loses_as_with_all_logits(
    model: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither a sequence nor a micro-batch has a multiple of it.
    monkeypatch.setattr(stage_modules, "CHUNK_TOKENS", 12)
    family, fields = MODELS[model]
    work = workload(family, **fields)
    sizes = noted(monkeypatch)
    assert_alike(by_plan(replace(work, loss="chunked"), PLANS[plan]), plainly(work))
    assert max(sizes) <= 12


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens' logits there are at once, whenever a loss is worked out."""
    sizes, plain = [], TokenLosses.forward

    def forward(ctx: Any, logits: Tensor, *others: Any) -> Tensor:
        sizes.append(len(logits))
        return plain(ctx, logits, *others)

    monkeypatch.setattr(TokenLosses, "forward", staticmethod(forward))
    return sizes


# A micro-batch has one and a half chunks.
LONG = workload(sequence_length=CHUNK_TOKENS * 3 // 4, layers=1, batch=2, vocab=512)
ONE = Plan(micro_batches=1, stages=(stage(1, micro_batch=2),))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_head_keeps_its_input_alone_to_the_byte(precision: Any) -> None:
    whole = replace(LONG, precision=precision)
    chunked = replace(whole, loss="chunked")
    kept = [kept_bytes(work, ONE) for work in (whole, chunked)]
    expected = [predicted(work, ONE) + logits_bytes(work) for work in (whole, chunked)]
    assert kept[0] - kept[1] == expected[0] - expected[1]
    assert logits_bytes(chunked) == 0


def logits_bytes(work: Workload) -> float:
    figures = StageModel.of(work).figures(StageBatch.of_plan(ONE))
    return float(figures.logits_bytes[0])


def test_peaks_have_the_logits_of_a_chunk() -> None:
    work = replace(LONG, model=replace(LONG.model, vocab=50_000))
    of_both = [
        StageModel.of(replace(work, loss=loss)).figures(StageBatch.of_plan(ONE))
        for loss in ("whole", "chunked")
    ]
    logits = 4 * 2 * work.sequence_length * 50_000
    apart = of_both[0].forward_peak_bytes - of_both[1].forward_peak_bytes
    assert apart == pytest.approx(logits / 3, rel=1e-6)
    apart = of_both[0].backward_peak_bytes - of_both[1].backward_peak_bytes
    assert apart == pytest.approx(logits / 3, rel=1e-2)


def test_the_product_runs_once_more() -> None:
    """Where nearly all work is the head's, four products take the time of three."""
    work = workload(hidden=2048, ffn=64, vocab=128_000, layers=1, sequence_length=4096, batch=2)
    seconds = []
    for loss in ("whole", "chunked"):
        own = replace(work, loss=loss, precision="bf16")
        said = SymbolicPredictor(workload=own, cluster=CLUSTER).predict(ONE)
        played = EventSimulator(workload=own, cluster=CLUSTER).predict(ONE)
        assert said.iteration_s == pytest.approx(played.iteration_s, rel=0.01)
        seconds.append(said.iteration_s)
    assert 1.2 < seconds[1] / seconds[0] < 4 / 3


def test_heads_of_further_tokens_are_refused() -> None:
    work = replace(workload("llama", further_tokens=1), loss="chunked")
    with pytest.raises(InputError, match=r"workload.loss: chunked with 1 further_tokens"):
        check_runnable(Job(workload=work, cluster=CLUSTER, plan=PLANS["alone"]))


def test_gradients_of_all_logits_are_not_kept_for_passes_of_their_own() -> None:
    plan = replace(PLANS["stages"], order="zb-h1")
    work = replace(workload(), loss="chunked")
    with pytest.raises(InputError, match="order: zb-h1 keeps gradients of all logits"):
        check_runnable(Job(workload=work, cluster=CLUSTER, plan=plan))
