"""Asks nvidia-smi, the command of NVIDIA's driver, about a GPU."""

import subprocess
from collections.abc import Sequence

_PATIENCE_S = 20.0


def answers_of(queries: Sequence[str], gpu: str) -> list[str]:
    """One word for each query about the GPU ``gpu``; empty words if nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", f"--id={gpu}"]
    command.append("--format=csv,noheader,nounits")
    nothing = [""] * len(queries)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    words = [word.strip() for word in done.stdout.split(",")]
    return words if done.returncode == 0 and len(words) == len(queries) else nothing
