"""How many threads of the host a rank computes with: its share of the node's cores.

Weights are drawn, buffers filled and the steps of a host done by them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

GIVEN = "OMP_NUM_THREADS"


def take_share() -> None:
    """Let torch compute with this rank's share of the cores, unless the user has said how many."""
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
    """A rank's share of the cores that the launcher may use, and no more than it may use itself.

    None, which leaves the number to torch, for a single rank of the node and where it is given.
    """
    ranks = int(said.get("LOCAL_WORLD_SIZE", "1"))
    if is_given or ranks == 1:
        return None
    return max(1, min(own_cores, node_cores // ranks))


def _is_given(launcher: int) -> bool:
    """Whether the user has given a number: torchrun sets 1 where none is, after it has started.

    Its own environment, as Linux shows it, is that in which it was started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return GIVEN in os.environ
    try:
        began_with = Path(f"/proc/{launcher}/environ").read_bytes()
    except OSError:
        return os.environ.get(GIVEN, "1") != "1"
    return any(entry.startswith(f"{GIVEN}=".encode()) for entry in began_with.split(b"\0"))
