"""What a run recomputes, in the words of tables of runs."""

import pytest

from experiments.runs.run_jobs import job_of
from mistlab.core.values import InputError
from tests.mistlab.test_runs import run

LAYERS = 24


@pytest.mark.parametrize(
    ("words", "notes", "whole", "core"),
    [
        ("none", "", 0, 0),
        ("full", "", LAYERS, 0),
        ("block 5", "", 5, 0),
        ("selective:core_attn", "", 0, LAYERS),
        ("core attention", "", 0, LAYERS),
        # A recipe recomputes attention's core, which fused attention does not keep.
        ("selective (recipe default)", "", 0, 0),
        ("selective (recipe default)", "unfused attention", 0, LAYERS),
        ("selective:layernorm", "unfused attention", 0, 0),
        ("minimal", "", 0, 0),
    ],
)
def test_words_say_which_blocks_are_recomputed(
    words: str, notes: str, whole: int, core: int
) -> None:
    one_stage = {"layers": str(LAYERS), "pp": "1", "gpus": "4", "engine": "megatron-core"}
    made = job_of(run(**one_stage, recompute=words, notes=notes))
    (stage,) = made.job.plan.stages
    assert stage.checkpointed_layers == whole
    assert stage.value("core_recomputed_layers") == core


def test_other_words_are_refused() -> None:
    with pytest.raises(InputError, match="'now and then' cannot be said: give none, full"):
        job_of(run(recompute="now and then"))
