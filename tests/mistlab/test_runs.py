"""Rows of tables of measured runs: read into jobs; contradictions are refused."""

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.dialects.dialect import row_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.machine.hardware import OperatorClass

FULL = {
    "engine": "nanotron",
    "hardware": "H100",
    "gpus": "16",
    "gpus_per_node": "8",
    "model": "llama-like 1.3B",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "8192",
    "vocab": "131072",
    "sequence_length": "4096",
    "global_batch": "64",
    "micro_batch": "2",
    "tp": "2",
    "pp": "4",
    "cp": "1",
    "dp": "2",
    "zero": "1",
    "sequence_parallel": "1",
    "recompute": "none",
    "precision": "bf16 (fp32 grads and master)",
    "notes": "tied embeddings",
}


def row(**changes: str) -> TableRow:
    return TableRow(file="runs.csv", number=1, line=2, cells={**FULL, **changes})


def run(**changes: str) -> Configuration:
    return configuration_of(row(**changes))


def job(**changes: str) -> Job:
    return job_of(run(**changes)).job


def test_a_row_is_a_job_of_its_own() -> None:
    found = job()
    model, plan = found.workload.model, found.plan
    assert (model.family, model.kv_heads, model.tied_embeddings) == ("llama", 8, True)
    assert (found.cluster.hardware.name, found.cluster.nodes) == ("h100-80gb", 2)
    assert (plan.engine, plan.micro_batches, plan.num_gpus) == ("nanotron", 16, 16)
    assert {(stage.data_parallel, stage.tensor_parallel, stage.zero) for stage in plan.stages} == {
        (2, 2, 1)
    }


def test_nanotron_divides_blocks_and_head_by_their_weights() -> None:
    # The head weighs as much as four of the sixteen blocks: twenty parts over four stages.
    assert [stage.layers for stage in job().plan.stages] == [6, 5, 5, 0]
    assert [stage.layers for stage in job(engine="Megatron-LM").plan.stages] == [4, 4, 4, 4]


def test_stages_without_blocks_are_noted() -> None:
    found = job_of(run(pp="8", gpus="32", hidden="2048"))
    assert [stage.layers for stage in found.job.plan.stages] == [3, 3, 2, 3, 2, 3, 0, 0]
    assert "2 of 8 stages have no blocks" in found.notes


@pytest.mark.parametrize(
    ("empty", "note"),
    [
        ("dp", "dp is empty: 2 assumed (gpus / (tp pp cp))"),
        ("gpus", "gpus is empty: 16 assumed (tp x pp x cp x dp)"),
        ("global_batch", "global_batch is empty: 32 assumed (8 micro-batches)"),
        ("zero", "zero is empty: level 1 assumed"),
        ("recompute", "recompute is empty: none assumed"),
        ("hardware", "hardware is empty: h100-80gb assumed"),
        ("engine", "engine is empty: predicted as engine megatron"),
        ("vocab", "vocab is empty: 128256 assumed"),
        ("precision", "precision is empty: bf16 assumed"),
        ("sequence_parallel", "sequence_parallel is empty: on assumed"),
    ],
)
def test_an_empty_cell_is_answered_with_the_assumption(empty: str, note: str) -> None:
    assert note in run(**{empty: ""}).notes
    assert note not in run().notes


