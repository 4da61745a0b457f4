"""Rows of tables of measured runs whose models are built like a namesake of the catalogue."""

from dataclasses import replace

from mistlab import catalog
from tests.mistlab.test_runs import OF_TODAY, job, run


def test_queries_of_latent_attention_are_those_of_the_namesake() -> None:
    sizes = {"hidden": "2048", "heads": "16", "kv_heads": "16", "ffn": "1408"}
    of_experts = {"experts": "64", "topk": "6"}
    model = job(**{**OF_TODAY, **sizes, **of_experts, "model": "moonlight-16b-a3b"}).workload.model
    assert model.latent == catalog.model("moonlight-16b-a3b").latent
    assert model.latent is not None
    assert model.latent.query_rank is None
    assert (model.ffn, model.experts) == (11264, catalog.model("moonlight-16b-a3b").experts)


def test_blocks_with_and_without_experts_take_turns_as_the_namesake_s_do() -> None:
    sizes = {"layers": "48", "hidden": "5120", "heads": "40", "kv_heads": "8", "ffn": "8192"}
    own = {**OF_TODAY, **sizes, "vocab": "202048", "experts": "128", "topk": "1"}
    found = run(**{**own, "model": "llama4-maverick-400b"})
    maverick = catalog.model("llama4-maverick")
    model = found.shape.model
    assert (model.pattern, model.ffn, model.experts) == ("DA", 16384, maverick.experts)
    assert found.kind.blocks == "experts"
    half = run(**{**own, "model": "llama4-maverick", "ffn": "4096"}).shape.model
    assert (half.ffn, half.experts) == (
        8192,
        replace(maverick.experts, ffn=4096, shared_ffn=4096),  # type: ignore[type-var]
    )
