"""What is known of a machine besides tables: its memory, its peaks, its software, its clocks."""

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.commandline import progress
from experiments.profile_sizes import ProfileSizes
from mistlab.datafile import read_yaml, write_yaml
from mistlab.errors import InputError
from mistlab.hardware import PeakTflops
from mistlab.measurement import Environment
from mistlab.units import GBYTES, TFLOP
from mistlab.value import check_fields, from_mapping, to_mapping
from mistlab.workload import Precision
from runtime.profiling import environment
from runtime.profiling.device import Devices
from runtime.profiling.peaks import memory_bytes_per_s, product_flop_per_s
from runtime.profiling.timing import Clock
from runtime.profiling.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine on one day; ``threads`` are those of a process on a CPU."""

    environment: Environment
    date: str
    threads: int
    clocks: str
    device_memory_bytes: int
    outside_bytes: int
    host_memory_bytes: int
    memory_gbytes_per_s: float
    peak_tflops: PeakTflops

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs, not shares of a CPU."""
        return bool(self.environment.cuda)

    @property
    def words(self) -> str:
        """The machine in words, for provenance."""
        one = self.environment
        parts = [f"{one.num_devices} x {one.device}" if self.is_gpu else one.device]
        if not self.is_gpu:
            parts.append(
                f"{one.num_devices} processes of {self.threads} threads stand in for GPUs, their "
                "memory is host memory, copies are between host buffers, streams are threads"
            )
        parts += [f"torch {one.torch}"]
        parts += [f"CUDA {one.cuda}, driver {one.driver}"] if self.is_gpu else []
        parts += [self.clocks] if self.clocks else []
        return ", ".join([*parts, self.date])


def machine_of(
    path: Path, devices: Devices, sizes: ProfileSizes, clock: Clock, *, date: str, revision: str
) -> Machine:
    """The machine as it was noted before, or measured now; refuses notes of another one."""
    present = environment.environment_of(devices, revision)
    if path.exists():
        noted = from_mapping(Machine, read_yaml(path))
        if (noted.environment, noted.threads) != (
            replace(present, revision=noted.environment.revision),
            devices.threads,
        ):
            message = (
                f"{path}: holds measurements of {noted.words}, not of {present.device} with torch "
                f"{present.torch}: they do not mix, give another --tables"
            )
            raise InputError(message)
        return noted
    progress(f"peaks of {present.device}")
    outside_bytes = device_outside_bytes(devices, sizes)
    device_bytes = environment.device_memory_bytes(devices)

    def peak(precision: Precision) -> float:
        rates = [
            product_flop_per_s(precision, size, clock, sizes.repetitions) for size in sizes.products
        ]
        return round(max(rates) / TFLOP, 5)

    has_bf16 = devices.kind == "cpu" or devices.precision == "bf16"
    tflops = PeakTflops(
        fp16=peak("fp16"), bf16=peak("bf16") if has_bf16 else None, fp32=peak("fp32")
    )
    machine = Machine(
        environment=present,
        date=date,
        threads=devices.threads,
        clocks=environment.clocks_of(devices),
        device_memory_bytes=device_bytes,
        outside_bytes=outside_bytes,
        host_memory_bytes=environment.host_memory_bytes(),
        memory_gbytes_per_s=round(
            memory_bytes_per_s(sizes.copied_bytes, clock, sizes.repetitions) / GBYTES, 3
        ),
        peak_tflops=tflops,
    )
    write_yaml(to_mapping(machine), path)
    return machine


def device_outside_bytes(devices: Devices, sizes: ProfileSizes) -> int:
    """What is taken outside torch's allocator, by processes that have connected on GPUs."""
    if devices.kind == "cpu" or devices.count == 1:
        return environment.outside_bytes(devices.first)
    world = World(devices=devices, repetitions=1, lengths=sizes.lengths)
    return world.outside_bytes(max(sizes.transfer_bytes))
