from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.graph.library import graph_of, kinds_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.symbols import size_columns
from mistlab.plan.model_parts import Trained
from mistlab.plan.workload import Workload

SIZES = {
    "gpt3": "125m 350m 760m 1.3b 2.7b 7b 8b 13b 20b 22b 40b 175b",
    "llama": "350m 1.3b 2.7b 7b 13b 20b 22b 32.5b 40b 65b 70b",
    "llama3": "8b 70b 405b",
    "falcon": "1.3b 2.7b 7b 13b 20b 22b 40b",
}
MODELS = {f"{family}-{size}" for family, sizes in SIZES.items() for size in sizes.split()}
# Models of today, by billions of parameters: all of them, and those that a token uses (the figures
# of their papers).
TODAY = {
    "bert-base": (0.11, 0.11),
    "bert-large": (0.34, 0.34),
    "roberta-base": (0.125, 0.125),
    "roberta-large": (0.355, 0.355),
    "gpt2": (0.124, 0.124),
    "gpt2-medium": (0.355, 0.355),
    "gpt2-large": (0.774, 0.774),
    "gpt2-xl": (1.558, 1.558),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141.0, 39.0),
    "llama3.2-1b": (1.24, 1.24),
    "llama3.2-3b": (3.21, 3.21),
    "llama4-scout": (107.8, 17.0),
    "llama4-maverick": (400.0, 17.0),
    "olmo2-7b": (7.3, 7.3),
    "olmo2-13b": (13.7, 13.7),
    "olmo2-32b": (32.2, 32.2),
    "phi-4": (14.7, 14.7),
    "qwen2.5-7b": (7.6, 7.6),
    "qwen2.5-14b": (14.7, 14.7),
    "qwen2.5-32b": (32.5, 32.5),
    "qwen2.5-72b": (72.7, 72.7),
    "qwen3-0.6b": (0.6, 0.6),
    "qwen3-1.7b": (1.7, 1.7),
    "qwen3-4b": (4.0, 4.0),
    "qwen3-8b": (8.2, 8.2),
    "qwen3-14b": (14.8, 14.8),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "deepseek-v2": (236.0, 21.0),
    "deepseek-v2-lite": (15.7, 2.4),
    "moonlight-16b-a3b": (16.0, 2.24),
    "kimi-k2": (1026.0, 32.0),
    "glm-4.5": (355.0, 32.0),
    "glm-4.5-air": (106.0, 12.0),
    "deepseek-v3": (671.0, 37.0),
    # 11.5 and 0.6 more in the further block, and a copy of the table of tokens.
    "deepseek-v3-mtp": (683.4, 38.5),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "nemotron-h-8b": (8.1, 8.1),
    "nemotron-h-56b": (56.0, 56.0),
    "nemotron-3-nano": (31.6, 3.6),
    "nemotron-3-super": (120.6, 12.7),
    "nemotron-3-ultra": (550.0, 55.0),
    "qwen3-next-80b-a3b": (79.7, 3.9),
    "qwen3.6-35b-a3b": (34.7, 3.4),
    "qwen3.5-397b-a17b": (397.0, 17.0),
    "mistral-7b": (7.24, 7.24),
    "codellama-34b": (33.7, 33.7),
    "falcon-180b": (180.0, 180.0),
    "gpt-j-6b": (6.05, 6.05),
    "minimax-m2": (230.0, 10.0),
    "glm-5": (744.0, 40.0),
}
# Published figures of what a token uses leave out the table of tokens, or the head's too.
TABLES_LEFT_OUT = {
    "gpt-oss-20b": 1,
    "gpt-oss-120b": 1,
    "deepseek-v2-lite": 1,
    "moonlight-16b-a3b": 2,
    "glm-4.5": 2,
    "minimax-m2": 2,
    "glm-4.5-air": 2,
}
HARDWARE = {
    "l4-24gb",
    "a100-40gb",
    "a100-80gb",
    "a10g-24gb",
    "v100-16gb",
    "v100-32gb",
    "h100-80gb",
    "gh200-96gb",
    "b300-288gb",
    "gb300-288gb",
    "mi300x-192gb",
    "mi325x-256gb",
    "h200-141gb",
    "b200-180gb",
    "gb200-186gb",
}


def test_the_catalogue_has_the_models_of_the_design() -> None:
    assert set(catalog.model_names()) == MODELS | TODAY.keys()


def test_the_catalogue_has_the_hardware_of_the_design() -> None:
    assert set(catalog.calibrated_names()) == HARDWARE
    assert set(catalog.hardware_names()) > HARDWARE


