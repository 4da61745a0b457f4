"""Makes a run deterministic: equal computations give bitwise equal losses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from mistlab.core.values import reject

# The environment variable for cuBLAS's workspace, read at a process's first GEMM. Without a fixed
# workspace cuBLAS may choose other algorithms from run to run.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Within the ``with`` block, every operator gives bitwise equal results for equal inputs.

    FlashAttention's gradient then sums in a fixed order, which takes more time and memory.
    """
    if torch.cuda.is_initialized() and WORKSPACE not in os.environ:
        reject(
            f"--deterministic: this process used its GPU before {WORKSPACE} was set: set this "
            f"environment variable to {FIXED_WORKSPACE} before the process starts"
        )
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)
    # Typed as ``Any`` because the type checker does not know the attributes of this module.
    memory: Any = deterministic
    was_strict, filled = (
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    # Torch would fill new memory on the stream that allocates it, and a transfer into the memory
    # does not wait for this: a race that exists only in this mode.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_strict)
        memory.fill_uninitialized_memory = filled
