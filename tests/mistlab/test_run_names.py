"""Names of GPUs, models and engines in tables of runs match whole words, or say what is taken."""

import pytest

from experiments.runs.configuration import Configuration, engine_of
from experiments.runs.dialects.dialect import row_of, words_of
from experiments.runs.dialects.gpu_names import CHIPS, gpus_of
from experiments.runs.shapes import named_model
from mistlab.calibration.table_rows import is_of_machine
from mistlab.core.values import InputError
from tests.mistlab.test_run_words import run


def chosen(name: str) -> tuple[str, float | None]:
    gpus = gpus_of(name)
    return gpus.hardware, gpus.memory_gib


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("L4", "l4-24gb"),
        ("NVIDIA L4 24GB", "l4-24gb"),
        ("A10G", "a10g-24gb"),
        ("V100-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("A100 (40 GiB)", "a100-40gb"),
        ("h100-80gb", "h100-80gb"),
        ("H100 (A3)", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100SXM5", "h100-80gb"),
        ("H200-141GB", "h200-141gb"),
        ("B200 class (184 GiB)", "gb200-186gb"),
        ("GB200 NVL72", "gb200-186gb"),
        ("GH200-96GB", "gh200-96gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("H100 PCIe", "h100-pcie-80gb"),
        ("H100 NVL 94GB", "h100-nvl-94gb"),
        ("NVIDIA A100-PCIE-80GB", "a100-pcie-80gb"),
        ("L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("RTX A6000", "rtx-a6000-48gb"),
        ("RTX PRO 6000", "rtx-pro-6000-96gb"),
        ("A800-SXM4-80GB", "a800-80gb"),
        ("Tesla T4", "t4-16gb"),
    ],
)
def test_a_gpu_is_the_one_that_is_named(name: str, hardware: str) -> None:
    assert chosen(name) == (hardware, None)
    assert "taken" not in gpus_of(name).note


# Chips of one word, no longer name of which is another's.
WORDS = sorted({chip for chip in CHIPS if " " not in chip} - {"a10", "h20"})


@pytest.mark.parametrize("chip", WORDS)
@pytest.mark.parametrize("strange", ["{}S", "{}0", "{}0-80GB", "X{}", "9{}", "{}E 48GB"])
def test_another_chip_s_name_is_refused_with_near_names(chip: str, strange: str) -> None:
    name = strange.format(chip.upper())
    with pytest.raises(InputError, match=r"names no GPU with a .*: give one of L4, A10G, .*, or"):
        gpus_of(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("L40", "L4"),
        ("H1000", "H100"),
        ("H200 NVL", "H200"),
        ("A100-64GB", "A100-40GB"),
        ("V100S", "V100"),
    ],
)
def test_a_near_chip_is_not_taken_but_told(name: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"did you mean .*'{near}") as error:
        run(hardware=name)
    assert name in str(error.value)


def test_words_that_nobody_knows_are_told() -> None:
    taken = "hardware A100 Foo 40GB is taken as a100-40gb"
    assert gpus_of("A100 Foo 40GB").note == taken
    assert taken in run(hardware="A100 Foo 40GB").notes
    assert gpus_of("B200 (power limited)").note.endswith("is taken as b200-180gb")
    assert gpus_of("A100 Foo").note.endswith("; A100 of 80 GB assumed")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen3.6-35B-A3B", ("qwen", "3.6", "35b", "a", "3b")),
        ("Qwen3_Next_80B_a3B", ("qwen", "3", "next", "80b", "a", "3b")),
        ("nemotron3_5_lightning", ("nemotron", "3.5", "lightning")),
        ("deepseekv2 (cut)", ("deepseek", "v", "2", "cut")),
        ("llama3_70b", ("llama", "3", "70b")),
    ],
)
def test_words_of_names(name: str, words: tuple[str, ...]) -> None:
    assert words_of(name) == words


