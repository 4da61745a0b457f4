"""Checks a node's GPUs before memory is allocated: what would fail, and what would be slow."""

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

# A number of bytes above what the CUDA contexts of this process and its children, and the driver
# itself, take on a GPU.
OWN_BYTES = GIB_BYTES
_KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)")


def check_gpus(
    gpus: Sequence[torch.device], *, ranks: int, precision: Precision, option: str
) -> None:
    """Raise an error if the GPUs cannot run ``ranks`` connected ranks in a precision.

    ``option`` is the field that asks for the precision.
    """
    if precision == "tf32" and gpus and gpus[0].type == "cpu":
        _refuse_tf32_on_cpu(option)
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
        if precision == "tf32" and not DRIVERS[gpu.type].has_bf16(gpu):
            reject(
                f"{option}: tf32, but {DRIVERS[gpu.type].name(gpu)} has no TF32 arithmetic: give "
                "fp32, or use a GPU of compute capability 8.0 or above"
            )


def _refuse_tf32_on_cpu(option: str) -> None:
    reject(f"{option}: tf32, but a CPU has no tensor cores: give fp32, or --device cuda")


def check_bf16(gpu: torch.device, option: str) -> None:
    """Raise an error if a GPU only emulates bfloat16."""
    driver = DRIVERS[gpu.type]
    if not driver.has_bf16(gpu):
        other = "give fp16, or " if option.endswith(("-precision", ".precision")) else ""
        reject(
            f"{option}: bf16, but {driver.name(gpu)} has no bfloat16 arithmetic: {other}use a GPU "
            "of compute capability 8.0 or above"
        )


def _check_kernels(gpu: torch.device) -> None:
    """Raise an error if the installed torch has no kernels for a GPU.

    A binary for ``sm_80`` runs on compute capabilities 8.0 to 8.9; intermediate code for
    ``compute_90`` runs on 9.0 and above.
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
        f"{capability[0]}.{capability[1]}, but torch {torch.__version__} has kernels only for "
        f"{', '.join(torch.cuda.get_arch_list())}: {_install(other)}"
    )


def _install(version: str) -> str:
    """The command that installs torch for a major version of CUDA."""
    index = f"https://download.pytorch.org/whl/{NEEDED_DRIVERS[version][1]}"
    return f"pip install torch=={TESTED_TORCH} --index-url {index}"


def slow_settings(ranks: int) -> Iterator[str]:
    """Warnings about what may make the ranks of a node hang, or slow, or short of memory."""
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
    """A warning if some GPUs of a node are of another kind than most, with how to leave them
    out.
    """
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
    """A warning if other processes use memory of a GPU.

    It asks nvidia-smi, since torch would open a context on each GPU, which itself takes memory.
    """
    taken, whole, free = answers_of(("memory.used", "memory.total", "memory.free"), identity(gpu))
    if taken.isdigit() and int(taken) * MIB_BYTES > OWN_BYTES:
        yield (
            f"{int(taken) / 1024:.1f} of {int(whole) / 1024:.1f} GiB of {gpu} are taken by other "
            f"processes, {int(free) / 1024:.1f} are free: end them (nvidia-smi lists them), or "
            "tune with a lower cluster.memory_gib"
        )


def check_devices(devices: Devices, *, precision: Precision, option: str) -> Iterator[str]:
    """Raise an error if the devices of a node cannot run ranks in a precision; returns warnings."""
    if precision == "tf32" and devices.kind == "cpu":
        _refuse_tf32_on_cpu(option)
    if devices.kind != "cuda":
        return iter(())
    gpus = [torch.device("cuda", number) for number in range(devices.count)]
    check_gpus(gpus, ranks=devices.count, precision=precision, option=option)
    return slow_settings(devices.count)
