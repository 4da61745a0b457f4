"""Rows of torchtitan's runs: who makes its kernels, and what it recomputes."""

import pytest

from mistlab.runs.jobs import job_of
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
    assert noted == (words in ("?", ""))


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
    assert other.engine == "fsdp"


def test_four_gpus_with_184_gib_are_gb200() -> None:
    found = run(engine="torchtitan", hardware="B200 class (184 GiB)")
    assert found.gpus.hardware == "gb200-186gb"
    assert run(engine="torchtitan", hardware="B200 (power limited)").gpus.hardware == "b200-180gb"
