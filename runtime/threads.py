"""Gives each rank its share of the node's cores, as the number of threads that torch uses.

These threads draw first weights, fill buffers and step an optimizer on the host.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

GIVEN = "OMP_NUM_THREADS"


def take_share() -> None:
    """Let torch use this rank's share of the cores, unless the user has set a number."""
    launcher = os.getppid()
    threads = share(
        os.environ,
        is_given=_is_given(launcher),
        own_cores=len(os.sched_getaffinity(0)),
        node_cores=len(os.sched_getaffinity(launcher)),
    )
    if threads is not None:
        torch.set_num_threads(threads)


def share(
    said: Mapping[str, str], *, is_given: bool, own_cores: int, node_cores: int
) -> int | None:
    """A rank's share of the cores that the launcher may use, at most its own cores.

    None leaves the number to torch: for the only rank of a node, and where the user has set it.
    """
    ranks = int(said.get("LOCAL_WORLD_SIZE", "1"))
    if is_given or ranks == 1:
        return None
    return max(1, min(own_cores, node_cores // ranks))


def _is_given(launcher: int) -> bool:
    """Whether the user has set the number of threads.

    If the user has not, torchrun sets 1 for the processes that it starts. So the launcher's own
    environment is read from Linux, which shows it as the user left it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return GIVEN in os.environ
    try:
        began_with = Path(f"/proc/{launcher}/environ").read_bytes()
    except OSError:
        return os.environ.get(GIVEN, "1") != "1"
    return any(entry.startswith(f"{GIVEN}=".encode()) for entry in began_with.split(b"\0"))
