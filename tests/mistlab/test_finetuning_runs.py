"""Rows of runs that fine-tune: their software, what lies on the host, lengths, tiles and GPUs."""

from dataclasses import replace

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.dialects.dialect import row_of
from experiments.runs.kept_elsewhere import KeptElsewhere
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from experiments.runs.shapes import shape_of, within_samples
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.engines.engine import ENGINES
from mistlab.graph.library import graph_of
from mistlab.job.prediction import Prediction
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from simulators.symbolic import SymbolicPredictor

ROW = {
    "engine": "TRL SFT",
    "hardware": "A100-80GB",
    "gpus": "1",
    "model": "llama3-8b",
    "sequence_length": "2048",
    "micro_batch": "2",
    "grad_accumulation": "1",
    "method": "full",
    "precision": "bf16",
    "recompute": "none",
}


def run(**cells: str) -> Configuration:
    row = TableRow(file="runs.csv", number=1, line=2, cells={**ROW, **cells})
    return configuration_of(row)


def predicted(**cells: str) -> tuple[Prediction, Prediction]:
    """A row's plan as it is, and without what the run does not keep."""
    job = job_of(run(**cells))
    work, cluster, plan = job.job.workload, job.job.cluster, job.job.plan
    whole = SymbolicPredictor(workload=work, cluster=cluster).predict(plan)
    return whole, job.elsewhere.applied(whole, lambda _: cluster.memory_bytes)


@pytest.mark.parametrize(
    ("engine", "more", "name"),
    [
        ("HF PEFT 0.19", {}, "trainer"),
        ("litgpt (Fabric)", {}, "trainer-loop"),
        ("Surogate", {"precision": "QoNF4"}, "trainer-fused"),
        ("Surogate", {"precision": "BF16 products"}, "llmq"),
        ("TRL SFT", {"date": "2024-03"}, "trainer-wide-logits"),
        ("TRL SFT", {"date": "2025-03"}, "trainer"),
        ("atorch FSDP", {"precision": "bf16 (amp: fp32 weights)"}, "trainer-autocast"),
        ("Unsloth", {}, "trainer-fused"),
        ("torchtune", {}, "trainer"),
        ("torchtune", {"compiled": "yes"}, "fsdp-compiled"),
        (
            "ArcticTraining (ALST)",
            {"loss_kernel": "tiled loss (Liger) + tiled MLP"},
            "trainer-tiled",
        ),
        ("ArcticTraining (ALST)", {"loss_kernel": "tiled loss (Liger)"}, "trainer-fused"),
        ("llmq (C++/CUDA)", {}, "llmq"),
    ],
)
def test_software_is_told_by_its_name(engine: str, more: dict[str, str], name: str) -> None:
    assert run(engine=engine, **more).engine == name


@pytest.mark.parametrize(
    ("gpus", "said", "way"), [("1", "", "none"), ("4", "", "full"), ("1", "full", "full")]
)
def test_litgpt_recomputes_where_it_shards(gpus: str, said: str, way: str) -> None:
    found = run(engine="litgpt (Fabric)", gpus=gpus, recompute=said)
    assert (found.recompute.way, found.saves_unsaid) == (way, False)


@pytest.mark.parametrize(
    ("config", "gpus", "way"),
    [("gemma-2b/lora", 1, "none"), ("phi-2/full", 2, "full"), ("gemma-2b/full", 4, "full")],
)
def test_litgpt_runs_on_the_gpus_of_its_file(config: str, gpus: int, way: str) -> None:
    notes = f"epochs 2; config file {config}.yaml"
    small = run(engine="litgpt (Fabric)", gpus="4", recompute="", notes=notes)
    assert (small.num_gpus, small.recompute.way) == (gpus, way)
    text = f"gpus 4 are those of the machine: the run uses {gpus}"
    assert (text in small.notes) == (gpus < 4)


@pytest.mark.parametrize(
    ("said", "way"), [("", "full"), ("none", "none"), ("selective", "selective")]
)
def test_scripts_for_ulysses_recompute_unless_a_row_says_otherwise(said: str, way: str) -> None:
    split = {"gpus": "8", "sp_ulysses": "8", "zero": "2", "recompute": said}
    assert run(engine="Megatron-DeepSpeed, Ulysses", **split).recompute.way == way
    if not said:
        assert run(engine="Megatron-DeepSpeed", gpus="8", recompute="").recompute.way == "none"