def test_without_gpus_and_dp_there_is_one_pipeline() -> None:
    found = run(gpus="", dp="", global_batch="")
    assert (found.num_gpus, found.data_parallel) == (8, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"dp": "3"},
            "dp: tp 2 x pp 4 x cp 1 x dp 3 = 24, but gpus is 16: give degrees whose product is 16",
        ),
        ({"layers": ""}, "layers: is empty, and the catalogue has no model 'llama-like 1.3B'"),
        ({"sequence_length": ""}, "sequence_length: is empty"),
        (
            {"hidden": "2048 wide"},
            "hidden: '2048 wide' is not a number above 0: give a number without",
        ),
        ({"tp": "1.5"}, "tp: 1.5 is not a whole number"),
        ({"grad_accumulation": "5"}, "global_batch: 64 is not micro_batch 2 x dp 2 x"),
        ({"hardware": "TPU v5"}, "hardware: 'TPU v5' names no GPU with a hardware file"),
        (
            {"hardware": "A100+H100"},
            "hardware: 'A100+H100' are heterogeneous GPUs, and a row does not say",
        ),
        ({"precision": "int3"}, "precision: 'int3' is unknown"),
        ({"zero": "much"}, "zero: 'much' is not a ZeRO level"),
    ],
)
def test_a_row_that_cannot_be_is_refused(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        run(**changes)
    assert str(caught.value).startswith(problem)


def test_a_model_without_a_shape_is_the_catalogues() -> None:
    found = run(model="llama3-8b", layers="", hidden="", heads="", ffn="", vocab="", kv_heads="")
    assert (found.shape.layers, found.shape.kv_heads, found.shape.vocab) == (32, 8, 128256)
    assert "no shape is given: the catalogue's llama3-8b taken" in found.notes


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_a_model_without_a_shape_has_the_catalogue_s_experts(name: str) -> None:
    empty = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab", "kv_heads"), "")
    experts, known = run(model=name, **empty).shape.model.experts, catalog.model(name).experts
    assert experts is not None
    assert known is not None
    assert (experts.count, experts.active, experts.ffn) == (known.count, known.active, known.ffn)


@pytest.mark.parametrize(
    ("engine", "zero", "name", "level"),
    [
        ("torchtitan", "fsdp2 zero3", "fsdp-eager", 3),
        ("llm-foundry (composer FSDP1)", "fsdp zero2 (SHARD_GRAD_OP)", "fsdp-fused-loss", 2),
        ("NeMo/Megatron-Core 24.07", "zero1 (distributed optimizer)", "megatron-core", 1),
        ("Megatron-Bridge 26.04", "zero1 (distributed optimizer)", "megatron-bridge", 1),
        ("Megatron-LM", "none", "megatron", 0),
        ("Megatron-DeepSpeed", "none", "deepspeed-pipe", 0),
        ("Megatron-Core", "megatron-fsdp optim_grads_params", "megatron-fsdp", 3),
        ("Megatron-Core", "fsdp2", "fsdp", 3),
        ("something new", "fsdp 256 (zero3)", "fsdp", 3),
    ],
)
def test_engines_and_levels_are_recognised(engine: str, zero: str, name: str, level: int) -> None:
    found = run(engine=engine, zero=zero)
    assert (found.engine, found.zero) == (name, level)


@pytest.mark.parametrize(
    ("zero", "replicas"),
    [
        ("fsdp 8 in the node x data 4", 4),
        ("fsdp2 zero3 over 32", 1),
        ("fsdp2 over 8", 4),
        ("hsdp, 2 replicas", 2),
        ("HYBRID_SHARD", 4),
        ("fsdp2 zero3", 1),
    ],
)
def test_shards_may_lie_within_a_part_of_the_ranks(zero: str, replicas: int) -> None:
    found = run(engine="torchtitan", zero=zero, gpus="32", dp="32", tp="1", pp="1", cp="1")
    assert (found.zero, found.state_replicas) == (3, replicas)
    stage, *_ = job_of(found).job.plan.stages
    assert stage.state_replicas == replicas


def test_8_bits_are_megatron_core_s_where_megatron_has_none() -> None:
    found = run(engine="something new", precision="fp8", zero="1")
    assert found.engine == "megatron-core"
    assert "engine megatron has no fp8: predicted as engine megatron-core" in found.notes


def test_the_zero_bubble_fork_is_predicted_as_its_examples_train() -> None:
    fork = "Megatron-LM fork (zero bubble), schedule "
    shape = {"model": "gpt-2B", "layers": "22", "hidden": "2304", "heads": "24", "kv_heads": "24"}
    given = {**shape, "ffn": "", "vocab": "", "pp": "8", "gpus": "8", "tp": "1", "dp": "1"}
    given |= {"micro_batch": "1", "global_batch": "24", "zero": "0", "recompute": "none"}
    given |= {"notes": "first and last stage have one layer less", "precision": "bf16"}
    interleaved = run(engine=f"{fork}1F1B-I", vpp="3", **given)
    assert (interleaved.attention, interleaved.shape.vocab) == ("math", 32000)
    assert interleaved.shape.model.dropout == 0.1
    jobs = {
        schedule: job_of(run(engine=fork + schedule, **given)).job.plan
        for schedule in ("1F1B", "ZB-1p", "ZB-2p", "ZBV")
    }
    found = {name: (plan.engine, plan.order) for name, plan in jobs.items()}
    assert found == {
        "1F1B": ("zero-bubble-waiting", "1f1b"),
        "ZB-1p": ("zero-bubble", "zb-h1"),
        "ZB-2p": ("zero-bubble", "zb-2p"),
        "ZBV": ("zero-bubble", "zb-v"),
    }
    # Elsewhere notes may name it.
    other = {**given, "engine": "Megatron-LM", "notes": "schedule ZBV; batch not stated"}
    made = job_of(run(**other))
    assert (made.job.plan.engine, made.job.plan.order) == ("zero-bubble", "zb-v")
    assert "zb-v is predicted as engine zero-bubble runs it" in made.notes
    # Each of its chunks has a block, but for the embedding's and the head's.
    assert job_of(interleaved).job.plan.order == "interleaved-3"


OF_TODAY = {
    "engine": "Megatron-Bridge 26.04",
    "model": "deepseek-v3",
    "hardware": "B200",
    "gpus": "16",
    "dp": "8",
    "tp": "1",
    "pp": "2",
    "layers": "8",
    "hidden": "7168",
    "heads": "128",
    "kv_heads": "128",
    "ffn": "2048",
    "experts": "256",
    "topk": "8",
    "ep": "8",
    "sequence_parallel": "0",
    "precision": "MXFP8",
    "notes": "",
}


def test_a_row_with_experts_is_built_like_its_namesake() -> None:
    found = job(**OF_TODAY)
    model, stage = found.workload.model, found.plan.stages[0]
    v3 = catalog.model("deepseek-v3")
    assert (model.latent, model.head_dim, model.ffn) == (v3.latent, 192, 18432)
    assert model.experts == v3.experts
    assert (stage.expert_parallel, stage.expert_tensor_parallel) == (8, 1)
    assert found.workload.precision == "fp8"
    assert found.plan.engine == "megatron-bridge"
    assert job(**OF_TODAY, dispatcher="alltoall").plan.engine == "megatron-bridge-alltoall"


@pytest.mark.parametrize(
    ("notes", "tokens"), [("w/o MTP; GA=32", 0), ("w/ MTP; GA=128", 1), ("mtp-num-layers=2; x", 2)]
)
def test_notes_say_how_many_further_tokens_a_model_predicts(notes: str, tokens: int) -> None:
    assert job(**{**OF_TODAY, "notes": notes}).workload.model.further_tokens == tokens
    named = job(**{**OF_TODAY, "model": "deepseek-v3-mtp", "notes": notes})
    assert named.workload.model.further_tokens == max(1, tokens)


def test_notes_say_what_of_a_model_is_different() -> None:
    notes = "MLA, 2 dense layer first; shared expert ffn 3072; non-overlap launch"
    found = job(**{**OF_TODAY, "engine": "Megatron-LM (SimuMax validation)", "notes": notes})
    experts = found.workload.model.experts
    assert experts is not None
    assert (experts.dense_blocks, experts.shared_ffn) == (2, 3072)
    assert (found.plan.engine, found.plan.overlap_communication) == ("megatron-core", False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"topk": ""}, "topk: is empty: give how many of 256 experts a token takes"),
        ({"topk": "300"}, "topk: 300 is more than the 256 experts: give at most 256"),
        ({"ep": "3"}, "ep: 3 does not divide experts 256"),
        ({"etp": "3"}, "etp: 3 does not divide tp x cp x dp = 8: give a divisor of 8"),
    ],
)
def test_experts_that_contradict_are_refused(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        run(**{**OF_TODAY, **changes})
    assert str(caught.value).startswith(problem)


HYBRID = {
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "experts", "topk"), ""),
    "model": "nemotron-3-nano",
    "ep": "8",
    "dispatcher": "hybridep",
    "recompute": "selective (recipe default)",
}


