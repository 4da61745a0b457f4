"""Checks of a node's GPUs before anything is allocated: what would fail, and what would be slow."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import distributed

from mistlab.core.units import GIB_BYTES, MIB_BYTES
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from runtime.devices.cuda import (
    DRIVERS,
    NEEDED_DRIVERS,
    TESTED_TORCH,
    peers_apart,
    shared_connections,
)
from runtime.profiling.environment import Devices, answers_of, identity

# CUDA contexts of this process and its children, and what a driver keeps, are less than this.
OWN_BYTES = GIB_BYTES
_KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)")


def check_gpus(
    gpus: Sequence[torch.device], *, ranks: int, precision: Precision, option: str
) -> None:
    """Refuse GPUs that cannot run ``ranks`` connected ranks of a precision.

    ``option`` is the field that asks for the precision.
    """
    if not gpus or gpus[0].type != "cuda":
        return
    if ranks > 1 and not distributed.is_nccl_available():
        reject(
            f"--device cuda: {ranks} ranks communicate by NCCL, and torch {torch.__version__} was "
            f"built without it: {_install(next(iter(NEEDED_DRIVERS)))}"
        )
    for gpu in gpus:
        _check_kernels(gpu)
        if precision == "bf16":
            check_bf16(gpu, option)


def check_bf16(gpu: torch.device, option: str) -> None:
    """Refuse a GPU that only emulates bfloat16."""
    driver = DRIVERS[gpu.type]
    if not driver.has_bf16(gpu):
        reject(
            f"{option}: bf16, and {driver.name(gpu)} has no bfloat16 arithmetic of its own: give "
            "fp16, or a GPU of compute capability 8.0 or above"
        )


def _check_kernels(gpu: torch.device) -> None:
    """Refuse a GPU for which the installed torch has no kernels.

    A binary of ``sm_80`` runs on capabilities 8.0 to 8.9, an intermediate ``compute_90`` on 9.0 and
    above.
    """
    built = [_KERNELS.match(name) for name in torch.cuda.get_arch_list()]
    capability: tuple[int, int] = torch.cuda.get_device_capability(gpu)
    for kind, major, minor in (one.groups() for one in built if one):
        of = int(major), int(minor)
        if of <= capability and (kind == "compute" or of[0] == capability[0]):
            return
    if not any(built):
        return
    built_for = str(torch.version.cuda).partition(".")[0]
    other = "13" if built_for != "13" else "12"
    reject(
        f"--device cuda: {DRIVERS['cuda'].name(gpu)} has compute capability "
        f"{capability[0]}.{capability[1]}, and torch {torch.__version__} has kernels for "
        f"{', '.join(torch.cuda.get_arch_list())} alone: {_install(other)}"
    )


def _install(version: str) -> str:
    """The line that installs torch for a major version of CUDA."""
    index = f"https://download.pytorch.org/whl/{NEEDED_DRIVERS[version][1]}"
    return f"pip install torch=={TESTED_TORCH} --index-url {index}"


def slow_settings(ranks: int) -> Iterator[str]:
    """Warnings of what may make runs of a node's ranks hang, slow or short of memory."""
    gpus = [torch.device("cuda", one) for one in range(min(DRIVERS["cuda"].count(), ranks))]
    if connections := shared_connections():
        yield connections
    if apart := peers_apart(ranks):
        yield apart
    yield from unlike_gpus(gpus)
    for gpu in gpus:
        if "MIG" in DRIVERS["cuda"].name(gpu).split():
            yield (
                f"{gpu} is {DRIVERS['cuda'].name(gpu)}, a slice of a GPU: memory and times are "
                "those of the slice, not of the plan's hardware: give cluster.memory_gib, or turn "
                "MIG off (nvidia-smi -mig 0)"
            )
        yield from _taken(gpu)


def unlike_gpus(gpus: Sequence[torch.device]) -> Iterator[str]:
    """A warning if some GPUs of a node are of another kind, with how to leave them out."""
    kinds: dict[str, list[int]] = {}
    for gpu in gpus:
        kinds.setdefault(DRIVERS["cuda"].name(gpu), []).append(gpu.index)
    if len(kinds) > 1:
        by_kind = "; ".join(f"{kind}: {', '.join(map(str, of))}" for kind, of in kinds.items())
        largest = max(kinds.values(), key=len)
        most = ",".join(map(str, largest))
        yield (
            f"GPUs of this node are of {len(kinds)} kinds ({by_kind}), and the slowest sets the "
            f"pace: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={most} uses one kind"
        )


def _taken(gpu: torch.device) -> Iterator[str]:
    """A warning if other processes hold memory of a GPU.

    It asks nvidia-smi: torch would open a context on each GPU, which takes memory itself.
    """
    taken, whole, free = answers_of(("memory.used", "memory.total", "memory.free"), identity(gpu))
    if taken.isdigit() and int(taken) * MIB_BYTES > OWN_BYTES:
        yield (
            f"{int(taken) / 1024:.1f} of {int(whole) / 1024:.1f} GiB of {gpu} are taken by other "
            f"processes, {int(free) / 1024:.1f} are free: end them (nvidia-smi lists them), or "
            "tune with a lower cluster.memory_gib"
        )


def check_devices(devices: Devices, *, precision: Precision, option: str) -> Iterator[str]:
    """Refuse devices of a node that cannot run ranks of a precision; return warnings."""
    if devices.kind != "cuda":
        return iter(())
    gpus = [torch.device("cuda", number) for number in range(devices.count)]
    check_gpus(gpus, ranks=devices.count, precision=precision, option=option)
    return slow_settings(devices.count)