@pytest.mark.parametrize("name", TODAY)
def test_a_model_of_today_has_its_published_parameters(name: str) -> None:
    spec = catalog.model(name)
    work = Workload(
        model=spec,
        sequence_length=spec.learned_positions or 4096,
        global_batch=1,
        attention="flash",
        precision="bf16",
    )
    graph = graph_of(work)
    sizes = {letter: int(column[0]) for letter, column in size_columns(work, ONE_RANK).items()}
    mapping = {one["name"]: one for one in (graph.mapping["block"], *further(graph))}
    pattern = [graph.pattern[block % len(graph.pattern)] for block in range(spec.layers)]
    layers = [mapping[kind] for kind in pattern]
    layers += [graph.mapping["embedding"], graph.mapping["head"]]
    every = sum(prod(eval(size, {}, sizes) for size in shape) for shape in shapes_of(layers))
    every -= spec.tied_embeddings * spec.vocab * spec.hidden
    used, experts = every, spec.experts
    if experts is not None:
        kinds = kinds_of(spec)
        turns = (kinds.pattern[block % len(kinds.pattern)] for block in range(spec.layers))
        blocks = spec.further_tokens + sum("experts" in kinds.parts[kind] for kind in turns)
        each = (3 if spec.mlp_type == "gated_mlp" else 2) * (experts.hidden or spec.hidden)
        used -= blocks * (experts.count - experts.active) * each * experts.ffn
    used -= TABLES_LEFT_OUT.get(name, 0) * spec.vocab * spec.hidden
    assert every / 1e9 == pytest.approx(TODAY[name][0], rel=0.03)
    assert used / 1e9 == pytest.approx(TODAY[name][1], rel=0.05)


ONE_RANK = {"b": np.array([1]), "tp": np.array([1])}


def further(graph: StoredGraph) -> list[dict[str, Any]]:
    return list(graph.mapping.get("further_blocks", ()))


def shapes_of(layers: list[dict[str, Any]]) -> list[list[str]]:
    return [parameter["shape"] for layer in layers for parameter in layer["parameters"]]


