"""Which errors say that memory has run out, and which say that a rank is gone."""

import pytest

torch = pytest.importorskip("torch")
from torch.distributed import DistBackendError  # noqa: E402

from runtime.comm.group import (  # noqa: E402
    RankLostError,
    Shortage,
    ShortageError,
    refusal_in,
    refusals,
)
from runtime.comm.processes import heard_from  # noqa: E402

NCCL = "NCCL error in: NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}\nLast error:\n{}"
UNHANDLED = (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
)
REFUSALS = {
    "torch on a GPU": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more."),
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    "torch on the host": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    ),
    "Python": (MemoryError(), "MemoryError"),
    "CUDA itself": (
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        "CUDA error: out of memory",
    ),
    "cuBLAS": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    "NCCL, of a call": (
        DistBackendError(NCCL.format(*UNHANDLED, "Cuda failure 2 'out of memory'")),
        "NCCL: Cuda failure 2 'out of memory'",
    ),
    "NCCL, of its allocator": (
        DistBackendError(NCCL.format(*UNHANDLED, "Failed to CUDA calloc 6291456 bytes")),
        "NCCL: Failed to CUDA calloc 6291456 bytes",
    ),
}
NO_REFUSALS = {
    "a closed connection": RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9095"),
    "another failure in NCCL": DistBackendError(
        NCCL.format(*UNHANDLED, "Cuda failure 999 'unknown error'")
    ),
    "a rank without memory": RankLostError("rank 0: rank 1 failed (CUDA out of memory)"),
    "what a user has said": ValueError("out of memory"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_allocator_s_refusal_is_a_shortage_and_nobody_is_gone(name: str) -> None:
    error, said = REFUSALS[name]
    assert refusal_in(error) == said
    with pytest.raises(MemoryError) as raised, refusals(), heard_from([0, 1]):
        raise error
    assert refusal_in(raised.value) == said


@pytest.mark.parametrize("name", NO_REFUSALS)
def test_no_other_error_is_a_shortage(name: str) -> None:
    error = NO_REFUSALS[name]
    assert refusal_in(error) is None
    with pytest.raises(type(error)) as raised, refusals():
        raise error
    assert raised.value is error


def test_a_shortage_that_was_told_is_not_told_again() -> None:
    error = ShortageError(Shortage(stage=0, doing="it", held_bytes={}, reason="out of memory"))
    assert refusal_in(error) is None


def test_other_errors_of_collectives_are_ranks_that_are_gone() -> None:
    error = NO_REFUSALS["another failure in NCCL"]
    with pytest.raises(RankLostError, match="unhandled cuda error"), heard_from([0, 1]):
        raise error
