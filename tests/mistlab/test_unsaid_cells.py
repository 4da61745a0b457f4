"""Rows of fine-tuning that leave cells empty: software's examples, released models, memories."""

from dataclasses import replace

import pytest

from experiments.measured.predict_runs import RowPredictor
from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.dialects.gpu_names import BY_MEMORY, gpus_of
from experiments.runs.judged import judged
from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import answered
from experiments.runs.runs_table import TableRow
from experiments.runs.sized_models import model_of_size, parameters_of
from mistlab import catalog
from mistlab.core.values import InputError
from simulators.symbolic import SymbolicPredictor


def row_of_cells(**cells: str) -> TableRow:
    row = {"hardware": "A100-80GB", "gpus": "1", "model": "llama3-8b", "precision": "bf16", **cells}
    return TableRow(file="runs.csv", number=1, line=2, cells=row)


def run(**cells: str) -> Configuration:
    return configuration_of(row_of_cells(**cells))


def test_examples_of_axolotl_say_what_a_row_does_not() -> None:
    cells = {"engine": "axolotl", "date": "2026-07", "method": "qlora", "base_bits": "4"}
    found = run(**cells, source="axolotl examples/seed-oss/README.md", model="seed-oss-36b")
    assert (found.sequence_length, found.micro_batch, found.adapter_rank) == (2048, 2, 32)
    assert (found.recompute.way, found.saves_unsaid, found.loss) == ("full", False, "chunked")
    assert "sequence_length is empty: 2048 assumed, as examples have it" in found.notes
    # Examples that differ, and a row that says its own.
    found = run(**cells, source="axolotl examples/gpt-oss/README.md", model="gpt-oss-20b")
    assert (found.sequence_length, found.micro_batch, found.adapter_rank) == (4096, 1, 8)
    assert found.elsewhere.activations
    found = run(**cells, sequence_length="512", micro_batch="3", adapter_rank="4", recompute="none")
    assert (found.sequence_length, found.micro_batch, found.adapter_rank) == (512, 3, 4)
    assert found.recompute.way == "none"


def test_lengths_are_assumed_of_fine_tuning_alone() -> None:
    assert run(engine="TRL SFT", method="full").sequence_length == 1024
    with pytest.raises(InputError, match="sequence_length: is empty"):
        run(engine="TRL SFT")


@pytest.mark.parametrize(("accumulation", "sequences"), [("", 4), ("2", 1)])
def test_deepspeed_divides_no_batch_unless_told(accumulation: str, sequences: int) -> None:
    cells = {"engine": "DeepSpeed ZeRO-2", "method": "full", "zero": "2", "global_batch": "16"}
    cells |= {"gpus": "4" if not accumulation else "8", "grad_accumulation": accumulation}
    assert run(**cells).micro_batch == sequences
    assert run(**{**cells, "engine": "TRL SFT"}).micro_batch == 1


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen2.5-32b", "qwen3-30b-a3b"])
def test_a_size_makes_the_catalogue_s_model_of_it(name: str) -> None:
    known = catalog.model(name)
    size = parameters_of(known) / 1e9
    made, note = model_of_size(size, has_experts=known.experts is not None)
    assert made == known
    assert note.startswith(f"no shape is known: {known.layers} blocks of {name} taken for ")


@pytest.mark.parametrize(
    ("name", "billions", "has_experts"),
    [
        *(("dense 7B", 7, False), ("new-0.5b-it", 0.5, False), ("new-600m", 0.6, False)),
        *(("ernie-9-21B-A3B", 21, True), ("sparrow_3B", 3, False)),
    ],
)
def test_a_model_of_a_size_has_as_many_parameters(
    name: str, billions: float, *, has_experts: bool
) -> None:
    shape = run(engine="TRL SFT", method="full", model=name).shape
    assert parameters_of(shape.model) == pytest.approx(1e9 * billions, rel=0.05)
    assert (shape.model.experts is not None) == has_experts
    with pytest.raises(InputError, match="catalogue has no model"):
        run(engine="TRL SFT", model=name, sequence_length="512")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("gemma-3-270m-it", 0.27), ("gemma-3-4b-it", 3.9), ("gemma-3-27b-it", 27.0)),
        *(("Magistral-Small-2509", 23.6), ("LFM2-1.2B", 1.17), ("codegemma-7b", 8.5)),
        *(("seed-oss-36b", 36.2), ("GLM-4.7-Flash", 30.0), ("ERNIE-4.5-21B-A3B-PT", 21.8)),
        *(("glm4-32b", 32.6), ("olmo3-7b", 7.3), ("MiMo-7B", 7.6), ("stablelm-2-1.6b", 1.6)),
        *(("gemma-4-31B-it", 30.7), ("granite-4.0-350m", 0.35), ("bloomz-7b1", 7.1)),
        *(("T0_3B", 2.85), ("mt0-xxl 12B", 12.9)),
    ],
)
def test_a_released_model_has_its_parameters(name: str, billions: float) -> None:
    shape = run(engine="TRL SFT", method="lora", model=name).shape
    assert parameters_of(shape.model) == pytest.approx(1e9 * billions, rel=0.06)


def test_sizes_of_a_row_take_the_place_of_those_of_a_model_of_its_name() -> None:
    sizes = {"layers": "56", "hidden": "6144", "heads": "48", "ffn": "16384", "vocab": "32768"}
    cells = {"engine": "Unsloth", "method": "qlora", "model": "mistral-small-22b"}
    # Mistral Small of September 2024 had 22.2 billion parameters, later ones 23.6.
    assert parameters_of(run(**cells, **sizes).shape.model) == pytest.approx(22.25e9, rel=1e-3)
    assert parameters_of(run(**cells).shape.model) == pytest.approx(23.57e9, rel=1e-3)


