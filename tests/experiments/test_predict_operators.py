"""Kernels of tables, predicted: what they move by hand, GPUs left out, and refused rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import predict_operators
from experiments.cli.commandline import run
from experiments.measured.predict_operators import (
    KernelRates,
    KernelRow,
    RefusedKernel,
    fit,
    kernel_rows,
    left_out,
)

HEAD = "kernel,provider,pass,quantity,x_name,x_value,p50,unit,hardware,extra\n"
NORM = '"{""M"": 2048, ""dtype"": ""torch.bfloat16""}"'
ROWS = "".join(
    f"rms_norm,{provider},{phase},time,H,{width},{took},ms,{gpu},{NORM}\n"
    for gpu, took in (("NVIDIA A100-SXM4-80GB", 0.05), ("NVIDIA H100 80GB HBM3", 0.03))
    for provider in ("liger", "huggingface")
    for phase in ("forward", "backward", "full")
    for width in (4096, 16384)
)


def table(tmp_path: Path, text: str = ROWS) -> Path:
    path = tmp_path / "kernels.csv"
    path.write_text(HEAD + text, encoding="utf-8")
    return path


def known(path: Path) -> list[KernelRow]:
    return [one for one in kernel_rows(path) if isinstance(one, KernelRow)]


def test_a_kernel_moves_what_its_source_says(tmp_path: Path) -> None:
    """A fused norm reads and writes 16 bits forward, and reads two and writes one backward."""
    liger = [one.work for one in known(table(tmp_path)) if one.work.is_fused][:6:2]
    size = 2 * 2048 * 4096
    assert [one.bytes_moved for one in liger] == [2 * size, 3 * size, 5 * size]
    assert [one.backward for one in liger] == [0, 1, 1]


def test_a_network_computes_its_products(tmp_path: Path) -> None:
    sizes = '"{""B"": 4, ""hidden_size"": 64, ""intermediate_size"": 96}"'
    row = f"swiglu,huggingface,full,time,T,128,1,ms,A100-80GB,{sizes}\n"
    (one,) = known(table(tmp_path, row))
    assert one.work.flop == 18 * 4 * 128 * 64 * 96
    assert one.work.bytes_moved == 14 * 4 * 128 * 96 * 4


def test_rates_are_fitted_to_the_rows_of_other_gpus(tmp_path: Path) -> None:
    """Rows that a set of rates made give these rates back; a GPU's own rows have no part in it."""
    made = KernelRates(fused=0.7, eager=0.9, launch_s=5e-6, backward_s=2e-4)
    rows = [
        replace(one, measured_s=made.seconds(one.hardware, one.work))
        for one in known(table(tmp_path))
    ]
    found = fit(rows)
    for one in rows:
        assert found.seconds(one.hardware, one.work) == pytest.approx(one.measured_s, rel=0.05)
    own, other = sorted({one.hardware.name for one in rows})
    twice = [
        replace(one, measured_s=3 * (one.measured_s or 0)) if one.hardware.name == own else one
        for one in rows
    ]
    assert left_out(twice)[own] == left_out(rows)[own]
    assert left_out(twice)[other] != left_out(rows)[other]


def test_a_gpu_that_nobody_measured_is_predicted(tmp_path: Path) -> None:
    """Backward passes of small kernels wait for Python, whatever the GPU."""
    row = f"rms_norm,liger,backward,,H,8,,,RTX 5090,{NORM}\n"
    (one,) = known(table(tmp_path, row))
    rates = left_out([one])[one.hardware.name]
    assert rates == KernelRates()
    assert rates.seconds(one.hardware, one.work) == rates.launch_s + rates.backward_s


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("softmax,liger,full,time,H,8,1,ms,A100,", "kernel: 'softmax' cannot be predicted: give"),
        (
            "rms_norm,own,full,time,H,8,1,ms,A100,",
            "'own' of rms_norm cannot be predicted",
        ),
        ("rms_norm,liger,both,time,H,8,1,ms,A100,", "pass: 'both' is unknown: give forward"),
        ("rms_norm,liger,full,time,H,,1,ms,A100,", "x_value: is empty: give the size"),
        ("rms_norm,liger,full,time,H,8,1,ms,A100,", "extra: lacks M, a size on which"),
        ("rms_norm,liger,full,time,H,8,1,s,A100,", "unit: 's' is not known: give ms"),
        (
            "rms_norm,liger,full,time,H,8,1,ms,Q7,",
            "hardware: 'Q7' names no GPU",
        ),
    ],
)
def test_a_row_that_is_refused_says_why(row: str, problem: str, tmp_path: Path) -> None:
    (one,) = kernel_rows(table(tmp_path, f"{row}\n"))
    assert isinstance(one, RefusedKernel)
    assert problem in one.problem


def test_the_command_answers_each_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = table(tmp_path, ROWS + "softmax,liger,full,time,H,8,1,ms,A100,\n")
    assert run(predict_operators.main, [str(path), "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 25
    assert all(one["time_ms"] > 0 for one in answers[:-1])
    assert "cannot be predicted" in answers[-1]["refused"]
    assert run(predict_operators.main, [str(path)]) == 0
    assert "1 kernels, each GPU left out" in capsys.readouterr().out
