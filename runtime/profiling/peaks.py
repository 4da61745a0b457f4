"""Measures the best rates of a device: of matrix products, and of its memory."""

import torch

from mistlab.values.workload import Precision
from runtime.models.config import TYPE_OF_PRECISION
from runtime.profiling.timing import Clock, Timing


def product_flop_per_s(precision: Precision, size: int, clock: Clock, repetitions: int) -> float:
    """Operations a second in a product of two square matrices of random values."""
    dtype = TYPE_OF_PRECISION[precision]
    left, right = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    samples = clock.samples_s(lambda: torch.mm(left, right, out=result), repetitions)
    return float(2 * size**3 / Timing.of(samples).median_s)


def memory_bytes_per_s(size_bytes: int, clock: Clock, repetitions: int) -> float:
    """Bytes read and written a second by a copy within the device's memory."""
    source = torch.randint(0, 100, (size_bytes,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    samples = clock.samples_s(lambda: target.copy_(source), repetitions)
    return 2 * size_bytes / Timing.of(samples).median_s
