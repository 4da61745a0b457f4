"""Assigns to each rank its share of a node's CPU cores.

On a GPU's host a share is the number of threads that draw first weights, fill buffers and step an
optimizer. Where a CPU stands in for GPUs, a share is the rank's device: its threads stay on cores
of its own, as when the device was measured.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

GIVEN = "OMP_NUM_THREADS"


@contextmanager
def with_share(device_cores: int | None = None) -> Iterator[None]:
    """Within the ``with`` block torch uses this rank's share of the cores, unless the user has set
    a number of threads. ``device_cores`` is the number of cores of a CPU that stands for a GPU: the
    rank is pinned to so many cores of its own.
    """
    launcher = os.getppid()
    before = torch.get_num_threads()
    node_cores = allowed_cores(launcher)
    if device_cores is not None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        with on_cores(cores_of_device(local_rank, device_cores, node_cores)):
            yield
        return
    threads = share(
        os.environ,
        is_given=_is_given(launcher),
        own_cores=len(allowed_cores()),
        node_cores=len(node_cores),
    )
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Within the ``with`` block this thread, and threads that it starts, are pinned to these cores,
    and torch has one thread for each.
    """
    threads, allowed = torch.get_num_threads(), allowed_cores()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)


def cores_of_device(device: int, count: int, node_cores: Collection[int]) -> list[int]:
    """The cores that stand for the device with this index, among those of the node; each device has
    ``count`` cores.

    Where a node has too few cores, devices share them.
    """
    cores = sorted(node_cores)
    return [cores[(device * count + one) % len(cores)] for one in range(count)]


def allowed_cores(process: int = 0) -> set[int]:
    """The cores that a process may use; by default this one."""
    return os.sched_getaffinity(process)


def share(
    environment: Mapping[str, str], *, is_given: bool, own_cores: int, node_cores: int
) -> int | None:
    """The number of CPU cores of a rank: its share of those that the launcher may use, at most
    those that this process may use.

    None leaves the number to torch: for the only rank of a node, and where the user has set it.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if is_given or ranks == 1:
        return None
    return max(1, min(own_cores, node_cores // ranks))


def _is_given(launcher: int) -> bool:
    """Whether the user has set the number of torch's threads.

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
