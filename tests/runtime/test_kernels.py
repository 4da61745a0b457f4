"""Kernels in Triton: compared with torch on Triton's interpreter, and compiled for several GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="not installed: make extras")

ROOT = Path(__file__).parents[2]

COMPARED = """
import torch
from runtime.models import dropout, kernels, operators

def fenced(kernel, grid, like, *arguments):
    # A row's tail that is written too far lands in the next row, which writes it again: only behind
    # the last row does it show.
    whole = torch.full((like.numel() + 4096,), 7.0, dtype=like.dtype)
    result = whole[2048:-2048].view(like.shape)
    kernel[grid](result, *arguments)
    assert whole[:2048].eq(7).all() and whole[-2048:].eq(7).all(), kernel
    same(result, like)

def fenced_in_place(logits, like, *rest):
    whole = torch.full((logits.numel() + 4096,), 7.0, dtype=logits.dtype)
    result = whole[2048:-2048].view(logits.shape)
    kernels.to_gradient_(result.copy_(logits), *rest)
    assert whole[:2048].eq(7).all() and whole[-2048:].eq(7).all()
    same(result, like)

torch.manual_seed(0)
for kind, near in ((torch.float32, 1e-6), (torch.float16, 4e-3)):
    same = lambda one, other: torch.testing.assert_close(one, other, rtol=near, atol=near)
    # Two groups of queries share keys; the row is no power of two.
    scores = torch.randn(6, 40, 20, dtype=kind)
    own = kernels.causal_softmax(scores, 20)
    same(own, operators.causal_softmax(scores.clone(), 20))
    assert own[0, 3, 4:].eq(0).all() and own[0, 23, 4:].eq(0).all()
    # More columns than a program goes through.
    both, gradient = torch.randn(3, 5, 2200, dtype=kind), torch.randn(3, 5, 1100, dtype=kind)
    same(kernels.swiglu(both), operators.swiglu(both))
    same(kernels.swiglu_backward(gradient, both), operators.swiglu_backward(gradient, both))
    # Nothing is written beside the results.
    fenced(kernels._softmax, (240,), own, scores, 20, 32)
    parts = kernels._parts(gradient)
    fenced(kernels._swiglu, parts, operators.swiglu(both), both, 1100, kernels.PART)
    whole = operators.swiglu_backward(gradient, both)
    fenced(kernels._swiglu_backward, parts, whole, gradient, both, 1100, kernels.PART)
    # Ten of twelve channels of six of nine heads, and of as many as models have, up to 64 with 8.
    for rotated, heads in ((6, 9), (40, 40), (64, 72), (72, 80)):
        whole, other = (torch.randn(1, 3, heads, 12).to(kind) for _ in range(2))
        other.copy_(whole)
        cosine, sine = torch.rand(3, 5), torch.rand(3, 5)
        kernels.rotate_(whole[:, :, :rotated], cosine, sine)
        operators.rotate_(other[:, :, :rotated], cosine, sine)
        same(whole, other)
    # Each value is kept or not as by torch, also by a key and a threshold above 2^31.
    x, rows = torch.randn(7, 1100).to(kind), torch.arange(2**33 - 3, 2**33 + 4)
    for key, share in ((dropout.key_of(1, 2), 0.1), ((5, 2**31 + 7), 0.6)):
        rest = (dropout.hashes_of_rows(rows, key), key[1], dropout.threshold_of(share))
        own = kernels.dropped(x, *rest, 1 / (1 - share))
        same(own, dropout.dropped(x, rows, share, key))
        assert own.ne(0).equal(dropout.kept_by_position(rows, 1100, share, key))
        signed = [one - (one >> 31 << 32) for one in rest[1:]]
        values = (x, rest[0], *signed, 1 / (1 - share), 1100, kernels.PART)
        fenced(kernels._dropped, kernels._parts(x), own, *values)
    # A row of several parts, the last tokens of which are none; targets before and behind it.
    for used in (9000, 8999, 0):
        logits = torch.randn(6, 9000).mul_(3).to(kind)
        targets = torch.tensor([70, 9069, 69, 9070, -100, 4200])
        found, other = torch.full((3, 6), 7.0), torch.full((3, 6), 7.0)
        kernels.sum_rows(found, logits, targets, 70, used)
        operators.sum_rows(other, logits, targets, 70, used)
        torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)
        totals = other[1].log() + other[0] if used else torch.ones(6)
        rest, own = (torch.rand(6), totals, targets, 70, used), logits.clone()
        operators.to_gradient_(own, *rest)
        fenced_in_place(logits, own, *rest)
"""

COMPILED = """
import re
import subprocess
import tempfile
from pathlib import Path
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.models import kernels

def compiled(kernel, capability, numbers, **fixed):
    types = {name: "*fp16" for name in kernel.arg_names}
    types |= {name: "*fp32" for name in ("cosine", "sine") if name in types}
    types |= {"hashes": "*i64", "factor": "fp32"} if "hashes" in types else {}
    types |= {name: "*i64" for name in ("targets",) if name in types}
    types |= {name: "*fp32" for name in ("found", "totals") if name in types}
    types |= {name: "i32" for name in numbers} | {name: "constexpr" for name in fixed}
    source = ASTSource(kernel, types, constexprs=fixed)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm

def spilled(made):
    # Bytes of registers that did not fit.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made["cubin"])
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True, text=True, check=True,
        )
    (stack,) = re.findall(r"STACK:(\\d+)", told.stdout)
    return int(stack)

for capability in (75, 80, 89, 90, 100):
    softmax = compiled(kernels._softmax, capability, ["sequence"], block=4096)
    loads = re.findall(r"^.*ld\\.global.*$", softmax["ptx"], re.MULTILINE)
    # Every load waits for its predicate: what is masked is not read.
    assert loads and all(line.lstrip().startswith("@%p") for line in loads), loads
    compiled(kernels._swiglu, capability, ["columns"], part=1024)
    compiled(kernels._swiglu_backward, capability, ["columns"], part=1024)
    compiled(kernels._dropped, capability, ["key", "threshold", "columns"], part=1024)
    places = ["sequence", "of_sequence", "of_position", "of_head", "count", "half"]
    rotate = compiled(kernels._rotate, capability, places, group=kernels.HEADS, all_channels=64)
    # Groups of heads are alike, however many a model has: 72 take nine programs.
    numbers = ["rows", "columns", "first", "used"]
    sums = compiled(kernels._sum_rows, capability, numbers, part=kernels.PART_OF_ROW)
    # Logits are read once, and only where there are some; nothing of their size is written.
    loads = re.findall(r"^.*ld\\.global.*b16.*$", sums["ptx"], re.MULTILINE)
    assert loads and all(line.lstrip().startswith("@%p") for line in loads), loads
    gradient = compiled(kernels._to_gradient, capability, numbers[1:], part=kernels.PART)
    parts = {"rotate": rotate, "softmax": softmax, "sums": sums, "gradient": gradient}
    for name, made in parts.items():
        assert spilled(made) == 0, (name, capability)
"""


@pytest.mark.parametrize(("code", "interpreted"), [(COMPARED, "1"), (COMPILED, "0")])
def test_kernels_do_what_torch_does_and_compile(code: str, interpreted: str) -> None:
    settings = {"TRITON_INTERPRET": interpreted, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
