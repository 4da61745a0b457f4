"""Words that tables of runs have for one thing are read alike; empty cells follow from others."""

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from mistlab.core.values import InputError

RUN = {
    "engine": "torchtitan",
    "hardware": "H100",
    "gpus": "16",
    "layers": "8",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "8192",
    "vocab": "32768",
    "sequence_length": "4096",
    "micro_batch": "1",
    "tp": "1",
    "pp": "1",
    "recompute": "none",
}


def run(**changes: str) -> Configuration:
    return configuration_of(TableRow(file="runs.csv", number=1, line=2, cells={**RUN, **changes}))


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("FULL_SHARD", 3),
        ("SHARD_GRAD_OP", 2),
        ("_HYBRID_SHARD_ZERO2", 2),
        ("NO_SHARD", 0),
        ("ZeRO stage 2", 2),
        ("zero_3", 3),
        ("fsdp zero2 (SHARD_GRAD_OP)", 2),
        ("optim_grads", 2),
    ],
)
def test_words_for_sharding_are_a_level(words: str, level: int) -> None:
    assert run(zero=words).zero == level


@pytest.mark.parametrize("column", ["experts", "topk", "ep", "etp", "vpp", "cp"])
def test_a_zero_says_that_there_is_none(column: str) -> None:
    assert run(**{column: "0"}) == run(**{column: ""})


@pytest.mark.parametrize(
    ("engine", "words", "treated"),
    [
        ("Megatron-Core", "full uniform 1", {"checkpointed_layers": 8}),
        ("Megatron-Core", "full block 3 layers per stage", {"checkpointed_layers": 3}),
        ("Megatron-Core", "block 3", {"checkpointed_layers": 3}),
        ("Megatron-Core", "selective", {"core_recomputed_layers": 8}),
        ("torchtitan", "selective", {"products_recomputed_layers": 8}),
        ("torchtitan", "activation checkpointing", {"checkpointed_layers": 8}),
        ("Megatron-Core", "selective:layernorm", {}),
        ("Megatron-Core", "none (flash attention)", {}),
    ],
)
def test_words_for_recomputation_are_blocks(
    engine: str, words: str, treated: dict[str, int]
) -> None:
    (stage,) = job_of(run(engine=engine, recompute=words)).job.plan.stages
    names = (
        *("checkpointed_layers", "core_recomputed_layers"),
        "products_recomputed_layers",
    )
    assert {name: value for name in names if (value := stage.value(name))} == treated


def test_the_batches_of_a_step_say_the_data_parallel_ranks() -> None:
    changes = {"gpus": "", "tp": "2", "global_batch": "64", "grad_accumulation": "8"}
    found = run(**changes)
    assert (found.data_parallel, found.num_gpus) == (8, 16)
    assert "dp is empty: 8 assumed (global_batch / micro-batches)" in found.notes
    assert run(**changes | {"grad_accumulation": ""}).data_parallel == 1


@pytest.mark.parametrize("words", ["cpu optimizer", "weights + activations", "0"])
def test_times_of_a_run_with_states_in_host_memory_are_those_without(words: str) -> None:
    notes = run(offload=words).notes
    assert any(note.startswith("times are predicted without") for note in notes) == (words != "0")


def test_an_unknown_engine_that_shards_gradients_is_predicted_as_one_that_does() -> None:
    found = run(engine="Colossal-AI", zero="zero2")
    assert (found.engine, found.zero) == ("fsdp", 2)
    assert run(engine="Colossal-AI", zero="1").engine == "megatron"


def test_ranks_share_heads_of_keys_where_there_are_fewer() -> None:
    found = run(tp="16")
    assert found.shape.kv_heads == 16
    assert "8 kv_heads are fewer than tp 16: each rank has one of its own" in found.notes
    assert run(tp="8").shape.kv_heads == 8


@pytest.mark.parametrize(
    ("engine", "stages", "problem"),
    [
        ("Megatron-LM", 16, "pp: 16 stages for 8 blocks: give at most 8"),
        ("nanotron", 1_000_000, "pp: 1000000 stages for 8 blocks: give at most 1024"),
    ],
)
def test_a_pipeline_with_too_many_stages_is_refused_at_once(
    engine: str, stages: int, problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        job_of(run(engine=engine, pp=str(stages), gpus=str(stages), global_batch="8"))
    assert str(refused.value) == problem