def test_a_hybrid_model_is_taken_whole_by_its_name() -> None:
    found = job(**{**OF_TODAY, **HYBRID})
    known = catalog.model("nemotron-3-nano")
    model = found.workload.model
    assert (model.pattern, model.state_space) == (known.pattern, known.state_space)
    assert (model.experts, model.layers) == (known.experts, 52)
    assert found.plan.stages[0].expert_parallel == 8


def test_a_hybrid_model_of_other_sizes_has_the_blocks_of_its_namesake() -> None:
    found = run(model="nemotron-h-47b", layers="98", hidden="4096", heads="32").shape
    assert (found.layers, found.hidden, found.family) == (98, 4096, "nemotron")
    # The mixer is half as wide as that of the model with 8,192 channels.
    assert dict(found.parts)["state_space"].heads == 128


def test_a_model_that_is_near_to_one_says_what_it_lacks() -> None:
    found = run(**{**OF_TODAY, **HYBRID, "model": "deepseek-v4-flash"})
    assert (found.shape.layers, found.shape.hidden) == (43, 4096)
    assert any("compressed attention is taken as" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"notes": "cuda_graph=full_iteration:"}, "megatron-bridge-graph"),
        ({"notes": "recipe x", "engine": "Megatron-Bridge 26.08"}, "megatron-bridge-graph"),
        ({"notes": "recipe x", "engine": "Megatron-Bridge 26.04"}, "megatron-bridge"),
        ({"engine": "Megatron-Bridge 26.08"}, "megatron-bridge"),
        ({"hardware": "H100", "dispatcher": "hybridep"}, "megatron-bridge-eager"),
        ({"hardware": "H100", "dispatcher": "alltoall"}, "megatron-bridge-alltoall"),
        ({"hardware": "H100", "model": "other"}, "megatron-bridge-alltoall"),
        ({"hardware": "B200", "notes": "tokendrop", "dispatcher": "alltoall"}, "megatron-bridge"),
    ],
)
def test_recipes_say_the_graph_and_the_exchange(changes: dict[str, str], engine: str) -> None:
    found = run(**{**OF_TODAY, "hardware": "GB200", **changes})
    assert found.engine == engine