@pytest.mark.parametrize(
    ("model", "method", "date", "adapters"),
    [
        ("llama3-8b", "lora", "2024-10", (8, "attention")),
        ("llama3-8b", "lora", "2024-12", (8, "all")),
        ("llama3-8b", "qlora", "2024-10", (8, "all")),
        ("llama3.2-3b", "lora", "2025-02", (64, "all")),
        ("llama3-70b", "lora", "2024-10", (16, "attention")),
        ("llama3.1-405b", "qlora", "2024-10", (16, "all")),
    ],
)
def test_torchtune_has_the_adapters_of_its_files(
    model: str, method: str, date: str, adapters: tuple[int, str]
) -> None:
    own = run(engine="torchtune", model=model, method=method, date=date)
    assert (own.adapter_rank, own.adapter_targets) == adapters
    given = {"adapter_rank": "32", "adapter_targets": "gate_proj"}
    told = run(engine="torchtune", model=model, method=method, date=date, **given)
    assert (told.adapter_rank, told.adapter_targets) == (32, "all")


@pytest.mark.parametrize(
    ("engine", "packing", "date", "size"),
    [
        ("torchtune", "yes", "2024-10", 256),
        ("torchtune", "yes", "2025-02", 256),
        ("torchtune", "yes", "2024-06", None),
        ("torchtune", "no", "2024-10", None),
        ("Surogate", "yes", "2026-07", None),
    ],
)
def test_packed_samples_of_torchtune_attend_to_themselves(
    engine: str, packing: str, date: str, size: int | None
) -> None:
    cells = {"engine": engine, "date": date, "sequence_length": "4096", "compiled": "yes"}
    packed = run(**cells, packing=packing)
    window = packed.shape.model.window
    assert (window and window.size) == size
    if size is not None:
        faster, whole = (
            predicted(**cells, packing=kept)[0].iteration_s for kept in (packing, "no")
        )
        # Attention to all earlier tokens of 4,096 takes 7 % of operations, at a lower rate.
        assert 0.7 < faster / whole < 0.95


def test_windows_of_a_model_stay_where_samples_are_packed() -> None:
    shape = shape_of(row_of({**ROW, "model": "gpt-oss-20b", "engine": "torchtune"}))[0]
    assert shape.model.window is not None
    assert within_samples(shape, 256) == within_samples(shape, None) == shape


@pytest.mark.parametrize(
    ("engine", "cells", "way"),
    [
        ("TRL SFT", {"cp": "8"}, GATHER),
        ("XTuner (DeepSpeed)", {"cp": "8"}, RING),
        ("TRL SFT", {"sp_ulysses": "8"}, HEADS),
        ("ArcticTraining", {"sp_ulysses": "8"}, HEADS),
        ("XTuner (DeepSpeed)", {"sp_ulysses": "8"}, HEADS),
        ("XTuner (DeepSpeed)", {"sp_ulysses": "1"}, RING),
        ("TRL SFT", {}, RING),
    ],
)
def test_context_parallel_ranks_exchange_what_a_row_says(
    engine: str, cells: dict[str, str], way: int
) -> None:
    split = job_of(run(engine=engine, gpus="8", zero="3", **cells))
    assert split.job.plan.stages[0].context_exchange == way
    # More ranks than key heads have one of their own.
    assert split.job.workload.model.kv_heads % int(cells.get("sp_ulysses", 1)) == 0


