"""Runs whose losses are equal to the bit when they compute the same, for comparisons."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from mistlab.values.errors import InputError

# A fixed workspace, without which cuBLAS may choose other algorithms from run to run. It is read
# when the first product of the process runs.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Let every operator of the block give the same bits whenever it gets the same.

    FlashAttention's gradient then adds up in a fixed order, which takes it longer and more memory.
    """
    if torch.cuda.is_initialized() and WORKSPACE not in os.environ:
        message = (
            f"--deterministic: this process has used its GPU without {WORKSPACE}: set it to "
            f"{FIXED_WORKSPACE}, or start another process"
        )
        raise InputError(message)
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)
    # Attributes of the module itself, which its type does not have.
    memory: Any = deterministic
    was_strict, filled = (
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    # Else memory is filled on the stream that allocates it, after the moment that the transfer into
    # it waits for: a race that a run without this mode does not have.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_strict)
        memory.fill_uninitialized_memory = filled