def test_gradients_of_experts_over_nodes_go_after_the_passes() -> None:
    """Here each of two nodes has all experts of a stage; in a rack nothing crosses."""
    row = {**OF_TODAY, "gpus": "32", "dp": "16", "ep": "8", "dispatcher": "deepep"}
    assert not job(**row).plan.overlap_communication
    assert job(**{**row, "hardware": "GB200"}).plan.overlap_communication
    assert job(**{**row, "ep": "16"}).plan.overlap_communication
    assert job(**{**row, "experts": "", "model": "llama3-8b"}).plan.overlap_communication


def test_a_group_of_experts_is_as_large_as_a_stage_allows() -> None:
    found = run(**{**OF_TODAY, "ep": "16"})
    assert found.expert_parallel == 8
    assert "ep 16 does not divide tp x cp x dp: 8 assumed" in found.notes


@pytest.mark.parametrize(
    ("recompute", "blocks"),
    [("selective:moe+layernorm+core_attn", 23), ("selective:moe_act+layernorm", 0)],
)
def test_recomputed_experts_are_recomputed_blocks(recompute: str, blocks: int) -> None:
    """Of 52 blocks of Nemotron 3 Nano 23 are experts."""
    row = {**OF_TODAY, **HYBRID, "pp": "1", "gpus": "8", "recompute": recompute}
    assert job(**row).plan.stages[0].checkpointed_layers == blocks


