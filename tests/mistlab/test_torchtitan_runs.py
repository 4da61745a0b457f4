"""Rows of torchtitan's runs: who makes its kernels, and what it recomputes."""

from dataclasses import replace

import pytest

from experiments.runs.judged import judged
from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import RunAnswer
from experiments.runs.runs_table import TableRow
from mistlab.core.units import GIB_BYTES
from tests.mistlab.test_run_judging import prediction
from tests.mistlab.test_runs import run


@pytest.mark.parametrize("words", ["selective every 2nd layer", "selective layer"])
def test_half_of_the_blocks_are_recomputed(words: str) -> None:
    made = job_of(run(engine="torchtitan", recompute=words, layers="24"))
    assert {stage.checkpointed_layers * 2 for stage in made.job.plan.stages} == {
        stage.layers // 2 * 2 for stage in made.job.plan.stages
    }


@pytest.mark.parametrize("words", ["selective op", "selective", "?", ""])
def test_every_second_product_is_recomputed(words: str) -> None:
    """Torchtitan's recipes do so where a row does not say."""
    made = job_of(run(engine="torchtitan", recompute=words, layers="24"))
    for stage in made.job.plan.stages:
        assert (stage.checkpointed_layers, stage.products_recomputed_layers) == (0, stage.layers)
    noted = any("selective op assumed" in note for note in made.notes)
    assert noted == made.saves_unsaid == (words in ("?", ""))


@pytest.mark.parametrize(
    ("notes", "date", "precision", "engine"),
    [
        ("eager; 400 Gb/s", "2025-06", "bf16", "fsdp-eager"),
        ("", "2025-06", "bf16", "fsdp-eager"),
        ("torch.compile; async TP", "2025-06", "bf16", "fsdp-compiled"),
        ("torch.compile", "", "bf16", "fsdp-compiled"),
        ("torch.compile", "2025-03", "bf16", "fsdp-compiled-blocks"),
        ("torch.compile", "2025-06", "fp8 rowwise", "fsdp-compiled-rowwise"),
        ("eager", "2025-06", "fp8 rowwise", "fsdp-eager-rowwise"),
    ],
)
def test_torchtitan_is_eager_or_compiled(
    notes: str, date: str, precision: str, engine: str
) -> None:
    found = run(engine="torchtitan", notes=notes, date=date, precision=precision)
    assert found.engine == engine
    other = run(engine="llm-foundry (Composer)", notes=notes, date=date)
    assert other.engine == "fsdp-fused-loss"


def test_four_gpus_with_184_gib_are_gb200() -> None:
    found = run(engine="torchtitan", hardware="B200 class (184 GiB)")
    assert found.gpus.hardware == "gb200-186gb"
    assert run(engine="torchtitan", hardware="B200 (power limited)").gpus.hardware == "b200-180gb"


@pytest.mark.parametrize(
    ("engine", "kind", "error"),
    [
        ("torchtitan", "peak memory GB, kind not stated", 0.5),
        ("torchtitan", "torch max reserved", 0.5),
        ("torchtitan", "torch max allocated", 0.0),
        ("llm-foundry", "peak memory GB, kind not stated", 0.0),
        ("llm-foundry", "torch max reserved", 0.5),
        ("llm-foundry", "reserved and allocated", 0.0),
    ],
)
def test_torchtitan_logs_what_its_allocator_reserves(engine: str, kind: str, error: float) -> None:
    found = prediction(1.0, gib=10.0)
    (stage,) = found.stages
    found = replace(found, stages=(replace(stage, peak_reserved_bytes=15 * GIB_BYTES),))
    cells = {"engine": engine, "memory_kind": kind, "memory_gib": "10"}
    row = TableRow(file="runs.csv", number=1, line=2, cells=cells)
    assert judged(row, RunAnswer(prediction=found)).memory_error == error