@pytest.mark.parametrize(("notebook", "stages"), [("kaggle/Gemma4_(31B)-Text", 2), ("nb/Own", 1)])
def test_a_notebook_may_spread_blocks_over_gpus(notebook: str, stages: int) -> None:
    spread = run(engine="Unsloth", source_url=f"{notebook}.ipynb", method="qlora")
    made = job_of(spread).job.plan
    assert [stage.layers for stage in made.stages] == [32 // stages] * stages
    assert made.num_gpus == spread.data_parallel * stages == stages
    cells = {**ROW, "engine": "Unsloth", "source_url": notebook}
    assert row_of(cells).peak_of == ("first" if stages > 1 else "fullest")


def test_sizes_of_a_script_count_before_those_of_a_table() -> None:
    sizes = {"layers": "22", "hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "5632"}
    cells = {**sizes, "engine": "plain PyTorch", "model": "llama2-1b (TinyLlama shape)"}
    assumed, told = (
        run(**cells, source=source).shape.model
        for source in ("own", "pytorch/ao torchao/prototype/quantized_training/README.md")
    )
    assert (assumed.layers, assumed.hidden, assumed.kv_heads, assumed.ffn) == (22, 2048, 4, 5632)
    assert (told.layers, told.hidden, told.kv_heads, told.ffn) == (24, 1536, 24, 6144)


@pytest.mark.parametrize(
    ("targets", "kept"),
    [("q_proj,v_proj", "attention"), ("all linear", "all"), ("gate_proj,up_proj", "all")],
)
def test_products_with_adapters_are_told(targets: str, kept: str) -> None:
    lora = {"method": "lora", "adapter_rank": "16", "adapter_targets": targets}
    found = run(**lora)
    assert (found.train, found.adapter_rank, found.adapter_targets) == ("adapters", 16, kept)
    # Of 8-bit products too, which have adapters of 16 bits.
    assert predicted(**lora, precision="fp8", hardware="H100")[0].iteration_s > 0


def test_paged_states_are_no_memory_of_torch_s_and_leave_a_full_gpu() -> None:
    whole, _ = predicted()
    stage = whole.stages[0]
    without = KeptElsewhere(pages=True).applied(whole, lambda _: stage.peak_reserved_bytes)
    gone = stage.peak_allocated_bytes - without.stages[0].peak_allocated_bytes
    assert gone == stage.memory.optimizer > 0
    # A driver sees them on the GPU, as far as there is room.
    kept = KeptElsewhere(pages=True, counts_pages=True)
    room = stage.peak_reserved_bytes - stage.memory.optimizer // 2
    assert kept.applied(whole, lambda _: room).stages[0].peak_reserved_bytes == room
    assert kept.applied(whole, lambda _: stage.peak_reserved_bytes).stages[0] == stage


def test_gradients_come_with_the_backward_pass_of_a_step_of_one_micro_batch() -> None:
    whole, own = (one.stages[0] for one in predicted())
    assert whole.peak_allocated_bytes - own.peak_allocated_bytes == whole.memory.gradients
    whole, own = (one.stages[0] for one in predicted(grad_accumulation="2"))
    assert own == whole


def test_gradients_are_there_where_activations_are_gone() -> None:
    """Where blocks keep their inputs alone, the last blocks' gradients stand beside the first."""
    whole, own = (one.stages[0] for one in predicted(recompute="full"))
    gone = whole.peak_allocated_bytes - own.peak_allocated_bytes
    assert gone <= whole.memory.activations + whole.memory.logits
    assert gone < whole.memory.gradients


@pytest.mark.parametrize(
    ("offload", "names"),
    [
        ("optimizer", ("optimizer",)),
        ("weights and optimizer", ("weights", "optimizer")),
    ],
)
def test_states_on_the_host_take_no_memory(offload: str, names: tuple[str, ...]) -> None:
    whole, own = (one.stages[0] for one in predicted(offload=offload, grad_accumulation="2"))
    gone = sum(getattr(whole.memory, name) for name in names)
    assert whole.peak_allocated_bytes - own.peak_allocated_bytes == gone > 0
    assert whole.peak_reserved_bytes - own.peak_reserved_bytes == gone


def test_a_run_that_gives_its_cache_back_reserves_what_its_tensors_take() -> None:
    cells = {"method": "lora", "adapter_rank": "8"}
    _, emptied = predicted(engine="HF PEFT 0.19.2, own loop", **cells)
    assert emptied.stages[0].peak_reserved_bytes == emptied.stages[0].peak_allocated_bytes
    _, kept = predicted(engine="HF PEFT 0.19.2", **cells)
    assert kept.stages[0].peak_reserved_bytes > kept.stages[0].peak_allocated_bytes


# The tokens of a micro-batch, and the widths of the products of Llama 3 8B's blocks.
TOKENS, OUTPUTS = 2 * 2048, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
OF_BLOCKS = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)


@pytest.mark.parametrize(
    ("cells", "more", "bytes_"),
    [
        # A loop of one's own holds the logits, unless they come in chunks.
        ({"engine": "TRL SFT"}, {"source": "DeepSpeed blogs/muon-optimizer"}, TOKENS * 2 * 128256),
        (
            {"engine": "TRL SFT", "loss_kernel": "chunked nll"},
            {"source": "DeepSpeed blogs/muon-optimizer"},
            0,
        ),
        # A scale of each output keeps it, of all blocks or of the one that is recomputed.
        (
            {"engine": "litgpt", "method": "adapter"},
            {"method": "adapter_v2"},
            TOKENS * 2 * OUTPUTS * 32,
        ),
        (
            {"engine": "litgpt", "method": "adapter", "recompute": "full"},
            {"method": "adapter_v2"},
            TOKENS * 2 * OUTPUTS,
        ),
        # DeepSpeed's bucket of 500 million gradients, on one GPU too.
        (
            {"engine": "HF Trainer + DeepSpeed", "method": "lora", "gpus": "1"},
            {"zero": "2"},
            2 * 500_000_000,
        ),
        # FSDP's gradients of blocks with adapters have zeros for frozen weights, over several
        # micro-batches.
        (
            {"engine": "TRL SFT", "method": "lora"},
            {"engine": "litgpt", "zero": "3"},
            2 * OF_BLOCKS,
        ),
        (
            {"engine": "TRL SFT", "method": "lora", "grad_accumulation": "1"},
            {"engine": "litgpt", "zero": "3"},
            0,
        ),
    ],
)
def test_scripts_hold_more_than_their_plans(
    cells: dict[str, str], more: dict[str, str], bytes_: int
) -> None:
    cells = {"grad_accumulation": "2", "gpus": "2", **cells}
    plain, script = (run(**each).elsewhere.beside_bytes for each in (cells, {**cells, **more}))
    if more.get("engine") == "litgpt":
        # Its masks before adapters, too.
        plain += run(engine="litgpt", method="lora").elsewhere.beside_bytes
    assert script - plain == bytes_


@pytest.mark.parametrize(
    ("cells", "way"),
    [
        ({"source": "THUDM/GLM-4", "model": "glm4-9b"}, "full"),
        ({"source": "THUDM/GLM-4", "model": "glm4-32b"}, "none"),
        ({"engine": "torchtune", "date": "2024-04", "model": "llama2-7b", "gpus": "2"}, "none"),
        ({"engine": "torchtune", "date": "2025-02", "model": "llama2-7b", "gpus": "2"}, "none"),
        ({"engine": "torchtune", "date": "2024-04", "model": "llama2-7b", "gpus": "1"}, "full"),
        # The file has batches of two.
        ({"engine": "torchtune", "model": "llama2-7b", "gpus": "2", "micro_batch": "4"}, "full"),
    ],
)
def test_blocks_are_recomputed_as_in_the_files_of_the_time(cells: dict[str, str], way: str) -> None:
    row = {"engine": "HF Trainer + DeepSpeed", "method": "lora", "recompute": "full", **cells}
    assert run(**row).recompute.way == way


def test_weights_of_axolotl_s_fsdp_have_16_bits() -> None:
    cells = {"engine": "axolotl", "source": "examples/gpt-oss", "gpus": "8", "precision": ""}
    assert run(**cells).states == "16bit"


def test_a_loss_in_chunks_of_16_bits_has_no_logits_of_32() -> None:
    script, trainer = (ENGINES[name].memory["bf16"] for name in ("trainer-loop", "trainer"))
    assert replace(script, wide_logits=trainer.wide_logits, quantised_inputs=1) == trainer
    # Log-probabilities of 16 bits, and gradients of a chunk.
    assert script.wide_logits == 2 < trainer.wide_logits


def test_a_run_fits_without_what_is_on_its_host() -> None:
    whole, _ = predicted()
    least = whole.stages[0].peak_reserved_bytes
    kept = KeptElsewhere(optimizer=True)
    room = least - whole.stages[0].memory.optimizer
    assert kept.applied(whole, lambda _: room).fits
    assert not kept.applied(whole, lambda _: room - 1).fits


def test_inputs_of_blocks_leave_where_blocks_keep_nothing_else() -> None:
    assert stage_of(run(offload="activation checkpoints", recompute="full")) == 1.0
    assert stage_of(run(offload="activation checkpoints")) == 0.0


def stage_of(one: Configuration) -> float:
    return job_of(one).job.plan.stages[0].offload.activations


@pytest.mark.parametrize(
    ("kind", "tokens"), [("cap; variable (dataset of the notebook)", 1304), ("exact", 8192)]
)
def test_a_cap_is_no_length(kind: str, tokens: int) -> None:
    assert run(sequence_length="8192", length_kind=kind).sequence_length == tokens


@pytest.mark.parametrize(
    ("notebook", "cap", "tokens"),
    [
        ("nb/Llama3_(8B)-Alpaca.ipynb", "2048", 1304),
        ("nb/Llama3_(8B)-Conversational.ipynb", "2048", 2048),
        ("nb/Gemma4_(31B)-Text.ipynb", "8192", 4096),
        ("", "2048", 1304),
    ],
)
def test_conversations_fill_a_cap_and_instructions_do_not(
    notebook: str, cap: str, tokens: int
) -> None:
    kind = "cap; variable (dataset of the notebook)"
    chat = run(engine="Unsloth", source_url=notebook, length_kind=kind, sequence_length=cap)
    assert chat.sequence_length == tokens


def test_a_length_copied_wrong_is_that_of_the_script() -> None:
    cells = {"source_url": "nb/gpt_oss_(20B)_500K_Context_Fine_tuning.ipynb"}
    long = run(engine="Unsloth", sequence_length="500", **cells)
    assert (long.sequence_length, long.engine, long.loss) == (500_000, "trainer-tiled", "chunked")
    assert "sequence_length 500 is 500,000 in the run's script" in long.notes


def test_sequences_are_padded_for_the_ranks_that_share_them() -> None:
    own = run(gpus="32", sp_ulysses="32", dp="1", sequence_length="36000", zero="3")
    assert own.sequence_length == 36032
    assert "sequences are padded to 36032 tokens for 32 ranks" in own.notes


def test_tiled_networks_have_the_tokens_of_a_tile() -> None:
    """What is as wide as the network has as many tokens as the model is wide; all else stays."""
    work = job_of(run()).job.workload
    tiled, whole = (graph_of(work, kind).counts.block for kind in ("tiled", ""))
    pairs = {
        str(before.size_bytes): str(after.size_bytes)
        for before, after in zip(whole.saved, tiled.saved, strict=True)
    }
    assert {old: new for old, new in pairs.items() if old != new} == {
        "4*b*f*s/tp": "4*f*h/tp",
        "2*b*f*s/tp": "2*f*h/tp",
    }
    assert any("b*f*s" in str(peak.size_bytes) for peak in whole.peaks)
    assert not any("b*f*s" in str(peak.size_bytes) for peak in tiled.peaks)


def test_engines_of_trainers_differ_in_their_facts() -> None:
    eager, fused, tiled = (
        ENGINES[name].memory["bf16"] for name in ("trainer", "trainer-fused", "trainer-tiled")
    )
    assert (eager.kept_by, fused.kept_by, tiled.kept_by) == ("eager", "", "tiled")
    assert replace(tiled, kept_by="", wide_logits=0, fuses_loss=True) == fused
    # Of weights of few bits only products in torch's own operators keep inputs, and a script's loop
    # those of the micro-batch before.
    inputs = [
        one.quantised_inputs for one in (eager, fused, ENGINES["trainer-loop"].memory["bf16"])
    ]
    assert inputs == [1, 0, 2]
    # Weights, gradients and moments of 16 bits.
    own = ENGINES["llmq"].memory["bf16"]
    assert (own.weight, own.gradient, own.optimizer) == (2, 2, 4)


def test_newer_gpus_of_a_line_make_more_of_a_watt() -> None:
    """A card of the next generation with an L4's figures several times over: as much faster, and a
    part of a generation's gain more."""
    own = catalog.hardware("rtx-pro-6000-96gb")
    assert own.provenance.compute is not None
    assert own.provenance.compute.source == "l4-24gb"
    lender = catalog.hardware("l4-24gb")
    assert own.compute is not None
    assert lender.compute is not None
    rates = [one.rate("matmul").tflops for one in (own.compute, lender.compute)]
    peaks = own.gpu.peak_tflops.fp16 / lender.gpu.peak_tflops.fp16
    watts = (own.gpu.board_watts or 0) / (lender.gpu.board_watts or 1)
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0] / rates[1] == pytest.approx(peaks**0.43 * (watts * 1.36) ** 0.57, rel=1e-3)


