"""The attention kernels that rows of measured runs name, each with the factor by which its rate
differs from the attention rate in hardware files.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mistlab.machine.hardware import ArchitectureName, Hardware

# FlashAttention 2 and 3, cuDNN's kernel, torch's default (`sdpa`), and kernels in Triton.
AttentionKernel = Literal["flash2", "flash3", "cudnn", "sdpa", "triton", ""]

# The rate of FlashAttention 2 over the attention rate in the hardware file, by GPU architecture.
# The file has the rate of each GPU's best kernel: FlashAttention 2 on Ampere, cuDNN's on later
# GPUs. On later GPUs FlashAttention 2 is slower, since it uses Ampere's instructions (`mma.sync`),
# which have 0.62 of the rate of Hopper's (`wgmma`) and 0.31 of Blackwell's (`tcgen05`). On H100 it
# reaches 35 % of the peak (paper arXiv 2407.08608); the file has 550 of 989 TFLOP/s. torch calls it
# by default.
_FLASH_2: Mapping[ArchitectureName, float] = {"hopper": 0.64, "blackwell": 0.39}
# The rate of each kernel over the attention rate in the hardware file, by GPU architecture.
# FlashAttention 3 runs on Hopper only, a fifth faster than the file's rate (same paper). The
# Triton kernel is llm-foundry's; its factor is fitted (mistlab/catalog/engines.yaml).
SHARES: Mapping[AttentionKernel, Mapping[ArchitectureName, float]] = {
    "flash2": _FLASH_2,
    "sdpa": _FLASH_2,
    "flash3": {"hopper": 1.2},
    "cudnn": {},
    "triton": {"ampere": 0.7, "hopper": 0.42},
}
OF_ATTENTION = ("attention_forward", "attention_backward")

# FlashAttention 2 has a lower rate for short sequences: tiles straddle the causal mask, and each
# tile of queries has a beginning and an end. Forward kernels of 512 to 16,384 tokens on A100, with
# 128 channels and 2^19 rows of queries or more, have rates proportional to 1 / (1 + LOST / tokens):
# 558 kernels of vLLM 0.14 to 2.7 % in the median, 558 of TensorRT-LLM 1.0 to 1.3 % with a LOST of
# 579. The hardware files' rates for Ampere are those of sequences up to MEASURED tokens.
LOST, MEASURED = 507, 4096


def growth(hardware: Hardware, kernel: AttentionKernel, engine_share: float, tokens: int) -> float:
    """The rate of attention for sequences of this many ``tokens`` over the rate in the hardware
    file: above 1 for long sequences where FlashAttention 2 runs on Ampere.

    If no kernel is named, FlashAttention 2 is assumed for engines with ``engine_share`` 1, which
    reach the file's whole rate. Other kernels do not get faster with length: the result is 1.
    """
    is_known = kernel in ("flash2", "sdpa") or (not kernel and engine_share == 1)
    if not is_known or hardware.gpu.architecture != "ampere":
        return 1.0
    return (1 + LOST / MEASURED) / (1 + LOST / max(tokens, MEASURED))


def with_kernel(
    hardware: Hardware, kernel: AttentionKernel, engine_share: float, tokens: int = 0
) -> Hardware:
    """The hardware with the attention rate of a named kernel for sequences of ``tokens`` tokens.
    The rate is divided by ``engine_share``, since predictions multiply it by this share. If no
    kernel is named, the hardware file's rate stays, except that it may grow with the length.
    """
    compute, architecture = hardware.compute, hardware.gpu.architecture
    more = growth(hardware, kernel, engine_share, tokens)
    if compute is None or (not kernel and more == 1):
        return hardware
    share = SHARES[kernel].get(architecture, 1.0) if kernel and architecture else 1.0
    rates = tuple(
        replace(rate, tflops=rate.tflops * share * more / engine_share)
        if rate.operators in OF_ATTENTION and rate.tflops
        else rate
        for rate in compute.rates
    )
    return replace(hardware, compute=replace(compute, rates=rates))
