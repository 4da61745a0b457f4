"""Rows of AutoModel and MaxText: whose kernels, what runs again, how often pipelines fill."""

import pytest

from experiments.runs.run_jobs import RunJob, job_of, recomputed
from experiments.runs.run_sureness import answered
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_runs import run

AUTOMODEL = "NeMo AutoModel (PyTorch FSDP2, DTensor, DeepEP)"


@pytest.mark.parametrize(
    ("notes", "engine"),
    [
        ("Pre-Training; kernels TE + DeepEP; LBS 2 GA 4", "fsdp-te"),
        ("Fine-Tuning (LoRA); kernels TE + triton", "fsdp"),
        ("Fine-Tuning (LoRA); kernels -; LBS 4", "fsdp-eager"),
        ("Pre-Training", "fsdp"),
    ],
)
def test_kernels_are_those_that_notes_name(notes: str, engine: str) -> None:
    assert run(engine=AUTOMODEL, notes=notes).engine == engine
    assert run(engine="llm-foundry", notes=notes).engine == "fsdp-fused-loss"


@pytest.mark.parametrize(
    ("model", "all_blocks"),
    [
        ("llama3-8b", False),
        ("llama3-70b", True),
        ("qwen3-30b-a3b", True),
        ("gpt-oss-20b", False),
        ("nemotron-3-super", True),
    ],
)
def test_recipes_recompute_large_models(model: str, all_blocks: bool) -> None:
    spec = catalog.model(model)
    sizes = {name: str(getattr(spec, name)) for name in ("layers", "hidden", "heads", "kv_heads")}
    ffn = spec.experts.ffn if spec.experts else spec.ffn
    sizes |= {"ffn": str(ffn), "vocab": str(spec.vocab), "tp": "1", "pp": "1", "cp": "1"}
    sizes |= {"gpus": "16", "dp": "16", "global_batch": "", "ep": ""}
    if spec.experts:
        sizes |= {"experts": str(spec.experts.count), "topk": str(spec.experts.active)}
    found = run(engine=AUTOMODEL, model=model, recompute="not stated", **sizes)
    expected = {"checkpointed_layers": spec.layers} if all_blocks else {}
    assert recomputed(found, spec.layers) == expected
    assert any("full assumed, as recipes have it" in note for note in found.notes) == all_blocks
    assert recomputed(run(engine=AUTOMODEL, model=model, recompute="none", **sizes), 8) == {}
    assert recomputed(run(engine="fsdp", model=model, recompute="", **sizes), 8) == {}


PIPELINE = {"engine": AUTOMODEL, "gpus": "8", "tp": "1", "pp": "4", "dp": "2", "cp": "1"}
PIPELINE |= {"micro_batch": "1", "global_batch": "64", "recompute": "none", "vpp": "2"}


def test_a_pipeline_fills_for_each_local_batch() -> None:
    """Each time it takes as long as a step of so many micro-batches."""
    once = job_of(run(**PIPELINE, notes="kernels -; GA 8"))
    often = job_of(run(**PIPELINE, notes="kernels -; LBS 4 GA 8"))
    alone = job_of(run(**PIPELINE | {"global_batch": "8"}, notes="kernels -"))
    assert (often.times, often.job.plan.micro_batches) == (8, 4)
    seconds = [answer_s(one) for one in (once, often, alone)]
    assert seconds[1] == pytest.approx(8 * seconds[2])
    assert seconds[1] > 1.1 * seconds[0]
    assert job_of(run(**PIPELINE | {"pp": "1", "dp": "8"}, notes="LBS 4")).times == 1
    with pytest.raises(InputError, match="LBS 3 is 3 micro-batches, which do not divide"):
        run(**PIPELINE, notes="LBS 3")


def answer_s(found: RunJob) -> float:
    """The seconds that are answered; bounds lie around them."""
    job = found.job
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    answer = answered(predictor.predict(job.plan), found).prediction
    assert answer is not None
    assert answer.iteration_s_low < answer.iteration_s < answer.iteration_s_high
    return answer.iteration_s


def test_maxtext_has_attention_by_transformer_engine() -> None:
    found = run(engine="MaxText (JAX)", zero="fsdp 8")
    assert (found.engine, found.kind.engine) == ("fsdp-te", "")
    assert run(engine="Paxml (JAX)", zero="fsdp 8").engine == "fsdp"
    assert ENGINES["fsdp-te"].shares("h100-80gb") == (0.88, 1.0, 1.11)
