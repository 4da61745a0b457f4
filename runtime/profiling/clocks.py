"""Reads the clock rates of a GPU from nvidia-smi."""

import subprocess

import torch

from mistlab.values.measurement import Clocks

# Clocks of streaming multiprocessors, now and at most; clock of memory; power limit in watts.
_QUERIES = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
_PATIENCE_S = 20.0


def clocks_of(device: torch.device) -> Clocks | None:
    """The clock rates of a GPU; None for a CPU, and if nvidia-smi does not answer.

    An idle GPU lowers its clocks: call this right after work.
    """
    if device.type != "cuda":
        return None
    sm, most_sm, memory, power = (_number(word) for word in _answer(_identity(device)).split(","))
    if sm is None or memory is None:
        return None
    return Clocks(sm_mhz=sm, memory_mhz=memory, most_sm_mhz=most_sm, power_limit_w=power)


def _identity(device: torch.device) -> str:
    """The GPU's name for nvidia-smi, which does not number GPUs as torch does."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if uuid is None else f"GPU-{uuid}"


def _answer(identity: str) -> str:
    """nvidia-smi's answer, words with commas between them; only commas if it does not answer."""
    nothing = "," * (len(_QUERIES) - 1)
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", f"--id={identity}"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    line = done.stdout.strip()
    return line if done.returncode == 0 and line.count(",") == len(_QUERIES) - 1 else nothing


def _number(word: str) -> float | None:
    """A positive number; None for a word in brackets, nvidia-smi's way to say "unknown"."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if number > 0 else None
