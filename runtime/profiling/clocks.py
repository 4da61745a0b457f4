"""How fast a GPU's clocks run at a moment: what the driver's tool says."""

import subprocess

import torch

from mistlab.values.measurement import Clocks

# Of streaming multiprocessors now and at most, of memory; and watts.
_QUERIES = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
_PATIENCE_S = 20.0


def clocks_of(device: torch.device) -> Clocks | None:
    """A GPU's clocks; none of a CPU, nor where nobody tells.

    Idle GPUs slow down: ask right after work.
    """
    if device.type != "cuda":
        return None
    sm, most_sm, memory, power = (_number(word) for word in _said(_identity(device)).split(","))
    if sm is None or memory is None:
        return None
    return Clocks(sm_mhz=sm, memory_mhz=memory, most_sm_mhz=most_sm, power_limit_w=power)


def _identity(device: torch.device) -> str:
    """What the driver's tool calls a GPU; its numbers are those of the machine, not torch's."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if uuid is None else f"GPU-{uuid}"


def _said(identity: str) -> str:
    """Numbers with commas between them; nothing but commas where there is no answer."""
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
    """A positive number; none of what the tool does not know, which it says in brackets."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if number > 0 else None