def billions(name: str) -> float:
    """Parameters as counted by hand: attention, feed-forward, embedding and head; sizes of GPT
    count one matrix for both, which it shares."""
    spec = catalog.model(name)
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    products = 3 if spec.mlp_type == "gated_mlp" else 2
    block = attention + products * spec.hidden * spec.ffn
    tables = 1 if spec.family == "gpt" else 2
    return (spec.layers * block + tables * spec.vocab * spec.hidden) / 1e9


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_has_the_size_in_its_name(name: str) -> None:
    number, unit = name.split("-")[1][:-1], name[-1]
    nominal = float(number) / (1000 if unit == "m" else 1)
    assert catalog.model(name).name == name
    assert billions(name) == pytest.approx(nominal, rel=0.2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_llama_3_turns_channels_more_slowly(name: str) -> None:
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3; all others as LLaMA.
    assert catalog.model(name).rotary_base == (500_000 if name.startswith("llama3") else 10_000)


@pytest.mark.parametrize("name", catalog.hardware_names())
def test_hardware_bears_its_name_and_memory(name: str) -> None:
    hardware = catalog.hardware(name)
    nominal_gb = int(name.rsplit("-", maxsplit=1)[1].removesuffix("gb"))
    assert hardware.name == name
    assert 0.9 * nominal_gb < hardware.gpu.memory_gib < nominal_gb
    # A rack of GB200 is one node, because NVLink joins all of its GPUs.
    of_node = {"gb200": 72, "gb300": 72, "gh200": 4}
    assert hardware.node.gpus == of_node.get(name.rsplit("-", maxsplit=1)[0], 8)


@pytest.mark.parametrize("name", ["gpt3-20b", "llama-22b", "falcon-20b"])
def test_64_heads_share_6144_channels(name: str) -> None:
    assert (catalog.model(name).hidden, catalog.model(name).head_dim) == (6144, 96)


def test_an_unknown_model_is_refused_with_near_names() -> None:
    with pytest.raises(
        InputError, match=r"^model: 'gpt3-2.7' is unknown: did you mean 'gpt3-2.7b'"
    ):
        catalog.model("gpt3-2.7")


def test_an_unknown_hardware_is_refused_with_near_names() -> None:
    with pytest.raises(InputError, match=r"^hardware: 'l4' is unknown: did you mean 'l4-24gb'"):
        catalog.hardware("l4")
    with pytest.raises(InputError, match=r"'a100-80' is unknown: did you mean 'a100-80gb'"):
        catalog.hardware("a100-80")
    for name, near in (
        ("NVIDIA H100 SXM", "'h100-80gb'"),
        ("A100", "'a100-40gb' or 'a100-80gb'"),
        ("nvidia_A100 80 GB", "'a100-80gb'"),
        ("RTX PRO 6000", "'rtx-pro-6000-96gb'"),
        ("NVIDIA A100-SXM4-40GB", "'a100-40gb'"),
        ("4090", "'rtx-4090-24gb'"),
        ("48 GB", "'a40-48gb' or 'l20-48gb' or 'l40s-48gb'"),
    ):
        with pytest.raises(InputError, match=f"'{name}' is unknown: did you mean {near}.$"):
            catalog.hardware(name)
    with pytest.raises(
        InputError, match=r"'tpu' is unknown: give a name such as a10-24gb, a100-40gb"
    ):
        catalog.hardware("tpu")
    for name in ("2080 Ti", "M3 Max", "Gaudi2", "tpu", "h101"):
        with pytest.raises(
            InputError, match=r"datasheet \(docs/reference/hardware-file.md\); Apple"
        ):
            catalog.hardware(name)


def test_a_gpu_is_called_by_its_name_without_seller_and_memory() -> None:
    called = [
        catalog.hardware_called(name)
        for name in ("3090", "RTX3090", "a6000", "H100", "MI300X", "4090D")
    ]
    assert called == [
        ("rtx-3090-24gb",),
        ("rtx-3090-24gb",),
        ("rtx-a6000-48gb",),
        ("h100-80gb",),
        ("mi300x-192gb",),
        (),
    ]
    assert catalog.hardware_called("H100 96GB") == ()
    # The digits of A10G are no memory.
    a10g = [catalog.hardware_called(name) for name in ("A10G", "NVIDIA A10G 24G", "A", "A10G 16GB")]
    assert a10g == [("a10g-24gb",), ("a10g-24gb",), (), ()]
    for name in catalog.hardware_names():
        assert name in catalog.hardware_called(name.upper())


GPT_SIZES = ("125m", "350m", "760m", "1.3b", "2.7b", "7b", "13b", "175b")


def test_models_say_how_they_were_trained() -> None:
    # Brown et al. 2020, table 2.1, from the smallest to the largest; Touvron et al. 2023, table 2.
    gpt = [trained(f"gpt3-{size}") for size in GPT_SIZES]
    assert [one.billion_tokens for one in gpt] == [300] * 8
    assert [one.batch_million_tokens for one in gpt] == [0.5, 0.5, 0.5, 1, 1, 2, 2, 3.2]
    rates = [6e-4, 3e-4, 2.5e-4, 2e-4, 1.6e-4, 1.2e-4, 1e-4, 0.6e-4]
    assert [one.learning_rate for one in gpt] == rates
    llama = [trained(f"llama-{size}") for size in ("7b", "13b", "32.5b", "65b")]
    assert [one.tokens for one in llama] == [1.0e12, 1.0e12, 1.4e12, 1.4e12]
    assert [one.batch_tokens for one in llama] == [4e6] * 4


def trained(name: str) -> Trained:
    found = catalog.model(name).trained
    assert found is not None
    return found


def test_how_a_model_was_trained_does_not_make_it_another_model() -> None:
    model = catalog.model("gpt3-1.3b")
    other = replace(model, trained=None)
    assert (other, hash(other)) == (model, hash(model))


def test_boards_draw_what_datasheets_say() -> None:
    watts = {name: catalog.hardware(name).gpu.board_watts for name in sorted(HARDWARE)}
    assert watts == {
        "a100-40gb": 400,
        "a100-80gb": 400,
        "a10g-24gb": 300,
        "b200-180gb": 1000,
        "b300-288gb": 1400,
        "gb300-288gb": 1400,
        "gh200-96gb": 1000,
        "mi300x-192gb": 750,
        "mi325x-256gb": 1000,
        "gb200-186gb": 1200,
        "h100-80gb": 700,
        "h200-141gb": 700,
        "l4-24gb": 72,
        "v100-16gb": 300,
        "v100-32gb": 300,
    }


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_8_bit_products_gain_no_more_than_their_peak(name: str) -> None:
    hardware = catalog.hardware(name)
    peaks, compute = hardware.gpu.peak_tflops, hardware.compute
    if peaks.fp8 is None or peaks.bf16 is None or compute is None:
        return
    for eight, sixteen in (("matmul_8bit", "matmul"), ("grouped_matmul_8bit", "grouped_matmul")):
        rates = [compute.rate(one).tflops for one in (eight, sixteen)]
        assert rates[0] / rates[1] <= peaks.fp8 / peaks.bf16


@pytest.mark.parametrize("name", catalog.hardware_names())
def test_tensor_cores_take_32_bits_at_half_the_rate_of_16(name: str) -> None:
    """All datasheets of these kinds of GPUs have it so."""
    peaks = catalog.hardware(name).gpu.peak_tflops
    if peaks.tf32 is not None:
        assert peaks.bf16 is not None
        assert peaks.tf32 == pytest.approx(peaks.bf16 / 2, rel=0.012)


@pytest.mark.parametrize("name", ["b200-180gb", "gb200-186gb", "b300-288gb", "gb300-288gb"])
def test_experts_products_keep_up_one_share_of_other_products(name: str) -> None:
    """Both were measured on one machine, which was slower than others of its kind."""
    compute = catalog.hardware(name).compute
    assert compute is not None
    for bits in ("", "_8bit"):
        rates = [compute.rate(f"{kind}{bits}").tflops for kind in ("grouped_matmul", "matmul")]  # type: ignore[arg-type]
        assert rates[0] / rates[1] == pytest.approx(1262.1 / 1076.2, rel=1e-3)  # type: ignore[operator]