def test_command_r_has_one_table_of_tokens() -> None:
    sizes = {"layers": "64", "hidden": "12288", "heads": "96", "ffn": "33792", "vocab": "256000"}
    found = run(engine="XTuner", method="full", model="command-r-plus-104b", kv_heads="8", **sizes)
    assert parameters_of(found.shape.model) == pytest.approx(103.8e9, rel=2e-3)


def test_gpus_may_be_named_by_their_memory() -> None:
    for memory, hardware in BY_MEMORY.items():
        found = gpus_of(f"{memory} GB cards")
        assert (found.hardware, found.memory_gib) == (hardware, None)
        assert (
            found.note == f"hardware {memory} GB cards is not the name of a GPU: {hardware} assumed"
        )
    assert gpus_of("not stated (one GPU)").hardware == gpus_of("").hardware
    for strange in ("25 GB", "48 GB Q7", "24 GB TPU"):
        with pytest.raises(InputError, match="names no GPU with a hardware file"):
            gpus_of(strange)


def test_states_that_stay_must_fit_whatever_is_recomputed() -> None:
    cells = {"engine": "HF Accelerate", "method": "full", "model": "llama3-70b"}
    cells |= {"hardware": "A100-80GB", "micro_batch": "1", "sequence_length": "512"}
    for offload, fits in (("none", False), ("", True)):
        job = job_of(run(**cells, offload=offload))
        predictor = SymbolicPredictor(workload=job.job.workload, cluster=job.job.cluster)
        answer = answered(predictor.predict(job.job.plan), job)
        assert answer.prediction is not None
        assert answer.prediction.fits == fits


@pytest.mark.parametrize(
    ("micro_batch", "said", "way"),
    [("2", "", "none"), ("64", "", "full"), ("64", "none", "none")],
)
def test_blocks_that_keep_more_than_a_gpu_are_recomputed(
    micro_batch: str, said: str, way: str
) -> None:
    """Whatever states are on the host: only what blocks keep counts."""
    cells = {"engine": "llmq (C++/CUDA)", "hardware": "RTX 4090", "model": "qwen2.5-14b"}
    cells |= {"sequence_length": "1024", "global_batch": "64", "micro_batch": micro_batch}
    row = row_of_cells(**cells, recompute=said)
    (answer,) = (one.answer for one in RowPredictor().answers_of([row]))
    assert answer.prediction is not None
    note = "a GPU has no room for what blocks keep, whatever else leaves it: full recomputation"
    assert (note in answer.notes) == (way == "full")
    kept = answer.prediction.stages[0].memory.activations
    # Megatron's systems have ways of their own.
    row = row_of_cells(**{**cells, "engine": "Megatron-LM"}, recompute=said)
    (of_megatron,) = (one.answer for one in RowPredictor().answers_of([row]))
    assert not any("full recomputation" in one for one in of_megatron.notes)
    of_blocks = 48 * int(micro_batch) * 1024 * 2 * 5120
    assert (kept == pytest.approx(of_blocks, rel=1e-3)) == (way == "full")


def test_deepspeed_s_page_of_muon_pads_samples_and_recomputes() -> None:
    page = "deepspeedai/DeepSpeed blogs/muon-optimizer/README.md"
    cells = {"engine": "DeepSpeed ZeRO-2", "gpus": "8", "zero": "2", "global_batch": "32"}
    found = run(**cells, method="full", model="qwen2.5-3b", source=page)
    assert (found.sequence_length, found.micro_batch, found.recompute.way) == (2048, 4, "full")
    assert found.engine == "deepspeed-trainer"


@pytest.mark.parametrize(
    ("method", "zero", "engine", "level"),
    [("full", "3", "deepspeed-trainer", 3), ("lora", "", "trainer", 0)],
)
def test_glm_4_s_script_recomputes_and_adapts_without_deepspeed(
    method: str, zero: str, engine: str, level: int
) -> None:
    cells = {"engine": "HF Trainer + DeepSpeed", "model": "glm4-9b", "method": method, "zero": zero}
    made = run(**cells, source="THUDM/GLM-4 finetune/README.md")
    assert (made.engine, made.zero, made.recompute.way) == (engine, level, "full")


@pytest.mark.parametrize(("date", "tokens"), [("2024-04", 512), ("2024-10", 1304)])
def test_torchtune_s_data_sets_cut_samples_until_summer(date: str, tokens: int) -> None:
    assert run(engine="torchtune", method="lora", date=date).sequence_length == tokens


def test_a_loss_outside_of_the_sharded_model_gathers_the_head() -> None:
    cells = {"engine": "NeMo AutoModel (FSDP2)", "method": "full", "model": "llama3.2-1b"}
    cells |= {"gpus": "8", "sequence_length": "2048", "micro_batch": "8", "zero": "fsdp"}
    fused = run(**cells, loss_kernel="fused linear cross entropy")
    model = catalog.model("llama3.2-1b")
    assert fused.elsewhere.beside_bytes == 2 * 2 * model.vocab * model.hidden
    assert run(**cells).elsewhere.beside_bytes == 0
    # Its table adds an option a row: this one recomputes as the row above.
    of_table = "published; rows are cumulative; two rows print the same"
    assert run(**cells, recompute="none?", quality=of_table).recompute.way == "full"


def test_times_need_lengths_that_are_given() -> None:
    row = row_of_cells(engine="TRL SFT", method="full", step_s="2", micro_batch="1")
    job = job_of(configuration_of(row))
    predictor = SymbolicPredictor(workload=job.job.workload, cluster=job.job.cluster)
    answer = answered(predictor.predict(job.job.plan), job)
    assert judged(row, answer).measured_s is None
    given = replace(row, cells={**row.cells, "sequence_length": "1024"})
    assert judged(given, answer).measured_s == 2.0
