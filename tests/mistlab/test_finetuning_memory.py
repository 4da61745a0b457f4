"""What runs that fine-tune hold beyond a plan: whole states, inputs of products, 32-bit copies."""

import pytest

from experiments.runs.copy_engines import OF_LINK, with_copy_engines
from experiments.runs.dialects.dialect import row_of
from experiments.runs.run_jobs import job_of
from experiments.runs.shapes import shape_of
from experiments.runs.sized_models import parameters_of
from mistlab import catalog
from mistlab.core.units import MIB_BYTES
from mistlab.engines.engine import ENGINES, saved_bytes
from mistlab.graph.library import graph_of
from tests.mistlab.test_finetuning_runs import predicted, run

LITGPT = {"engine": "litgpt (Fabric; FSDP)", "gpus": "4", "grad_accumulation": "1"}
QLORA = {"method": "qlora", "adapter_rank": "8", "adapter_targets": "q,v"}


def test_a_checkpoint_is_read_into_whole_weights() -> None:
    """Axolotl without ``cpu_ram_efficient_loading`` holds all weights beside its shard."""
    lora = {**LITGPT, "method": "lora", "adapter_rank": "8", "sequence_length": "128"}
    lora |= {"engine": "axolotl", "source": "examples/llama-4"}
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


def test_each_chunk_of_a_loss_has_a_whole_gradient_of_the_head() -> None:
    sizes = {"layers": "1", "hidden": "512", "heads": "8", "ffn": "1024", "vocab": "200000"}
    cells = {**sizes, "model": "small", "loss_kernel": "chunked nll", "micro_batch": "1"}
    # Twice the tokens are twice the chunks, each with as many logits.
    short, long = (
        predicted(**cells, engine="TRL SFT", sequence_length=tokens)[0].stages[0]
        for tokens in ("2048", "4096")
    )
    more = long.memory_by_phase.backward - short.memory_by_phase.backward
    # Of the residual stream's width a token keeps 28 bytes of tensors that the layer graph has, 12
    # that eager norms and activations add, and 2 of a gradient; beside them attention's sums of 8
    # heads, deviations of two norms, and the embedding's token with its mask.
    of_token = 512 * (28 + 12 + 2) + 4 * (8 + 2) + 9
    # With a share of the head's gradient it would be less than none.
    assert more == pytest.approx(2048 * of_token, rel=1e-5)


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


LLAMA = catalog.model("llama3-8b")
ENDS = 2 * LLAMA.vocab * LLAMA.hidden


@pytest.mark.parametrize(
    ("cells", "ends", "blocks"),
    [
        # Weights of both ends and of two blocks, and whole gradients of as many.
        ({"method": "full"}, 2, 4),
        # Frozen weights have no gradients.
        ({"method": "lora", "adapter_rank": "8"}, 1, 2),
    ],
)
def test_fsdp_gathers_both_ends_and_the_next_block(
    cells: dict[str, str], ends: int, blocks: int
) -> None:
    sharded = {"gpus": "8", "zero": "fsdp", "precision": "bf16 (weights and states)"}
    whole, _ = predicted(**cells, **sharded, engine="TRL SFT")
    of_block = (parameters_of(LLAMA) - ENDS) / LLAMA.layers
    wanted = 2 * (ends * ENDS + blocks * of_block)
    workspace = ENGINES["trainer"].memory["bf16"].fixed_mib * MIB_BYTES
    assert whole.stages[0].memory.buffers - workspace == pytest.approx(wanted, rel=1e-3)


def test_one_gpu_holds_what_it_fetches_from_the_host() -> None:
    lora = {"method": "lora", "adapter_rank": "8", "sequence_length": "64"}
    offload = {**lora, "offload": "weights", "engine": "HF Trainer + DeepSpeed"}
    # DeepSpeed's ``stage3_max_live_parameters`` and ``reduce_bucket_size``.
    bucket = 2 * 500_000_000
    assert run(**offload).elsewhere.beside_bytes == 2 * 1_000_000_000 + bucket
    assert run(**offload, gpus="2", zero="3").elsewhere.beside_bytes == 0
    # A table that is larger stays as a whole.
    bloom = run(**offload, model="bloomz-7b1")
    assert bloom.elsewhere.beside_bytes == 2 * bloom.shape.model.vocab * 4096 + bucket
    assert run(**{**offload, "offload": "none"}).elsewhere.beside_bytes == 0


def test_frozen_weights_loaded_in_32_bits_are_sharded_so() -> None:
    cells = {"method": "lora", "adapter_rank": "8", "gpus": "8", "zero": "fsdp"}
    narrow, wide = (
        run(**cells, source=f"huggingface/peft docs accelerate/{page}.md").elsewhere.beside_bytes
        for page in ("deepspeed", "fsdp")
    )
    assert wide - narrow == 2 * parameters_of(LLAMA) // 8


@pytest.mark.parametrize(
    ("engine", "date", "bits", "states"),
    [
        ("TRL SFT", "2024-03", "16", "16bit"),
        ("TRL SFT", "2024-03", "4", "mixed"),
        ("TRL SFT", "2024-09", "16", "mixed"),
        ("axolotl", "2026-07", "4", "mixed"),
        ("Unsloth", "2024-03", "16", "mixed"),
        ("torchtune", "2025-02", "16", "16bit"),
    ],
)
def test_adapters_have_32_bits_where_peft_casts_them(
    engine: str, date: str, bits: str, states: str
) -> None:
    found = run(method="qlora" if bits == "4" else "lora", engine=engine, date=date, base_bits=bits)
    assert found.states == states


def test_states_of_8_bits_are_those_of_adapters_alone() -> None:
    lora = {"method": "lora", "adapter_rank": "16", "adapter_targets": "all linear"}
    wide, narrow = (
        predicted(**lora, engine="Unsloth", optimizer=name)[0].stages[0].memory
        for name in ("adamw", "adamw_8bit")
    )
    assert wide.weights == narrow.weights
    adapters = 41_943_040
    assert wide.optimizer - narrow.optimizer == pytest.approx(adapters * saved_bytes("adamw-8bit"))
