"""Attention kernels named by measured runs, as factors on the rates of hardware files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mistlab.machine.hardware import ArchitectureName, Hardware

# FlashAttention 2 and 3, cuDNN's kernel, torch's default (`sdpa`), and Triton kernels.
AttentionKernel = Literal["flash2", "flash3", "cudnn", "sdpa", "triton", ""]

# Hardware files give the rate of the best kernel per GPU: FlashAttention 2 on Ampere, cuDNN's on
# later GPUs. FlashAttention 2 uses Ampere's instructions (`mma.sync`), at 0.62 of the rate of
# Hopper's (`wgmma`) and 0.31 of Blackwell's (`tcgen05`); it reaches 35 % of H100's peak
# (paper arXiv 2407.08608), and the file has 550 of 989 TFLOP/s. torch calls
# FlashAttention 2 by default.
_FLASH_2: Mapping[ArchitectureName, float] = {"hopper": 0.64, "blackwell": 0.39}
# FlashAttention 3 runs on Hopper alone, a fifth faster than the file's rate (same paper). The
# Triton kernel is llm-foundry's, fitted (mistlab/catalog/engines.yaml).
SHARES: Mapping[AttentionKernel, Mapping[ArchitectureName, float]] = {
    "flash2": _FLASH_2,
    "sdpa": _FLASH_2,
    "flash3": {"hopper": 1.2},
    "cudnn": {},
    "triton": {"ampere": 0.7, "hopper": 0.42},
}
OF_ATTENTION = ("attention_forward", "attention_backward")


def with_kernel(hardware: Hardware, kernel: AttentionKernel, engine_share: float) -> Hardware:
    """Hardware with the attention rate of a named kernel, under an engine that reaches a fraction
    of it; unchanged without a name.
    """
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