def test_4_bits_are_a_precision_of_their_own() -> None:
    assert run(**{**OF_TODAY, "precision": "NVFP4"}).precision == "fp4"


def test_simumax_s_machine_has_slower_16_bit_products_than_other_b200() -> None:
    def tflops(engine: str, operators: OperatorClass) -> float:
        compute = job(engine=engine, hardware="B200").cluster.hardware.compute
        assert compute is not None
        return compute.rate(operators).tflops or 0.0

    others, own = "NeMo", "Megatron-LM (SimuMax validation)"
    assert tflops(own, "matmul") == pytest.approx(1076.2)
    assert tflops(others, "matmul") == pytest.approx(1321.7)
    # Products of experts are as much slower; their own measured rate is that of this machine.
    assert tflops(own, "grouped_matmul") == pytest.approx(1262.1, rel=1e-4)
    assert tflops(others, "grouped_matmul") == pytest.approx(1550.0)


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"engine": "NeMo", "zero": "lora"}, "megatron-core"),
        ({"engine": "NeMo AutoModel", "notes": "Fine-Tuning (LoRA)"}, "fsdp"),
        ({"engine": "Megatron-Bridge", "notes": "phase peft"}, "megatron-bridge"),
        (
            {**OF_TODAY, "engine": "Megatron-Bridge", "dispatcher": "alltoall", "notes": "lora"},
            "megatron-bridge",
        ),
        ({"engine": "Megatron-LM", "notes": "LoRA"}, "megatron"),
    ],
)
def test_runs_that_train_adapters_say_so(changes: dict[str, str], engine: str) -> None:
    found = run(**changes)
    assert (found.engine, found.train) == (engine, "adapters")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"method": "qlora", "adapter_rank": "64"}, ("adapters", 64, "4bit", "whole")),
        ({"method": "lora", "base_bits": "8"}, ("adapters", None, "8bit", "whole")),
        ({"method": "full", "base_bits": "4"}, ("all", None, "16bit", "whole")),
        ({"method": "pissa"}, ("adapters", None, "16bit", "whole")),
        ({"loss_kernel": "chunked nll"}, ("all", None, "16bit", "chunked")),
        ({"loss_kernel": "plain"}, ("all", None, "16bit", "whole")),
    ],
)
def test_columns_of_fine_tuning_are_read(
    changes: dict[str, str], found: tuple[str, int | None, str, str]
) -> None:
    one = run(engine="TRL", **changes)
    assert (one.train, one.adapter_rank, one.base, one.loss) == found


def test_an_optimizer_of_8_bits_and_parallelism_over_heads_are_read() -> None:
    assert run(engine="FSDP", optimizer="AdamW 8-bit").optimizer == "adamw-8bit"
    split = run(engine="FSDP", gpus="8", dp="", tp="1", pp="1", sp_ulysses="4", global_batch="")
    assert (split.context_parallel, split.data_parallel) == (4, 2)


@pytest.mark.parametrize(
    ("told", "blocks", "is_noted"),
    [("4+5+5+4", [3, 5, 5, 3], False), ("4+4+4+4", [4, 4, 4, 4], True)],
)
def test_stages_may_be_told_with_their_ends(told: str, blocks: list[int], is_noted: bool) -> None:
    notes = f"stages of {told} layers counting embedding and head"
    made = job_of(run(engine="Megatron-LM", precision="bf16", notes=notes))
    assert [stage.layers for stage in made.job.plan.stages] == blocks
    assert is_noted == any("are not 16 blocks on pp 4" in note for note in made.notes)


def test_sailor_writes_what_the_driver_counts_without_zero() -> None:
    cells = {**FULL, "engine": "Megatron-DeepSpeed (Sailor)", "zero": "not stated"}
    told = row_of(cells)
    assert (told.reserved, told.of_driver, told.zero_level) == (True, True, 0)
    assert row_of({**cells, "zero": "1"}).zero_level == 1
    assert not row_of({**cells, "engine": "Megatron-DeepSpeed"}).of_driver
