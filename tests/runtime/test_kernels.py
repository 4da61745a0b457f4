"""Kernels in Triton: compared with torch on Triton's interpreter, and compiled for several GPUs."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="not installed: make extras")

ROOT = Path(__file__).parents[2]

COMPARED = """
import torch
from runtime.models import dropout, kernels, operators, residuals

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

def norms(x, weight, shift):
    wide = x.double()
    if shift is not None:
        return torch.nn.functional.layer_norm(wide, wide.shape[-1:], weight, shift, 1e-5)
    return torch.nn.functional.rms_norm(wide, wide.shape[-1:], weight, 1e-5)

# Sums with a residual and their norms, against 64 bits: rows that are no power of two, and programs
# that have two of them, one or none.
kernels.PROGRAMS = 4
for kind, near in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
    same = lambda one, other: torch.testing.assert_close(
        one.double(), other.double(), rtol=near, atol=near
    )
    for rows, columns in ((3, 1100), (5, 24)):
        x, part, of_normal, of_sum = torch.randn(4, rows, columns).to(kind)
        bias, weight, shift = torch.randn(3, columns).to(kind)
        numbers, key = torch.arange(2**33 - 3, 2**33 - 3 + rows), dropout.key_of(1, 2)
        hashes = dropout.hashes_of_rows(numbers, key)
        kept = dropout.kept_by_position(numbers, columns, 0.3, key)
        drop = (hashes, key[1], dropout.threshold_of(0.3), 1 / 0.7)
        for has_bias in (False, True):
            for own, factor in ((None, 1.0), (drop, kept / 0.7)):
                given = bias if has_bias else None
                whole = part.double() + (bias.double() if has_bias else 0)
                whole = x.double() + whole * factor
                made = kernels.added(x, part, given, own)
                same(made, whole)
                at = (x, part, *kernels._of_part(part, given, own), columns, kernels.PART)
                fenced(kernels._add, kernels._parts(x), made, *at)
                for its_shift in (shift, None):
                    made, normal, mean, root = kernels.added_and_normed(
                        x, part, given, own, weight, its_shift, 1e-5
                    )
                    same(made, whole)
                    leaves = [one.double().requires_grad_() for one in (made, weight)]
                    leaves += [] if its_shift is None else [shift.double().requires_grad_()]
                    found = norms(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
                    same(normal, found)
                    found.backward(of_normal.double())
                    for residual in (None, of_sum):
                        of_x, *of_norm = kernels.norm_backward(
                            *(of_normal, made, mean, root, weight, residual),
                            centers=its_shift is not None,
                        )
                        more = 0 if residual is None else residual.double()
                        same(of_x, leaves[0].grad + more)
                        for one, leaf in zip(of_norm, leaves[1:]):
                            # Sums over rows, relative to what is summed.
                            scale = rows**0.5
                            same(one.double() / scale, leaf.grad / scale)
                    width = kernels.triton.next_power_of_2(columns)
                    rest = (made, mean, root, x, part, *kernels._of_part(part, given, own))
                    rest += (weight, shift, 1e-5, its_shift is not None, columns, width)

                    class Turned:
                        # The kernel, with what it norms as its first argument.
                        def __getitem__(self, grid):
                            kernel = kernels._add_and_norm[grid]
                            return lambda one, sums, *others: kernel(sums, one, *others)

                    fenced(Turned(), (rows,), normal, *rest)
    # Programs that have fewer rows than others write nothing for those that are not.
    of_x, of_weight, _ = kernels.norm_backward(
        of_normal, made, mean, root, weight, None, centers=False
    )
    sums = torch.empty(1, 4, 24)
    rest = (sums, of_normal, made, mean, root, weight, of_normal, 5, 2, 24, False, False, 32)
    fenced(kernels._norm_backward, (4,), of_x, *rest)
    same(sums.sum((0, 1)), of_weight)
# As a block calls them, dropout included, the kernels stand for the operators of a CPU.
torch.manual_seed(0)
from runtime.models.dropout import Drop, MaskRows
x, part = torch.randn(2, 2, 5, 40)
drop = Drop(rows=MaskRows(key=(3, 5), sequence=2, length=5, positions=torch.arange(5)), share=0.2)
class Norm(operators.LayerNorm):
    pass
norm = Norm(40, torch.float32)
torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
results = []
for chosen in (lambda x: None, lambda x: kernels):
    residuals.kernels_for = chosen
    given = [one.clone().requires_grad_() for one in (x, part, torch.ones(40))]
    norm.zero_grad()
    whole, normal = residuals.added_and_normed(*given, drop, norm)
    again, beside = residuals.normed_beside(whole, norm)
    last = residuals.added(again, normal * beside, given[2], drop)
    last.square().sum().backward()
    results.append([last, *(one.grad for one in (*given, norm.weight, norm.bias))])
for one, other in zip(*results):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
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

def compiled(kernel, capability, numbers, warps=4, **fixed):
    types = {name: "*fp16" for name in kernel.arg_names}
    types |= {name: "*fp32" for name in ("cosine", "sine") if name in types}
    types |= {"hashes": "*i64", "factor": "fp32"} if "hashes" in types else {}
    wide = ("mean", "reciprocal", "sums")
    types |= {name: "*fp32" for name in wide if name in types}
    types |= {"epsilon": "fp32"} if "epsilon" in types else {}
    types |= {name: "*i64" for name in ("targets",) if name in types}
    types |= {name: "*fp32" for name in ("found", "totals") if name in types}
    types |= {name: "i32" for name in numbers} | {name: "constexpr" for name in fixed}
    source = ASTSource(kernel, types, constexprs=fixed)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm

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
    words, of_part = ["key", "threshold", "columns"], {"has_bias": True, "drops": True}
    parts["add"] = compiled(kernels._add, capability, words, **of_part, width=kernels.PART)
    # The widest rows that a program holds, with all that it may do.
    warps = kernels._warps(kernels.WIDEST)
    both = {"centers": True, "width": kernels.WIDEST}
    parts["add and norm"] = compiled(
        kernels._add_and_norm, capability, words, warps, **of_part, **both
    )
    rows = ["rows", "each", "columns"]
    parts["norm backward"] = compiled(
        kernels._norm_backward, capability, rows, warps, adds=True, **both
    )
    for name, made in parts.items():
        # One register or two of a whole row are no loss.
        assert spilled(made) <= (8 if "norm" in name else 0), (name, capability)
"""


@pytest.mark.parametrize(("code", "interpreted"), [(COMPARED, "1"), (COMPILED, "0")])
def test_kernels_do_what_torch_does_and_compile(
    code: str, interpreted: str, warm_python: str
) -> None:
    settings = {"TRITON_INTERPRET": interpreted, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [warm_python, "-c", code],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
