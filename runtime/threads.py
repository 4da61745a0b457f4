"""Assigns to each rank its share of a node's CPU cores.

On the host of a GPU, a share is the number of threads that draw initial weights, fill buffers and
step an optimizer. Where a CPU stands in for GPUs, a share is the rank's device: its threads stay on
cores of its own, as when the device was profiled.
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
    a number of threads. If ``device_cores`` is given, a CPU stands in for GPUs, and the rank is
    pinned to this many cores of its own.
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
    """Within the ``with`` block this thread, and threads that it starts, are pinned to these cores;
    torch has one thread per core.
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
    """The cores that stand in for the device with this index, of the node's cores; each device has
    ``count`` cores.

    On a node with too few cores, devices share them.
    """
    cores = sorted(node_cores)
    return [cores[(device * count + one) % len(cores)] for one in range(count)]


def allowed_cores(process: int = 0) -> set[int]:
    """The cores that a process may use; by default this process."""
    return os.sched_getaffinity(process)


def share(
    environment: Mapping[str, str], *, is_given: bool, own_cores: int, node_cores: int
) -> int | None:
    """The number of CPU cores of a rank: its share of the cores that the launcher may use, at most
    the cores that this process may use. None means that torch chooses: for the only rank of a node,
    or if the user has set a number.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if is_given or ranks == 1:
        return None
    return max(1, min(own_cores, node_cores // ranks))


def _is_given(launcher: int) -> bool:
    """Whether the user has set the number of torch's threads.

    If not, torchrun sets it to 1 for the processes that it starts. So the environment of the
    launcher is read from Linux, as the user left it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return GIVEN in os.environ
    try:
        began_with = Path(f"/proc/{launcher}/environ").read_bytes()
    except OSError:
        return os.environ.get(GIVEN, "1") != "1"
    return any(entry.startswith(f"{GIVEN}=".encode()) for entry in began_with.split(b"\0"))
