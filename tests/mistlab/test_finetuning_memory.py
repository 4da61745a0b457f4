"""What runs that fine-tune hold beyond a plan: whole states, inputs of products, 32-bit copies."""

import pytest

from experiments.runs.copy_engines import OF_LINK, with_copy_engines
from experiments.runs.dialects.dialect import row_of
from experiments.runs.run_jobs import job_of
from experiments.runs.shapes import shape_of
from mistlab import catalog
from mistlab.graph.library import graph_of
from tests.mistlab.test_finetuning_runs import predicted, run

LITGPT = {"engine": "litgpt (Fabric; FSDP)", "gpus": "4", "grad_accumulation": "1"}
QLORA = {"method": "qlora", "adapter_rank": "8", "adapter_targets": "q,v"}


def test_a_checkpoint_is_read_into_whole_weights() -> None:
    """Lightning's Fabric gathers all weights beside its shard."""
    lora = {**LITGPT, "method": "lora", "adapter_rank": "8", "sequence_length": "128"}
    whole, own = (one.stages[0] for one in predicted(**lora))
    assert run(**lora).zero == 3
    assert own.peak_allocated_bytes == 5 * whole.memory.weights > whole.peak_allocated_bytes


def test_gradients_are_whole_until_the_last_micro_batch() -> None:
    several = {**LITGPT, "sequence_length": "512", "grad_accumulation": "4"}
    whole, own = (one.stages[0] for one in predicted(**several))
    assert own.peak_allocated_bytes - whole.peak_allocated_bytes == 3 * whole.memory.gradients


def test_products_of_few_bits_keep_their_inputs_of_two_micro_batches_in_a_loop() -> None:
    """Those of frozen products too, and in a loop those of the micro-batch before."""
    one_gpu = {**QLORA, "gpus": "1", "sequence_length": "1024"}
    by_engine = {
        name: predicted(**one_gpu, engine=engine)[0].stages[0].memory.activations
        for name, engine in (
            ("fused", "Unsloth"),
            ("eager", "HF PEFT"),
            ("loop", "litgpt (Fabric)"),
        )
    }
    dense = predicted(**{**one_gpu, "method": "lora"}, engine="HF PEFT")[0]
    tokens, model = 2 * 1024, catalog.model("llama3-8b")
    of_network = 2 * tokens * (model.hidden + model.ffn) * model.layers
    assert by_engine["eager"] - dense.stages[0].memory.activations == of_network
    # Queries', keys' and values' input; attention's own result is not counted once more.
    of_attention = 2 * tokens * model.hidden * model.layers
    assert by_engine["loop"] - by_engine["eager"] == of_network + of_attention
    assert by_engine["fused"] < dense.stages[0].memory.activations


def test_block_inputs_have_32_bits_under_autocast() -> None:
    mixed = {"engine": "atorch FSDP", "recompute": "full"}
    wide = run(**mixed, precision="bf16 (amp: fp32 weights)")
    assert wide.engine == "trainer-autocast"
    pair = [
        predicted(**{**mixed, "precision": text})[0].stages[0].memory
        for text in ("bf16 (amp: fp32 weights)", "bf16")
    ]
    model = catalog.model("llama3-8b")
    inputs = 2 * 2 * 2048 * model.hidden * model.layers
    assert pair[0].activations - pair[1].activations == inputs
    assert pair[0].weights == 2 * pair[1].weights


def test_adapters_take_the_time_of_what_they_move() -> None:
    lora = {"method": "lora", "adapter_rank": "8", "gpus": "1", "sequence_length": "2048"}
    work = job_of(run(**lora)).job.workload
    found = [
        one
        for one in graph_of(work).mapping["block"]["operators"]
        if one["name"] == "mistlab.adapter"
    ]
    assert {(one["module"], one["phase"]) for one in found} == {
        (module, phase)
        for module in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
        for phase in ("forward", "backward")
    }
    times = [
        predicted(**lora, adapter_targets=targets)[0].iteration_s
        for targets in ("q_proj,v_proj", "all linear")
    ]
    assert times[1] > 1.02 * times[0]


@pytest.mark.parametrize(
    ("model", "family", "tied"),
    [
        ("phi-2", "falcon", False),
        ("stablelm-alpha-3b", "falcon", False),
        ("llama3.2-1b", "llama", True),
        ("qwen2.5-3b", "llama", True),
        ("qwen2.5-7b", "llama", False),
        ("phi-3-mini", "llama", False),
    ],
)
def test_released_models_have_their_blocks_and_tables(model: str, family: str, tied: bool) -> None:
    cells = {"model": model, "layers": "4", "hidden": "64", "heads": "4", "method": "lora"}
    shape, _ = shape_of(row_of({**cells, "engine": "HF PEFT"}))
    assert (shape.family, shape.tied_embeddings) == (family, tied)
    of_litgpt, _ = shape_of(row_of({**cells, "engine": "litgpt"}))
    assert not of_litgpt.tied_embeddings


def test_copy_engines_reach_their_links_rate() -> None:
    for name, is_slow in (("rtx-4090-24gb", True), ("h100-80gb", False)):
        hardware = catalog.hardware(name)
        found = with_copy_engines(hardware)
        assert found.transfers is not None
        assert (found != hardware) == is_slow
        gather = found.transfers.groups[0].all_gather
        assert gather is not None
        assert (gather.gbytes_per_s == OF_LINK * hardware.node.intra_node_gbytes_per_s) == is_slow
