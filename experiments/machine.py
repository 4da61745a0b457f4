"""Measuring what is known of a machine besides tables: its memory, its peaks, its clocks."""

from dataclasses import replace
from pathlib import Path

from experiments.commandline import progress
from experiments.noted_machine import Machine
from experiments.profile_sizes import ProfileSizes
from mistlab.datafile import read_yaml, write_yaml
from mistlab.errors import InputError
from mistlab.hardware import PeakTflops
from mistlab.measurement import Environment
from mistlab.units import GBYTES, TFLOP
from mistlab.value import from_mapping, to_mapping
from mistlab.workload import Precision
from runtime.profiling import environment
from runtime.profiling.device import Devices
from runtime.profiling.peaks import memory_bytes_per_s, product_flop_per_s
from runtime.profiling.timing import Clock
from runtime.profiling.world import World


def machine_of(
    path: Path,
    devices: Devices,
    sizes: ProfileSizes,
    clock: Clock,
    *,
    date: str,
    revision: str,
    kernel: str = "flash",
) -> Machine:
    """The machine as it was noted before, or measured now; refuses notes of another one."""
    present = environment.environment_of(devices, revision)
    if path.exists():
        return _noted(path, present, devices.threads, kernel)
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
        attention_kernel=kernel,
    )
    write_yaml(to_mapping(machine), path)
    return machine


def device_outside_bytes(devices: Devices, sizes: ProfileSizes) -> int:
    """What is taken outside torch's allocator, by processes that have connected on GPUs."""
    if devices.kind == "cpu" or devices.count == 1:
        return environment.outside_bytes(devices.first)
    world = World(devices=devices, repetitions=1, lengths=sizes.lengths)
    return world.outside_bytes(max(sizes.transfer_bytes))


def _noted(path: Path, present: Environment, threads: int, kernel: str) -> Machine:
    """The machine that is noted; refused if it is another one, or measured another way."""
    noted = from_mapping(Machine, read_yaml(path))
    here = replace(present, revision=noted.environment.revision), threads
    if (noted.environment, noted.threads) != here:
        problem = (
            f"measurements of {noted.words}, not of {present.device} with torch {present.torch}"
        )
    elif noted.attention_kernel != kernel:
        problem = f"measurements with attention by {noted.attention_kernel}, not by {kernel}"
    else:
        return noted
    message = f"{path}: holds {problem}: they do not mix, give another --tables"
    raise InputError(message)
