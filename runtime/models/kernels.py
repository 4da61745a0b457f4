"""Triton kernels that each replace several kernels of torch: causal softmax, SwiGLU, rotary
embedding, counter-based dropout, cross entropy, and residual addition fused with the next norm.

Each kernel reads its inputs once, computes in 32 bits, and writes its results once.
``runtime.models.operators`` calls the kernels on GPUs and checks shapes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917

import torch
import triton
from torch import Tensor
from triton import language as tl

# The number of columns that a kernel's program loads at a time when it loops over a row.
PART = 1024
# The number of logits that a kernel's program loads at a time when it loops over a token's
# vocabulary.
PART_OF_ROW = 4096
# WIDEST: the number of columns of the widest row that one program holds in registers. PROGRAMS: how
# many programs share the rows of a norm's backward pass, about two per multiprocessor of a large
# GPU.
WIDEST, PROGRAMS = 8192, 256
# The number of heads that one program of the rotary embedding rotates: all heads of a large model
# would not fit in registers.
HEADS = 8


def causal_softmax(scores: Tensor, sequence: int) -> Tensor:
    """Causal softmax of attention scores as one Triton kernel, like
    ``runtime.models.operators.causal_softmax``; scores of future positions are not read.
    """
    scores = scores.contiguous()
    shares = torch.empty_like(scores)
    block = triton.next_power_of_2(sequence)
    _softmax[scores.numel() // sequence,](
        shares, scores, sequence, block, num_warps=min(16, max(1, block // 256))
    )
    return shares


def swiglu(gate_and_up: Tensor) -> Tensor:
    """SwiGLU as a single Triton kernel, like ``runtime.models.operators.swiglu``."""
    gate_and_up = gate_and_up.contiguous()
    *rows, both = gate_and_up.shape
    result = gate_and_up.new_empty((*rows, both // 2))
    _swiglu[_parts(result)](result, gate_and_up, both // 2, PART)
    return result


def swiglu_backward(gradient: Tensor, gate_and_up: Tensor) -> Tensor:
    """The backward pass of SwiGLU as a single Triton kernel, like
    ``runtime.models.operators.swiglu_backward``.
    """
    gradient, gate_and_up = gradient.contiguous(), gate_and_up.contiguous()
    result = torch.empty_like(gate_and_up)
    _swiglu_backward[_parts(gradient)](result, gradient, gate_and_up, gradient.shape[-1], PART)
    return result


def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotary embedding, in place, as one Triton kernel, like ``runtime.models.operators.rotate_``;
    each program of the kernel rotates a few heads of one token.
    """
    batch, sequence, count, _ = heads.shape
    half = cosine.shape[-1]
    group = min(HEADS, triton.next_power_of_2(count))
    _rotate[batch * sequence, triton.cdiv(count, group)](
        heads,
        cosine.contiguous(),
        sine.contiguous(),
        sequence,
        *heads.stride()[:3],
        count,
        half,
        group,
        triton.next_power_of_2(half),
    )


def dropped(x: Tensor, hashes: Tensor, key: int, threshold: int, factor: float) -> Tensor:
    """Dropout of the rows of ``x`` (R, columns): kept values times ``factor``, the others 0. The
    mask is computed from the rows' hashes (R) and the columns' ``key``, as
    ``runtime.models.dropout`` does.
    """
    result = torch.empty_like(x)
    _dropped[_parts(x)](result, x, hashes, *_signed(key, threshold), factor, x.shape[-1], PART)
    return result


def _signed(key: int, threshold: int) -> tuple[int, int]:
    """Unsigned 32-bit numbers reinterpreted as the signed ones that Triton kernels take."""
    return key - (key >> 31 << 32), threshold - (threshold >> 31 << 32)


# The arguments of dropout in a kernel: row hashes, column key, threshold and scale.
Drop = tuple[Tensor, int, int, float]


