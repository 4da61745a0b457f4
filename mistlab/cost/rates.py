"""The rates at which an engine's kernels compute on a hardware, and how much slower some precisions
are than 16 bits."""

from dataclasses import replace

from mistlab.engines.engine import Engine
from mistlab.engines.host_time import HostTime
from mistlab.machine.compute import Compute
from mistlab.machine.hardware import Hardware, PeakTflops
from mistlab.values.precision import Precision


def compute_of(hardware: Hardware, compute: Compute, engine: Engine) -> Compute:
    """The rates at which an engine's kernels compute; a host that is known needs no launches."""
    products, attention, memory = engine.shares(hardware.name)
    eight_bit = engine.eight_bit_on.get(hardware.name, 1.0)
    if engine.host is None and products == attention == memory == eight_bit == 1:
        return compute
    shares = {
        "matmul": products,
        "matmul_8bit": eight_bit,
        "batched_matmul": products,
        "attention_forward": attention,
        "attention_backward": attention,
    }
    rates = tuple(
        replace(
            rate,
            tflops=rate.tflops and rate.tflops * shares.get(rate.operators, 1.0),
            gbytes_per_s=rate.gbytes_per_s and rate.gbytes_per_s * memory,
        )
        for rate in compute.rates
    )
    launch_us = compute.launch_us if engine.host is None else 0.0
    return replace(compute, rates=rates, launch_us=launch_us)


def host_of(engine: Engine, block_operators: float, compute: Compute) -> HostTime | None:
    """The time of an engine's host that issues blocks of so many operators, on a hardware; None if
    it is not known."""
    if engine.host is None:
        return None
    return replace(engine.host.of_blocks(block_operators), launch_s=compute.launch_s)


def slowdown_of(peaks: PeakTflops, precision: Precision) -> float:
    """How many times slower a precision's arithmetic is than 16-bit arithmetic.

    With 8-bit and 4-bit products everything else is in 16 bits.
    """
    peak: float | None = peaks.bf16 if precision in ("fp8", "fp4") else getattr(peaks, precision)
    return 1.0 if peak is None else peaks.fp16 / peak


def slowdown_of_8_bits(peaks: PeakTflops) -> float:
    """How many times slower 8-bit products are than 16-bit ones; below 1 where they are faster."""
    return 1.0 if peaks.fp8 is None else peaks.fp16 / peaks.fp8