@pytest.mark.parametrize(
    "name",
    ["qwen-35b", "qwen3-5b", "nemotron-35b", "nemotron-hindi-4b", "gemma-42.6b", "xqwen3next"],
)
def test_a_size_or_a_longer_word_is_no_version(name: str) -> None:
    assert named_model(row_of({"model": name})) == (None, "")


def test_versions_are_found_however_they_are_written() -> None:
    for name in ("qwen3.5-35b-a3b", "Qwen3_5", "qwen 3.6"):
        model, _ = named_model(row_of({"model": name}))
        assert model is not None
        assert model.name == "qwen3.6-35b-a3b"
    for name in ("chatglm-6b", "polmo-7b", "kimiko-13b"):
        assert not row_of({"model": name}).alike


@pytest.mark.parametrize(
    ("text", "engine", "software"),
    [
        ("Megatron-LM", "megatron", "megatron"),
        ("MegatronLM", "megatron", "megatron"),
        ("NeMo/Megatron-Core 24.07", "megatron-core", "nemo"),
        ("llm-foundry (composer FSDP1)", "fsdp", "llm-foundry"),
        ("prime-rl (PyTorch FSDP2)", "fsdp", "fsdp"),
    ],
)
def test_engines_are_found_by_whole_words(text: str, engine: str, software: str) -> None:
    row = row_of({"engine": text})
    assert engine_of(row) == (engine, "")
    assert row.software == software


@pytest.mark.parametrize("text", ["nemotron-trainer", "decomposer", "xfsdp", "supermegatron"])
def test_a_longer_word_is_another_engine_and_told(text: str) -> None:
    row = row_of({"engine": text})
    engine, note = engine_of(row)
    assert engine == "megatron"
    assert note == f"engine {text!r} is unknown: predicted as engine megatron"
    assert row.software == "other"


def test_a_family_by_the_end_of_a_name_is_told() -> None:
    def notes(name: str) -> tuple[str, ...]:
        configuration: Configuration = run(model=name)
        return configuration.notes

    assert "model 'nanogpt' is taken as a gpt by the end of its name" in notes("nanogpt")
    assert "model 'dolphin-7b' is unknown: a block like Llama's assumed" in notes("dolphin-7b")
    assert not any("is taken as" in note or "unknown" in note for note in notes("gpt-7b"))


@pytest.mark.parametrize(
    ("name", "is_of"),
    [("H100", True), ("H100 SXM", True), ("H100-class", True), ("H1000", False), ("H100x", False)],
)
def test_a_machine_of_a_measurement_table_is_named_by_whole_words(name: str, is_of: bool) -> None:
    assert is_of_machine({"hardware": name}, "H100") == is_of


@pytest.mark.parametrize(
    ("text", "precision"),
    [("bfloat16", "bf16"), ("bf16", "bf16"), ("float16", "fp16"), ("bf16 + float8", "fp8")],
)
def test_precisions_by_their_long_names(text: str, precision: str) -> None:
    assert run(precision=text).precision == precision


@pytest.mark.parametrize(
    ("machine", "hardware"),
    [
        ("p5.48xlarge", "h100-80gb"),
        ("AWS p5en.48xlarge", "h200-141gb"),
        ("p3dn.24xlarge", "v100-32gb"),
        ("a3-megagpu-8g", "h100-80gb"),
        ("a3-ultragpu-8g", "h200-141gb"),
        ("ND H100 v5", "h100-80gb"),
        ("Standard_ND96amsr_A100_v4", "a100-80gb"),
        ("g6e.12xlarge", "l40s-48gb"),
        ("BM.GPU.H100.8", "h100-80gb"),
    ],
)
def test_a_cloud_s_machine_is_what_it_holds(machine: str, hardware: str) -> None:
    assert gpus_of(machine).hardware == hardware
    assert gpus_of(machine).note == ""


@pytest.mark.parametrize("name", ["p50", "g61", "ND X100 v9", "a3"])
def test_what_only_looks_like_a_machine_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="names no GPU with a hardware file"):
        gpus_of(name)