def test_a_peak_is_near_a_published_one() -> None:
    """Llama 3.2 3B in 16 bits with an optimizer that steps in the backward pass and activations on
    the host: torchtune prints 21.8 GiB."""
    shape = {"layers": "28", "hidden": "3072", "heads": "24", "kv_heads": "8", "ffn": "8192"}
    _, own = predicted(
        engine="torchtune",
        model="llama3.2-3b",
        vocab="128256",
        **shape,
        sequence_length="4096",
        length_kind="packed, exact",
        precision="bf16 (weights and states)",
        recompute="full",
        offload="activations",
        optimizer="optimizer in backward",
        compiled="yes",
    )
    assert own.stages[0].peak_allocated_bytes / GIB_BYTES == pytest.approx(21.8, rel=0.1)


@pytest.mark.parametrize(
    ("model", "rank"),
    [
        *(("llama3.2-1b", 64), ("llama3.2-3b", 64), ("mistral-7b", 64), ("gemma2-9b", 64)),
        *(("llama2-13b", 8), ("llama3-8b", 8), ("qwen2.5-3b", 8), ("qwen2.5-72b", 8)),
        *(("qwen2.5-0.5b", 32), ("qwen2-1.5b", 32), ("qwen3-0.6b", 32)),
        *(("llama2-70b", 16), ("llama3.1-405b", 16), ("llama3.2-vision-90b", 8)),
    ],
)
def test_adapters_of_torchtune_have_the_ranks_of_its_files(model: str, rank: int) -> None:
    row = row_of({"engine": "torchtune", "method": "lora", "model": model})
    assert row.usual_rank == rank
