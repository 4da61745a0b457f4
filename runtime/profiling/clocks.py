"""Reads the clock rates of a GPU from nvidia-smi."""

import torch

from mistlab.values.measurement import Clocks
from runtime.profiling.nvidia_smi import answers_of

# Clocks of streaming multiprocessors, now and at most; clock of memory; power limit in watts.
_QUERIES = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def clocks_of(device: torch.device) -> Clocks | None:
    """The clock rates of a GPU; None for a CPU, and if nvidia-smi does not answer.

    An idle GPU lowers its clocks: call this right after work.
    """
    if device.type != "cuda":
        return None
    sm, most_sm, memory, power = map(_number, answers_of(_QUERIES, _identity(device)))
    if sm is None or memory is None:
        return None
    return Clocks(sm_mhz=sm, memory_mhz=memory, most_sm_mhz=most_sm, power_limit_w=power)


def _identity(device: torch.device) -> str:
    """The GPU's name for nvidia-smi, which does not number GPUs as torch does."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if uuid is None else f"GPU-{uuid}"


def _number(word: str) -> float | None:
    """A positive number; None for no word, and for a word in brackets, nvidia-smi's "unknown"."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if number > 0 else None
