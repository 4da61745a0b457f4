"""Rates of single kernels: fitted to made tables, and whose rates a run takes."""

import csv
from itertools import product

import numpy as np
import pytest

from mistlab.calibration.serving_kernels import fitted_kernels
from mistlab.core.units import MILLISECONDS
from mistlab.serving.engine_constants import ServedRun, keys_of
from mistlab.serving.gpu_facts import FORMATS, gpu_named, kernel_rate

HEADS = {
    "gemm": "hardware,engine,engine_version,dtype,m,n,k,latency_ms",
    "moe": "hardware,engine,dtype,tokens,hidden,inter,topk,experts,moe_tp,moe_ep,distribution,"
    "latency_ms",
    "attention_decode": "hardware,engine,kv_dtype,batch,kv_len,heads,kv_heads,head_dim,latency_ms",
    "attention_prefill": "hardware,engine,attn_dtype,kv_dtype,batch,isl,heads,kv_heads,head_dim,"
    "latency_ms",
    "collectives": "hardware,lib,version,op,kernel,dtype,gpus,elements,latency_ms",
}
FLOOR_S, MEMORY, ARITHMETIC, DEPTH_S, ROWS = 6e-6, 0.6, 0.4, 1.9e-9, 0.15


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> list[list[str | float]]:
    """Rates fitted to products and experts of known rates, and to all-reduces of two versions, the
    newer one four times as fast."""
    folder = tmp_path_factory.mktemp("kernels")
    rows: dict[str, list[list[object]]] = {name: [] for name in HEADS}
    gpu = gpu_named("B200")
    for m, n, k in product((1, 16, 256, 4096), (1024, 4096, 16384), (1024, 4096, 16384)):
        memory_s = (k * n * FORMATS["nvfp4"].bytes_each + 2 * m * (n + k)) / gpu.bytes_per_s
        arithmetic_s = 2 * m * n * k / gpu.flop_per_s("fp4")
        parts = (memory_s / MEMORY, arithmetic_s / ARITHMETIC, k * DEPTH_S)
        seconds = FLOOR_S + np.sum(np.array(parts) ** 4) ** 0.25
        rows["gemm"].append(["B200", "vllm", "0.14", "nvfp4", m, n, k, seconds / MILLISECONDS])
    for dtype in ("nvfp4", "w4a16_mxfp4"):
        rows["moe"] += experts_rows(dtype)
    for version, faster in (("0.9.0", 1), ("0.10.0", 4)):
        for elements in (2**10, 2**16, 2**22, 2**26):
            ms = (0.02 + 4e-7 * elements) / faster
            rows["collectives"].append(
                ["L40S", "vllm", version, "all_reduce", "graph", "half", 2, elements, ms]
            )
    for name, lines in rows.items():
        with (folder / f"kernel_{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([HEADS[name].split(","), *lines])
    return list(fitted_kernels(folder))


def test_products_are_fitted_with_their_depth(rates: list[list[str | float]]) -> None:
    (found,) = (rate for rate in rates if rate[2] == "products")
    assert found[:4] == ["B200", "vllm", "products", "nvfp4"]
    expected = [FLOOR_S * 1e6, MEMORY, ARITHMETIC, DEPTH_S * 1e9]
    assert found[4:8] == pytest.approx(expected, rel=0.02)
    assert found[9] == pytest.approx(0, abs=1e-3)


def experts_rows(dtype: str) -> list[list[object]]:
    """Blocks of 64 experts on B200, of which a token takes 4: whole on ranks or divided. Those of
    uneven routes over ranks take three times as long, as the fullest rank does."""
    gpu, hidden, inter = gpu_named("B200"), 4096, 2048
    rows: list[list[object]] = []
    for tokens, (parts, ranks) in product((1, 8, 64, 512, 8192), ((1, 1), (4, 1), (1, 4))):
        each, rows_on_rank = 3 * hidden * inter / parts, tokens * 4 / ranks
        arithmetic_s = 2 * each * rows_on_rank / gpu.flop_per_s("fp4")
        # Each hidden value of a row is read and written in 16 bits.
        rows_s = rows_on_rank * hidden * (2 + 2) / (ROWS * gpu.bytes_per_s)
        expected = -np.log(1 - 4 / 64) * tokens
        reached_shares = {
            "balanced": 1 - np.exp(-expected),
            "power_law_1.2": 1 - 1 / (1 + expected),
        }
        for routes, reached in reached_shares.items():
            held_bytes = 64 / ranks * each * FORMATS["nvfp4"].bytes_each
            memory_s = reached * held_bytes / gpu.bytes_per_s
            roofs_s = ((memory_s / MEMORY) ** 4 + (arithmetic_s / ARITHMETIC) ** 4) ** 0.25
            seconds = FLOOR_S + roofs_s + rows_s
            slower = 3 if ranks > 1 and routes != "balanced" else 1
            shape = [tokens, hidden, inter, 4, 64, parts, ranks, routes]
            rows.append(["B200", "vllm", dtype, *shape, slower * seconds / MILLISECONDS])
    return rows


def test_experts_are_fitted_with_their_rows_and_without_unknown_routes(
    rates: list[list[str | float]],
) -> None:
    # Nor is there a rate of mxfp4 that is unpacked first: the GPU multiplies it as it is.
    (found,) = (rate for rate in rates if rate[2] == "experts")
    assert found[:4] == ["B200", "vllm", "experts", "nvfp4"]
    assert found[4:7] == pytest.approx([FLOOR_S * 1e6, MEMORY, ARITHMETIC], rel=0.02)
    assert found[8] == pytest.approx(ROWS, rel=0.02)
    assert found[9:] == [pytest.approx(0, abs=1e-3), 25]


def test_of_several_versions_the_oldest_is_fitted(rates: list[list[str | float]]) -> None:
    (found,) = (rate for rate in rates if rate[2] == "all_reduce")
    assert found[4] == pytest.approx(20, rel=0.02)
    assert found[-1] == 4


def test_a_gpu_takes_its_own_rate_of_another_precision_first() -> None:
    # No table has mxfp4 of TensorRT-LLM on B200, but one has it on H100.
    assert kernel_rate("B200", "trtllm", "experts", "mxfp4") == kernel_rate(
        "B200", "trtllm", "experts", "nvfp4"
    )


@pytest.mark.parametrize(
    ("gpu", "weights", "key"),
    [
        ("B200", "mxfp4", "vllm in mxfp4"),
        ("H100", "mxfp4", "vllm in mxfp4 unpacked"),
        ("H100", "fp8", "vllm in fp8"),
        ("A100", "fp8", "vllm in fp8 unpacked"),
        ("A100", "bf16", "vllm in bf16"),
    ],
)
def test_weights_that_are_unpacked_first_have_constants_of_their_own(
    gpu: str, weights: str, key: str
) -> None:
    run = ServedRun(engine="vllm", version="", gpu=gpu, model="qwen3-32b", weights=weights)
    assert keys_of(run)["precision"] == key
