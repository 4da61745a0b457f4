"""Models with experts, latent attention and products of few bits in Megatron-LM's words."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_flags import HARMLESS, TELLING
from mistlab.export.megatron.option_tables import RENAMED
from mistlab.export.nearest import Nearest, nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from tests.mistlab.drawn_plans import drawn_jobs
from tests.mistlab.megatron_parser import parsed, parser
from tests.mistlab.plans_of_today import job_of, jobs_of_today
from tests.mistlab.test_export import what_is_trained

MEGATRON = TARGETS["megatron"]


@cache
def nearest_of_jobs() -> list[tuple[Job, Nearest]]:
    return [(job, nearest(job, MEGATRON)) for job in jobs_of_today(150, seed=5)]


def read_back(job: Job) -> Imported:
    return MEGATRON.read(MEGATRON.write(job), Given(hardware=job.cluster.hardware))


def text_of(job: Job) -> str:
    return MEGATRON.write(nearest(job, MEGATRON).job)


def test_every_plan_comes_back_or_what_was_lost_is_said() -> None:
    exact = 0
    for job, found in nearest_of_jobs():
        assert read_back(found.job).job == found.job
        assert found.is_exact == (what_is_trained(job) == what_is_trained(found.job)), found.remarks
        exact += found.is_exact
    assert 0 < exact < len(nearest_of_jobs())


def test_the_nearest_plan_is_its_own_nearest() -> None:
    for _, found in nearest_of_jobs():
        assert nearest(found.job, MEGATRON).is_exact


def test_megatron_knows_and_takes_every_option_that_is_written() -> None:
    others = [nearest(job, MEGATRON) for job in drawn_jobs(60, seed=99)]
    for found in (*others, *(found for _, found in nearest_of_jobs())):
        text = MEGATRON.write(found.job)
        said, model = parsed(text), found.job.workload.model
        assert (said.num_experts or 0) == (0 if model.experts is None else model.experts.count)
        if model.experts is not None and said.moe_layer_freq is not None:
            assert said.moe_layer_freq.count(0) == model.experts.dense_blocks


def test_every_option_that_is_written_is_read() -> None:
    written = {name for action in parser()._actions for name in action.option_strings}
    known = {RENAMED.get(name, name) for name in written - {"-h", "--help"}}
    assert known <= TELLING | HARMLESS


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("--num-experts", "--number-of-experts"), "unrecognized arguments"),
        (("--sequence-parallel ", ""), "split sequences"),
        (("--moe-router-topk 8", "--moe-router-topk 1"), "softmax comes first"),
        (("--fp8-format hybrid", "--fp8-format fp8"), "invalid choice"),
        (("[1]*58", "[1]*57"), "a pattern has all blocks"),
        (("--rotary-base 1000000", "--rotary-base 1e6"), "invalid int value"),
    ],
)
def test_the_parser_of_these_tests_refuses_what_megatron_refuses(
    fault: tuple[str, str], words: str
) -> None:
    model = "deepseek-v3" if "[1]" in fault[0] else "qwen3-30b-a3b"
    stage = {"tensor_parallel": 2, "sequence_parallel": 1, "layers": catalog.model(model).layers}
    text = text_of(job_of(model, stage, precision="fp8"))
    parsed(text)
    assert fault[0] in text
    with pytest.raises(ValueError, match=words):
        parsed(text.replace(*fault))


LINES = {
    "qwen3-30b-a3b": (
        *("--num-experts 128 --moe-router-topk 8", "--moe-ffn-hidden-size 768", "--qk-layernorm"),
        *("--group-query-attention --num-query-groups 4", "--kv-channels 128"),
        "--rotary-base 1000000",
    ),
    "mixtral-8x7b": ("--num-experts 8 --moe-router-topk 2", "--moe-ffn-hidden-size 14336"),
    "deepseek-v3-mtp": (
        *("--multi-latent-attention --qk-layernorm", "--q-lora-rank 1536 --kv-lora-rank 512"),
        *("--qk-head-dim 128 --qk-pos-emb-head-dim 64", "--v-head-dim 128", "--mtp-num-layers 1"),
        *('--moe-layer-freq "([0]*3+[1]*58)"', "--moe-shared-expert-intermediate-size 2048"),
        "--attention-backend fused",
    ),
    "gpt-oss-20b": (
        *("--window-size 128,0", "--window-attn-skip-freq 2", "--softmax-type learnable"),
        "--attention-backend fused",
    ),
}


@pytest.mark.parametrize("model", LINES)
def test_a_model_is_its_options_and_comes_back_by_its_name(model: str) -> None:
    job = job_of(model, {"expert_parallel": 8, "layers": catalog.model(model).layers})
    found = nearest(job, MEGATRON)
    assert found.is_exact
    text = MEGATRON.write(found.job)
    for words in LINES[model]:
        assert f"  {words}" in text
    assert "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1" in text
    back = read_back(found.job)
    assert back.remarks == ()
    assert back.job.workload.model.name == model
    assert back.job.plan.engine == "megatron-core"


@pytest.mark.parametrize(
    ("hardware", "precision", "words"),
    [
        ("h100-80gb", "fp8", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise \\"),
        ("b200-180gb", "fp8", "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 \\"),
        ("gb300-288gb", "fp4", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 \\"),
        ("mi300x-192gb", "fp8", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise \\"),
        ("h100-80gb", "fp16", "--fp16 \\"),
    ],
)
def test_products_of_few_bits_are_scaled_as_the_machine_does(
    hardware: str, precision: str, words: str
) -> None:
    found = nearest(job_of("llama3-8b", hardware=hardware, precision=precision), MEGATRON)
    assert found.is_exact
    assert f"  {words}\n" in MEGATRON.write(found.job)
    assert read_back(found.job).job == found.job


def test_products_of_few_bits_beside_what_no_engine_has_are_told() -> None:
    wanted = job_of("llama3-8b", {"zero": 1}, precision="fp8")
    given = Given(hardware=wanted.cluster.hardware)
    text = text_of(wanted).replace(
        "--use-distributed-optimizer",
        "--use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer "
        "--optimizer-offload-fraction 0.5",
    )
    found = MEGATRON.read(text, given)
    assert found.job.workload.precision == "bf16"
    assert found.job.plan.stages[0].value("offload_optimizer") == 0.5
    (told,) = [remark for remark in found.remarks if remark.choice == "precision"]
    assert told.kind == "ignored"


@pytest.mark.parametrize(("optimizer", "word"), [("adamw-bf16", "bf16"), ("adamw-8bit", "fp8")])
def test_moments_of_few_bits_are_said(optimizer: Any, word: str) -> None:
    found = nearest(job_of(optimizer=optimizer), MEGATRON)
    text = MEGATRON.write(found.job)
    assert f"--exp-avg-dtype {word} --exp-avg-sq-dtype {word}" in text
    # They belong to the optimizer that is sharded.
    assert "--use-distributed-optimizer" in text
    assert found.job.plan.stages[0].zero == 1
    assert read_back(found.job).job == found.job


def test_tokens_that_experts_drop_are_said() -> None:
    job = job_of("mixtral-8x7b", expert_capacity=1.25, expert_padding=True, expert_imbalance=1.5)
    found = nearest(job, MEGATRON)
    text = MEGATRON.write(found.job)
    assert "--moe-expert-capacity-factor 1.25" in text
    assert "--moe-pad-expert-input-to-capacity" in text
    (told,) = [remark for remark in found.remarks if remark.kind == "approximated"]
    assert str(told).startswith("approximated: expert_imbalance: 1.5 -> 1.0: ")
    assert read_back(found.job).job == found.job
    lost = nearest(job, TARGETS["deepspeed"])
    assert lost.job.workload.expert_capacity is None
    assert "expert_capacity" in {remark.choice for remark in lost.remarks}


ROUTED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "DeepSeek V3's": (
        {},
        "--moe-router-score-function sigmoid --moe-router-num-groups 8 --moe-router-group-topk 4",
        (),
    ),
    "corrections and a loss of sequences": (
        {"correction_rate": 0.001},
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss",
        (),
    ),
    "corrections alone": (
        {"balance_loss": 0.0, "correction_rate": 0.01},
        "--moe-router-bias-update-rate 0.01 --moe-router-load-balancing-type none",
        (),
    ),
    "a softmax over all": (
        {"scores": "softmax", "normalized": False, "correction": False, "correction_rate": 0.0},
        "--moe-router-pre-softmax --moe-router-num-groups 8",
        (),
    ),
    "losses of logits": ({"z_loss": 0.001}, "--moe-z-loss-coeff 0.001", ()),
    "what no option says": (
        {"normalized": False, "best_of_group": 1, "weighs_inputs": True},
        "--moe-router-score-function sigmoid",
        (
            "Megatron-LM normalises sigmoid weights",
            "by their best 2 scores",
            "the experts' outputs",
        ),
    ),
}


@pytest.mark.parametrize("name", ROUTED)
def test_routers_are_options_or_notes(name: str) -> None:
    changes, words, notes = ROUTED[name]
    job = job_of("deepseek-v3", {"layers": 61})
    experts = job.workload.model.experts
    assert experts is not None
    own = replace(experts, router=replace(experts.router, **changes))
    model = replace(job.workload.model, experts=own)
    job = replace(job, workload=replace(job.workload, model=model))
    text = text_of(job)
    parsed(text)
    given = {one.strip(" \\") for one in text.splitlines()}
    for option in words.split(" --"):
        assert any(option.removeprefix("--") in one for one in given), option
    told = [one for one in MEGATRON.notes(job) if "router" in one or "weights" in one]
    assert len(told) == len(notes)
    for note in notes:
        assert any(note in one for one in told), note
    # Another model than the catalogue's keeps the line's router.
    narrow = text.replace("--hidden-size 7168", "--hidden-size 7296")
    back = MEGATRON.read(narrow, Given(hardware=job.cluster.hardware)).job.workload.model
    assert back.experts is not None
    assert (back.experts.router == own.router) == (not notes)


def test_llama_4_s_weights_multiply_what_experts_take() -> None:
    text = text_of(job_of("llama4-scout", {"layers": 48}))
    assert "--moe-apply-probs-on-input" in text
    assert "--moe-router-pre-softmax" not in text
    parsed(text)


def test_stages_divide_experts_alike() -> None:
    found = nearest(job_of("mixtral-8x7b", {"expert_parallel": 8}, {}), MEGATRON)
    assert [stage.expert_parallel for stage in found.job.plan.stages] == [8, 8]
    (told,) = [remark for remark in found.remarks if remark.choice == "expert_parallel"]
    assert told.kind == "approximated"


def test_experts_are_divided_by_no_more_ranks_than_stages_get() -> None:
    """Stages of 8 and 4 GPUs become stages of 6, which 8 parts of experts do not divide."""
    stages: list[dict[str, Any]] = [
        {"data_parallel": 4, "tensor_parallel": 2, "expert_parallel": 8},
        {"data_parallel": 4, "expert_parallel": 4},
    ]
    job = job_of("mixtral-8x7b", *stages)
    for found in (nearest(job, MEGATRON).job.plan, nearest(job, TARGETS["deepspeed"]).job.plan):
        for stage in found.stages:
            parts = stage.expert_parallel * stage.expert_tensor_parallel
            assert stage.num_gpus % parts == 0


def test_tensor_parallel_ranks_with_experts_split_sequences() -> None:
    found = nearest(job_of("mixtral-8x7b", {"tensor_parallel": 2}), MEGATRON)
    assert found.job.plan.stages[0].sequence_parallel == 1
    assert "sequence_parallel" in {remark.choice for remark in found.remarks}
    dense = nearest(job_of("llama3-8b", {"tensor_parallel": 2}), MEGATRON)
    assert dense.job.plan.stages[0].sequence_parallel == 0
    job = job_of("mixtral-8x7b", {"tensor_parallel": 4, "context_parallel": 2})
    odd = replace(job, workload=replace(job.workload, sequence_length=4100))
    with pytest.raises(InputError, match=r"plan\.stages\[0\]: .* give degrees whose product does"):
        nearest(odd, MEGATRON)


def test_experts_with_biases_stay_whole() -> None:
    stage = {"expert_parallel": 2, "expert_tensor_parallel": 4}
    found = nearest(job_of("gpt-oss-20b", stage), MEGATRON)
    (got,) = found.job.plan.stages
    assert (got.expert_parallel, got.expert_tensor_parallel) == (8, 1)
    (without,) = nearest(job_of("mixtral-8x7b", stage), MEGATRON).job.plan.stages
    assert (without.expert_parallel, without.expert_tensor_parallel) == (2, 4)


def test_the_block_for_later_tokens_is_in_a_layout() -> None:
    layers = ({"layers": 31}, {"layers": 30})
    job = job_of("deepseek-v3-mtp", *layers)
    text = text_of(job)
    assert f'--pipeline-model-parallel-layout "E{"t" * 31}|{"t" * 30}mL"' in text
    assert [stage.layers for stage in read_back(nearest(job, MEGATRON).job).job.plan.stages] == [
        *(31, 30)
    ]


@pytest.mark.parametrize(
    ("engine", "model", "is_written"),
    [
        ("megatron-core", "llama3-8b", True),
        ("megatron", "llama3-8b", False),
        ("megatron-core", "mixtral-8x7b", False),
        ("megatron-core-fused-loss", "mixtral-8x7b", True),
    ],
)
def test_a_launch_line_keeps_the_engine(engine: str, model: str, *, is_written: bool) -> None:
    found = nearest(job_of(model, engine=engine), MEGATRON)
    text = MEGATRON.write(found.job)
    assert (f"# predicted under engine {engine}\n" in text) == is_written
    assert read_back(found.job).job.plan.engine == engine
    given = Given(hardware=found.job.cluster.hardware, engine="mistlab")
    assert MEGATRON.read(text, given).job.plan.engine == "mistlab"


@pytest.mark.parametrize(
    ("engine", "model", "standing"),
    [
        ("mistlab", "mixtral-8x7b", "megatron-core"),
        ("mistlab", "llama3-8b", "megatron"),
        ("megatron-bridge", "mixtral-8x7b", "megatron-core"),
        ("megatron-fsdp", "mixtral-8x7b", "megatron-fsdp"),
    ],
)
def test_models_of_today_are_predicted_by_the_engine_of_today(
    engine: str, model: str, standing: str
) -> None:
    assert nearest(job_of(model, engine=engine), MEGATRON).job.plan.engine == standing


def test_a_single_expert_a_token_has_its_softmax_before_it_is_chosen() -> None:
    job = job_of("mixtral-8x7b")
    model = job.workload.model
    assert model.experts is not None
    one = replace(model, name="", experts=replace(model.experts, active=1))
    job = replace(job, workload=replace(job.workload, model=one))
    assert parsed(text_of(job)).moe_router_pre_softmax
    assert read_back(nearest(job, MEGATRON).job).job.workload.model == one


def test_experts_products_of_4_bits_are_told() -> None:
    told = "Megatron-LM runs the experts' GEMMs in 4 bits too; the prediction has them in 8"
    for model, precision in (
        ("mixtral-8x7b", "fp4"),
        ("mixtral-8x7b", "fp8"),
        ("llama3-8b", "fp4"),
    ):
        found = nearest(job_of(model, hardware="b200-180gb", precision=precision), MEGATRON)
        has_told = told in [remark.text for remark in found.remarks]
        assert has_told == (model == "mixtral-8x7b" and precision == "fp4")


def test_latent_attention_without_rotated_channels_is_refused() -> None:
    job = job_of("deepseek-v3", {"layers": 61})
    model = replace(job.workload.model, position_embedding="none", rotary_fraction=0.0)
    with pytest.raises(InputError, match=r"workload\.model\.position_embedding: 'none'"):
        nearest(replace(job, workload=replace(job.workload, model=model)), MEGATRON)


def test_a_rotary_base_is_a_whole_number() -> None:
    job = job_of("llama3-8b")
    model = replace(job.workload.model, rotary_base=500_000.4)
    found = nearest(replace(job, workload=replace(job.workload, model=model)), MEGATRON)
    assert found.job.workload.model.rotary_base == 500_000
    assert "model.rotary_base" in {remark.choice for remark in found.remarks}
