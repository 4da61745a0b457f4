"""Rates and lines fitted to tables of single kernels and collectives, made of known numbers."""

from pathlib import Path

import numpy as np
import pytest

from mistlab.calibration.kernel_tables import (
    KernelRows,
    attention_rows,
    held_out_error,
    memory_rate,
    rate_of,
    read_best_products,
    read_collective_tests,
    read_kernel_table,
)
from mistlab.core.values import InputError

KERNELS = "hardware,op,batch,m,k,n,groups,sequence,heads,kv_heads,qk_dim,v_dim,"
KERNELS += "time_us,efficiency,tflops,notes"
TFLOPS, GBYTES = 500.0, 2000.0


def kernels(folder: Path) -> Path:
    lines = [KERNELS]
    for op, groups in (("matmul", 1), ("group_matmul", 16)):
        for m in (256, 4096, 8192, 16384):
            for k in (2048, 8192, 16384):
                flop = 2 * m * k * 8192 * groups
                moved = 2 * (m * k + k * 8192 + m * 8192) * groups
                seconds = flop / (TFLOPS * 1e12) + moved / (GBYTES * 1e9)
                count = "" if groups == 1 else groups
                lines.append(f"B,{op},1,{m},{k},8192,{count},,,,,,{seconds * 1e6},,,")
    # A table counts the whole square of scores: half of its rate does the work.
    lines += [f"B,sdp_fwd,1,,,,,{s},32,8,128,128,,,600,causal" for s in (4096, 8192)]
    lines.append('B,memory bandwidth default,,,,,,,,,,,,0.5,,"base 3000.0 GB/s, latency 30 us"')
    path = folder / "kernels.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rates_are_found_again(tmp_path: Path) -> None:
    table = read_kernel_table(kernels(tmp_path), "B")
    for name in ("matmul", "grouped_matmul"):
        rows = table.products[name]
        rate = rate_of(rows, name)
        assert (rate.tflops, rate.gbytes_per_s) == (TFLOPS, GBYTES)
        assert held_out_error(rows, name) < 1e-3
    attention = rate_of(attention_rows(table, "attention_forward"), "attention_forward")
    assert attention.s_per_flop == pytest.approx(1 / 300e12, rel=0.02)
    assert memory_rate(table).gbytes_per_s == 1500


def test_lines_are_those_of_bus_bandwidth(tmp_path: Path) -> None:
    lines = ["hardware,software,operation,group_size,nodes,bytes,algorithm,busbw_GBps"]
    for size in (2**22 * 4**power for power in range(5)):
        seconds = 50e-6 + size / 200e9
        rate = size * 2 * 7 / 8 / seconds / 1e9
        lines.append(f"B (x8),bench,all_reduce,8,1,{size},default,{rate}")
    lines += [f"B,nccl-tests,all_reduce,8,1,8589934592,{way}" for way in ("NVLS,400", "ring,320")]
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join(lines) + "\n")
    (group,) = read_collective_tests(path, "B").groups
    assert group.all_reduce.latency_us == pytest.approx(50, abs=0.1)
    assert group.all_reduce.gbytes_per_s == pytest.approx(200, rel=1e-3)
    # Half of an all-reduce, over rings that are slower than the switch by 400 / 320.
    assert group.half.gbytes_per_s == pytest.approx(400 * 320 / 400, rel=1e-3)
    assert group.held_out < 1e-3
    with pytest.raises(InputError, match="no all_reduce of C at 4 sizes"):
        read_collective_tests(path, "C")


# Every second row takes half as long again: one half of the rows predicts the other a third too
# short, and is itself predicted half too long.
SLOWER, CROSSED = np.array([1.0, 1.5] * 6), (1 / 3 + 1 / 2) / 2


def test_the_error_of_a_rate_is_that_of_rows_left_out() -> None:
    flop = np.arange(1.0, 13.0) * 1e12
    rows = KernelRows(flop=flop, moved_bytes=flop * 1e-6, seconds=flop / 500e12 * SLOWER)
    assert held_out_error(rows, "matmul") == pytest.approx(CROSSED, rel=1e-2)


def test_the_error_of_a_line_is_that_of_sizes_left_out(tmp_path: Path) -> None:
    sizes = [2.0**power * 1e7 for power in range(8)]
    # Without a latency a rate is the same at all sizes.
    rates = [200 / slower for slower in SLOWER]
    lines = [
        f"B,all_reduce,8,1,{size},ring,{rate}" for size, rate in zip(sizes, rates, strict=False)
    ]
    path = tmp_path / "collectives.csv"
    header = "hardware,operation,group_size,nodes,bytes,algorithm,busbw_GBps"
    path.write_text("\n".join([header, *lines]) + "\n")
    (group,) = read_collective_tests(path, "B").groups
    assert group.held_out == pytest.approx(CROSSED, rel=1e-3)


def test_8_bit_products_are_faster_by_the_best_of_both(tmp_path: Path) -> None:
    path = tmp_path / "best.csv"
    rows = [
        "B SXM,gemm,bf16,100",
        "B SXM,gemm,fp8,190",
        "B SXM,grouped gemm,fp8,999",
        "BX,gemm,fp8,1",
    ]
    path.write_text("\n".join(["hardware,operation,precision,tflops", *rows]) + "\n")
    assert read_best_products(path, "B SXM").ratio == pytest.approx(1.9)
    with pytest.raises(InputError, match="no bf16 GEMM of BX"):
        read_best_products(path, "BX")
