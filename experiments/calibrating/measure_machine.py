"""Measures a machine's memory, peaks and clocks, which no table has."""

from dataclasses import replace
from pathlib import Path

from experiments.calibrating.noted_machine import Machine
from experiments.calibrating.profile_sizes import ProfileSizes
from experiments.cli.commandline import progress
from experiments.cli.moved_clocks import moved_words
from mistlab.machine.hardware import PeakTflops
from mistlab.values.datafile import read_yaml, write_yaml
from mistlab.values.errors import InputError
from mistlab.values.measurement import Environment
from mistlab.values.precision import Precision
from mistlab.values.units import GBYTES, GIB_BYTES, TFLOP
from mistlab.values.value import from_mapping, to_mapping
from runtime.profiling import environment
from runtime.profiling.environment import Devices, clocks_of
from runtime.profiling.operator_times import memory_bytes_per_s, product_flop_per_s
from runtime.profiling.timing import Clock
from runtime.profiling.world import ProfiledWorld


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
    """The machine as it was noted before, or measured now; refuses notes of another kind."""
    present = environment.environment_of(devices, revision)
    if path.exists():
        return _noted(path, present, devices.threads, kernel, date)
    progress(f"peaks of {present.device}")
    outside_bytes = device_outside_bytes(devices, sizes)
    device_bytes = environment.device_memory_bytes(devices)

    def peak(precision: Precision) -> float:
        rates = [
            product_flop_per_s(precision, size, clock, sizes.repetitions) for size in sizes.products
        ]
        # However slow a product is, it is no zero.
        return float(f"{max(rates) / TFLOP:.5g}")

    has_bf16 = devices.kind == "cpu" or devices.precision == "bf16"
    tflops = PeakTflops(
        fp16=peak("fp16"), bf16=peak("bf16") if has_bf16 else None, fp32=peak("fp32")
    )
    machine = Machine(
        environment=present,
        date=date,
        threads=devices.threads,
        clocks=clocks_of(devices.first),
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
    """Bytes that processes connected on GPUs take outside torch's allocator."""
    if devices.kind == "cpu" or devices.count == 1:
        return environment.outside_bytes(devices.first)
    world = ProfiledWorld(devices=devices, repetitions=1, lengths=sizes.lengths)
    return world.outside_bytes(max(sizes.transfer_bytes))


def measured_machine(path: Path, machine: Machine, sizes: ProfileSizes, clock: Clock) -> Machine:
    """Note that the tables are whole, and the clocks now, after some work; say if those have moved
    since the beginning."""
    after = replace(machine, is_measured=True)
    if machine.clocks is not None:
        product_flop_per_s("fp16", max(sizes.products), clock, sizes.repetitions)
        after = replace(after, clocks_after=clocks_of(clock.device))
    write_yaml(to_mapping(after), path)
    moved = moved_words(after.clocks, after.clocks_after)
    if moved:
        progress(f"warning: {moved}")
    return after


def _noted(path: Path, present: Environment, threads: int, kernel: str, date: str) -> Machine:
    """The machine that is noted; refused if it is of another kind, or measured another way.

    Another machine of its kind goes on with its tables, and is noted with it.
    """
    noted = from_mapping(Machine, read_yaml(path))
    if (_kind(noted.environment), noted.threads) != (_kind(present), threads):
        problem = (
            f"measurements of {noted.words}, not of {present.device} with torch {present.torch}"
        )
    elif noted.attention_kernel != kernel:
        problem = f"measurements with attention by {noted.attention_kernel}, not by {kernel}"
    else:
        return _going_on(path, noted, present, date)
    message = f"{path}: holds {problem}: they do not mix, give another --tables"
    raise InputError(message)


def _kind(one: Environment) -> tuple[object, ...]:
    """The properties that machines must share for their measurements to be mixed."""
    return (one.device, one.num_devices, one.torch, one.cuda)


def _going_on(path: Path, noted: Machine, present: Environment, date: str) -> Machine:
    host_bytes, before = environment.host_memory_bytes(), noted.environment
    if (before.driver, noted.host_memory_bytes) == (present.driver, host_bytes):
        if noted.date != date:
            progress(f"{path}: going on with what was measured on {noted.date}")
        return noted
    host = f"{host_bytes / GIB_BYTES:.0f} GiB of host memory"
    words = ", ".join([*([f"driver {present.driver}"] if present.driver else []), host])
    progress(f"{path}: going on with what was measured on {noted.words}; here {words}")
    if words in noted.others:
        return noted
    noted = replace(noted, others=(*noted.others, words))
    write_yaml(to_mapping(noted), path)
    return noted