def added(x: Tensor, part: Tensor, bias: Tensor | None, drop: Drop | None) -> Tensor:
    """The residual ``x`` plus a branch's output after bias and dropout, as one Triton kernel, like
    ``runtime.models.residuals``.
    """
    x, part = x.contiguous(), part.contiguous()
    result = torch.empty_like(x)
    _add[_parts(x)](result, x, part, *_of_part(part, bias, drop), x.shape[-1], PART)
    return result


def added_and_normed(
    x: Tensor,
    part: Tensor,
    bias: Tensor | None,
    drop: Drop | None,
    weight: Tensor,
    shift: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual sum that ``added`` makes, its norm, and each row's mean and reciprocal standard
    deviation; without ``shift`` the norm is RMSNorm, with the reciprocal root mean square.
    """
    x, part = x.contiguous(), part.contiguous()
    *rows, columns = x.shape
    result, normal = torch.empty_like(x), torch.empty_like(x)
    mean, reciprocal = (x.new_empty((*rows, 1), dtype=torch.float32) for _ in range(2))
    made = (result, normal, mean, reciprocal)
    norm = (weight, weight if shift is None else shift, epsilon, shift is not None)
    width = triton.next_power_of_2(columns)
    _add_and_norm[reciprocal.numel(),](
        *(*made, x, part, *_of_part(part, bias, drop), *norm, columns, width),
        num_warps=_warps(width),
    )
    return made


def norm_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    *,
    centers: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm's input (plus the ``residual`` gradient), weight and bias. Only a
    norm that ``centers`` (LayerNorm) has a bias; for RMSNorm the third result has no meaning.
    """
    gradient, x = gradient.contiguous(), x.contiguous()
    rows, columns = reciprocal.numel(), x.shape[-1]
    programs = min(rows, PROGRAMS)
    of_x = torch.empty_like(x)
    sums = x.new_empty((2 if centers else 1, programs, columns), dtype=torch.float32)
    width = triton.next_power_of_2(columns)
    _norm_backward[programs,](
        *(of_x, sums, gradient, x, mean, reciprocal, weight),
        gradient if residual is None else residual.contiguous(),
        *(rows, triton.cdiv(rows, programs), columns, centers, residual is not None, width),
        num_warps=_warps(width),
    )
    of_vectors = sums.sum(1).to(weight.dtype)
    return of_x, of_vectors[0], of_vectors[-1]


def _of_part(part: Tensor, bias: Tensor | None, drop: Drop | None) -> tuple[object, ...]:
    """A branch's bias and dropout as kernel arguments. The kernel's flags say whether there are a
    bias and dropout; in place of an absent tensor the branch's output is passed.
    """
    hashes, key, threshold, factor = (part, 0, 0, 1.0) if drop is None else drop
    signed = _signed(key, threshold)
    summand = part if bias is None else bias
    return summand, hashes, *signed, factor, bias is not None, drop is not None


def _warps(width: int) -> int:
    """The number of warps whose registers together hold a row of ``width`` columns."""
    return 32 if width == WIDEST else max(1, width // 512)


def sum_rows(sums: Tensor, logits: Tensor, targets: Tensor, first: int, used: int) -> None:
    """The parts of cross entropy's sums on this rank, as one Triton kernel, like
    ``runtime.models.operators.sum_rows``; each program loops over the vocabulary for one token.
    """
    rows, columns = logits.shape
    part = min(PART_OF_ROW, triton.next_power_of_2(columns))
    _sum_rows[rows,](sums, logits, targets, rows, columns, first, used, part, num_warps=8)


def to_gradient_(
    logits: Tensor, gradient: Tensor, totals: Tensor, targets: Tensor, first: int, used: int
) -> None:
    """Replace logits by the gradient of cross entropy, as one Triton kernel, like
    ``runtime.models.operators.to_gradient_``.
    """
    columns = logits.shape[-1]
    gradient = gradient.contiguous()
    _to_gradient[_parts(logits)](logits, gradient, totals, targets, columns, first, used, PART)


def _parts(rows: Tensor) -> tuple[int, int]:
    columns = rows.shape[-1]
    return rows.numel() // columns, triton.cdiv(columns, PART)


@triton.jit
def _softmax(shares, scores, sequence, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    known = column <= row % sequence
    index = row * sequence + column
    score = tl.load(scores + index, mask=known, other=-float("inf")).to(tl.float32)
    power = tl.exp(score - tl.max(score, axis=0))
    share = power / tl.sum(power, axis=0)
    tl.store(shares + index, share.to(shares.dtype.element_ty), mask=column < sequence)


@triton.jit
def _swiglu(result, gate_and_up, columns, part: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    index = 2 * row * columns + column
    gate = tl.load(gate_and_up + index, mask=inside).to(tl.float32)
    up = tl.load(gate_and_up + index + columns, mask=inside).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(result + row * columns + column, product.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(result, gradient, gate_and_up, columns, part: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    index = 2 * row * columns + column
    slope = tl.load(gradient + row * columns + column, mask=inside).to(tl.float32)
    gate = tl.load(gate_and_up + index, mask=inside).to(tl.float32)
    up = tl.load(gate_and_up + index + columns, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = slope * up * share * (1 + gate * (1 - share))
    of_up = slope * gate * share
    tl.store(result + index, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + index + columns, of_up.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    heads,
    cosine,
    sine,
    sequence,
    of_sequence,
    of_position,
    of_head,
    count,
    half,
    group: tl.constexpr,
    all_channels: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % sequence
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    channel = tl.arange(0, all_channels)[None, :]
    inside = (head < count) & (channel < half)
    start = heads + (token // sequence) * of_sequence + position * of_position
    first = tl.load(start + head * of_head + channel, mask=inside).to(tl.float32)
    second = tl.load(start + head * of_head + channel + half, mask=inside).to(tl.float32)
    angle = position * half + channel
    cos = tl.load(cosine + angle, mask=channel < half).to(tl.float32)
    sin = tl.load(sine + angle, mask=channel < half).to(tl.float32)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    tl.store(start + head * of_head + channel, turned.to(heads.dtype.element_ty), mask=inside)
    tl.store(start + head * of_head + channel + half, other.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["key", "threshold"])
def _dropped(result, x, hashes, key, threshold, factor, columns, part: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    of_column = _hash(column.to(tl.uint32) ^ key.to(tl.uint32))
    chance = _hash(of_column ^ tl.load(hashes + row).to(tl.uint32))
    value = tl.load(x + row * columns + column, mask=inside).to(tl.float32)
    value = tl.where(chance >= threshold.to(tl.uint32), value * factor, 0.0)
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _with_bias(
    part,
    bias,
    hashes,
    row,
    column,
    inside,
    index,
    key,
    threshold,
    factor,
    has_bias: tl.constexpr,
    drops: tl.constexpr,
):
    value = tl.load(part + index, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if drops:
        of_column = _hash(column.to(tl.uint32) ^ key.to(tl.uint32))
        chance = _hash(of_column ^ tl.load(hashes + row).to(tl.uint32))
        value = tl.where(chance >= threshold.to(tl.uint32), value * factor, 0.0)
    return value


@triton.jit(do_not_specialize=["key", "threshold"])
def _add(
    result,
    x,
    part,
    bias,
    hashes,
    key,
    threshold,
    factor,
    has_bias: tl.constexpr,
    drops: tl.constexpr,
    columns,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < columns
    index = row * columns + column
    value = _with_bias(
        part, bias, hashes, row, column, inside, index, key, threshold, factor, has_bias, drops
    )
    value += tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + index, value.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key", "threshold"])
def _add_and_norm(
    result,
    normal,
    mean,
    reciprocal,
    x,
    part,
    bias,
    hashes,
    key,
    threshold,
    factor,
    has_bias: tl.constexpr,
    drops: tl.constexpr,
    weight,
    shift,
    epsilon,
    centers: tl.constexpr,
    columns,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < columns
    index = row * columns + column
    value = _with_bias(
        part, bias, hashes, row, column, inside, index, key, threshold, factor, has_bias, drops
    )
    value += tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    # The norm is computed from the sum as stored (in 16 bits), because the backward pass reads the
    # stored sum.
    kept = value.to(result.dtype.element_ty)
    tl.store(result + index, kept, mask=inside)
    value = kept.to(tl.float32)
    if centers:
        middle = tl.sum(value, axis=0) / columns
        tl.store(mean + row, middle)
        value = tl.where(inside, value - middle, 0.0)
    root = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + epsilon)
    tl.store(reciprocal + row, root)
    made = value * root * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if centers:
        made += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normal + index, made.to(normal.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    of_x,
    sums,
    gradient,
    x,
    mean,
    reciprocal,
    weight,
    residual,
    rows,
    each,
    columns,
    centers: tl.constexpr,
    adds: tl.constexpr,
    width: tl.constexpr,
):
    first = tl.program_id(0) * each
    column = tl.arange(0, width)
    inside = column < columns
    start = first.to(tl.int64) * columns
    of_gain = tl.zeros((width,), tl.float32)
    of_shift = tl.zeros((width,), tl.float32)
    for number in range(each):
        is_row = first + number < rows
        here = inside & is_row
        index = start + column
        slope = tl.load(gradient + index, mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + index, mask=here, other=0.0).to(tl.float32)
        root = tl.load(reciprocal + first + number, mask=is_row, other=0.0)
        if centers:
            value = tl.where(
                here, value - tl.load(mean + first + number, mask=is_row, other=0.0), 0.0
            )
            of_shift += slope
        value *= root
        of_gain += slope * value
        # The weight is loaded again for each row, from cache, to leave the registers to the running
        # sums.
        slope *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        made = slope - value * (tl.sum(slope * value, axis=0) / columns)
        if centers:
            made -= tl.sum(slope, axis=0) / columns
        made *= root
        if adds:
            made += tl.load(residual + index, mask=here, other=0.0).to(tl.float32)
        tl.store(of_x + index, made.to(of_x.dtype.element_ty), mask=here)
        start += columns
    pointer = sums + tl.program_id(0) * columns + column
    tl.store(pointer, of_gain, mask=inside)
    if centers:
        tl.store(pointer + tl.num_programs(0) * columns, of_shift, mask=inside)


@triton.jit
def _sum_rows(sums, logits, targets, rows, columns, first, used, part: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    # Each of the ``part`` columns that the program loads at a time has a running maximum and sum;
    # they are merged at the end of the row.
    largest = tl.full((part,), -float("inf"), tl.float32)
    total = tl.zeros((part,), tl.float32)
    for begin in range(0, used, part):
        column = begin + tl.arange(0, part)
        logit = tl.load(start + column, mask=column < used, other=-float("inf")).to(tl.float32)
        top = tl.maximum(largest, logit)
        # A column without a value so far has maximum -inf, and would subtract infinity from
        # infinity.
        known = tl.where(top == -float("inf"), 0.0, top)
        total = total * tl.exp(largest - known) + tl.exp(logit - known)
        largest = top
    top = tl.max(largest, axis=0)
    known = tl.where(top == -float("inf"), 0.0, top)
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < used)
    at_target = tl.load(start + target, mask=here, other=0.0).to(tl.float32)
    tl.store(sums + row, top)
    tl.store(sums + rows + row, tl.sum(total * tl.exp(largest - known), axis=0))
    tl.store(sums + 2 * rows + row, at_target)


@triton.jit
def _to_gradient(logits, gradient, totals, targets, columns, first, used, part: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    pointer = logits + row * columns + column
    logit = tl.load(pointer, mask=inside).to(tl.float32)
    share = tl.where(column < used, tl.exp(logit - tl.load(totals + row)), 0.0)
    target = tl.load(targets + row) - first
    share = tl.where((column == target) & (column < used), share - 1.0, share)
    slope = share * tl.load(gradient + row)
    tl.store(pointer, slope.to(logits.dtype.element_ty), mask=inside)
