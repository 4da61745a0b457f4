"""Chooses the implementation of fused attention for a whole run.

A plan says only that attention is fused; the run chooses one implementation for all layers.
Otherwise PyTorch would choose by GPU and version (on Hopper some versions choose cuDNN's), and a
profile and a run, or two runs, could use different kernels.
"""

from importlib.util import find_spec
from typing import Literal

import torch

from mistlab.core.values import reject
from mistlab.engines.engine import SINGLE, Precision
from mistlab.plan.workload import Attention

AttentionKernel = Literal["flash", "cudnn", "flash-attn"]

OPTION = "--attention-kernel"

_settled: AttentionKernel = "flash"


def check_kernel(
    kernel: AttentionKernel, *, device: str, precision: Precision, attention: Attention
) -> None:
    """Raise an error if an attention kernel is not available for a device, precision and kind of
    attention; ``flash`` always is.
    """
    if kernel == "flash":
        return
    if attention != "flash":
        reject(
            f"--attention-kernel {kernel}: with workload.attention: {attention} no fused kernel "
            "computes attention: give workload.attention: flash, or leave --attention-kernel out"
        )
    if device == "cpu":
        reject(
            f"--attention-kernel {kernel}: this kernel runs only on GPUs: give --device cuda, or "
            "leave --attention-kernel out"
        )
    if precision in SINGLE:
        reject(
            f"--attention-kernel {kernel}: this kernel has no 32-bit arithmetic ({precision}): "
            "give workload.precision: bf16, or leave --attention-kernel out"
        )
    if kernel == "flash-attn" and not _is_installed("flash_attn"):
        reject(
            "--attention-kernel flash-attn: package flash-attn is not installed: pip install "
            "--no-build-isolation '.[flash]', or leave --attention-kernel out"
        )
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
        reject(
            "--attention-kernel cudnn: the gradient of this kernel may differ from run to run: "
            "leave out --attention-kernel or --deterministic"
        )


def settled_kernel() -> AttentionKernel:
    """The implementation that computes fused attention in this process."""
    return _settled


def settle_kernel(kernel: AttentionKernel, device: torch.device) -> None:
    """Choose the implementation of fused attention for the rest of the process.

    ``flash`` is PyTorch's FlashAttention-2. Where FlashAttention-2 does not support the type, the
    GPU or the shape, PyTorch takes another implementation, but never cuDNN's. PyTorch's switches
    are set once, for the whole process: a context manager around each call would cost host time,
    and a trace could not follow it.
    """
    global _settled  # noqa: PLW0603 (as the switches below)
    _settled = kernel
    if device.type != "cuda":
        return
    backends, is_cudnn = torch.backends.cuda, kernel == "cudnn"
    backends.enable_cudnn_sdp(is_cudnn)
    backends.enable_flash_sdp(not is_cudnn)
    backends.enable_mem_efficient_sdp(not is_cudnn)
    backends.enable_math_sdp(not is_cudnn)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:
        # ``find_spec`` raises this error for a module that is imported, but was not loaded from a
        # file.
        return True
