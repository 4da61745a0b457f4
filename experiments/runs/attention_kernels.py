"""The attention kernels that runs name, as shares of the rates that hardware files have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mistlab.machine.hardware import ArchitectureName, Hardware

# FlashAttention 2 and 3, cuDNN's, torch's own choice (`sdpa`), and kernels written in Triton.
AttentionKernel = Literal["flash2", "flash3", "cudnn", "sdpa", "triton", ""]

# Rates of hardware files are those of the best kernel of the day on each GPU: FlashAttention 2 on
# Ampere, cuDNN's on what came later. FlashAttention 2 has Ampere's products (`mma.sync`), whose
# rate is 0.62 of that of Hopper's own (`wgmma`) and 0.31 of that of Blackwell's (`tcgen05`); it has
# 35 % of H100's peak by its authors' paper (arXiv 2407.08608), and 550 of 989 TFLOP/s are the
# file's. torch's own choice is FlashAttention 2.
_FLASH_2: Mapping[ArchitectureName, float] = {"hopper": 0.64, "blackwell": 0.39}
# FlashAttention 3 has Hopper's own products, and does not run elsewhere: a fifth faster than the
# file's (the same paper). Triton's is llm-foundry's, fitted (mistlab/catalog/engines.yaml).
SHARES: Mapping[AttentionKernel, Mapping[ArchitectureName, float]] = {
    "flash2": _FLASH_2,
    "sdpa": _FLASH_2,
    "flash3": {"hopper": 1.2},
    "cudnn": {},
    "triton": {"ampere": 0.7, "hopper": 0.42},
}
OF_ATTENTION = ("attention_forward", "attention_backward")


def with_kernel(hardware: Hardware, kernel: AttentionKernel, engine_share: float) -> Hardware:
    """A hardware whose attention is as fast as a kernel's, under an engine that takes a share of
    the rates; the hardware itself where no kernel is named."""
    compute, architecture = hardware.compute, hardware.gpu.architecture
    if not kernel or compute is None:
        return hardware
    share = 1.0 if architecture is None else SHARES[kernel].get(architecture, 1.0)
    rates = tuple(
        replace(rate, tflops=rate.tflops * share / engine_share)
        if rate.operators in OF_ATTENTION and rate.tflops
        else rate
        for rate in compute.rates
    )
    return replace(hardware, compute=replace(compute, rates=rates))
