"""Hybrid models in Megatron-LM's words: a pattern of blocks, and the state-space mixer."""

from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from tests.mistlab.megatron_parser import parsed
from tests.mistlab.plans_of_today import job_of

MEGATRON = TARGETS["megatron"]
HYBRIDS = [
    *("nemotron-h-8b", "nemotron-h-56b", "nemotron-3-nano", "nemotron-3-super", "nemotron-3-ultra")
]


def line_of(job: Job) -> str:
    return MEGATRON.write(nearest(job, MEGATRON).job)


def in_stages(model: str, *layers: int, **stage: Any) -> Job:
    return job_of(model, *({**stage, "layers": own} for own in layers))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_started_by_its_own_program(name: str) -> None:
    model = catalog.model(name)
    text = line_of(in_stages(name, model.layers))
    said = parsed(text)
    assert " pretrain_mamba.py " in text
    assert said.is_hybrid_model
    assert said.squared_relu
    assert said.hybrid_override_pattern == model.pattern
    mixer = model.state_space
    assert mixer is not None
    assert (said.mamba_num_heads, said.mamba_head_dim) == (mixer.heads, mixer.channels)
    assert (said.mamba_num_groups, said.mamba_state_dim) == (mixer.groups, mixer.states)
    assert (said.num_experts or 0) == (model.experts.count if model.experts else 0)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((26, 26), 'M-"'),
        (
            (27, 25),
            "--decoder-first-pipeline-num-layers 27 \\\n  --decoder-last-pipeline-num-layers 25",
        ),
        (
            (12, 14, 14, 12),
            "--decoder-first-pipeline-num-layers 12 \\\n  --decoder-last-pipeline-num-layers 12",
        ),
        ((12, 13, 14, 13), '--hybrid-layer-pattern "M-M-M-M*-M-M|-M-M-M*-M-M-M|'),
    ],
)
def test_blocks_of_stages_are_said_without_a_layout(layers: tuple[int, ...], words: str) -> None:
    text = line_of(in_stages("nemotron-h-8b", *layers))
    assert words in text
    assert ("--hybrid-layer-pattern" in text) == (layers[1] == 13)
    parsed(text)


def test_segments_of_a_pattern_are_the_stages_blocks() -> None:
    said = parsed(line_of(in_stages("nemotron-3-nano", 12, 13, 14, 13)))
    segments = said.hybrid_layer_pattern.split("|")
    assert [len(segment) for segment in segments] == [12, 13, 14, 13]
    assert "".join(segments) == catalog.model("nemotron-3-nano").pattern


def test_versions_that_a_hybrid_s_line_needs_are_told() -> None:
    for job, words in (
        (in_stages("nemotron-h-8b", 12, 13, 14, 13), "needs Megatron-core 0.17 or later"),
        (
            in_stages("nemotron-h-8b", 52, checkpointed_layers=52),
            "needs Megatron-core 0.18 or later",
        ),
    ):
        assert any(words in remark.text for remark in nearest(job, MEGATRON).remarks)
    plain = nearest(in_stages("nemotron-h-8b", 52), MEGATRON)
    assert not any("needs Megatron-core" in remark.text for remark in plain.remarks)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "qwen3-next-80b-a3b",
            r"pattern: 'GGGA' has blocks of kind A G, which no option",
        ),
        (
            "llama4-maverick",
            r"pattern: 'DA' has blocks of kind A D, which no option",
        ),
    ],
)
def test_what_is_no_hybrid_of_megatron_is_sent_where_it_can_go(name: str, words: str) -> None:
    job = in_stages(name, 48)
    with pytest.raises(InputError, match=words) as refused:
        nearest(job, MEGATRON)
    assert "leave it out" not in str(refused.value)
    assert str(refused.value).endswith(
        "give --to deepspeed or accelerate, where the training script defines the model"
    )
    for target in ("deepspeed", "accelerate"):
        assert nearest(job, TARGETS[target]).job.workload.model == job.workload.model


def test_a_dense_model_with_squared_relu_keeps_it() -> None:
    job = job_of("llama3-8b")
    model = replace(job.workload.model, name="", family="gpt", mlp_type="mlp", activation="relu2")
    text = line_of(replace(job, workload=replace(job.workload, model=model)))
    assert parsed(text).squared_relu
    assert not parsed(text).swiglu
    assert " pretrain_gpt.py " in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (('-M-M-M-M-M-"', '-M-M-M-M-M"'), "a letter for each block"),
        (("M-M-M-M*", "M-M-M-Mx"), "letters are known"),
        (("--spec megatron.core.models.mamba.mamba_layer_specs", "--spec"), "a specification"),
        (("--mamba-head-dim", "--mamba-channels"), "unrecognized arguments"),
    ],
)
def test_the_parser_of_these_tests_refuses_a_faulty_hybrid(
    fault: tuple[str, str], words: str
) -> None:
    text = line_of(in_stages("nemotron-h-8b", 52))
    assert fault[0] in text
    with pytest.raises(ValueError, match=words):
        parsed(text.replace(*fault))
