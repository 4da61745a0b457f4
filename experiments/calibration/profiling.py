"""Profiles a machine: chooses the sizes to measure, finds memory, peak rates and GPU clocks, and
fills the tables of times.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from experiments.calibration.noted_machine import Machine
from experiments.calibration.profile_tables import ALONE, KINDS, SPREAD, Key, ResumedTable, Tables
from experiments.cli.commandline import Countdown, progress
from experiments.cli.rundir import revision
from experiments.training.moved_clocks import moved_words
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.units import GBYTES, GIB_BYTES, MIB_BYTES, MICROSECONDS, MILLISECONDS, TFLOP
from mistlab.core.values import InputError, from_mapping, reject, to_mapping
from mistlab.engines.engine import Precision
from mistlab.engines.mistlab import MISTLAB
from mistlab.job.prediction import Environment
from mistlab.machine.hardware import PeakTflops
from mistlab.plan.workload import Attention, Family
from runtime.models.attention_kernel import AttentionKernel, check_kernel, settle_kernel
from runtime.profiling import environment
from runtime.profiling.environment import Devices, clocks_of
from runtime.profiling.launches import launches
from runtime.profiling.links import CollectiveCase, CopyCase, SendCase
from runtime.profiling.operator_times import (
    STEP,
    AttentionSizes,
    BlockSizes,
    block_operator,
    fused_attention,
    memory_bytes_per_s,
    optimizer_step,
    places_of,
    product_flop_per_s,
)
from runtime.profiling.side_by_side import Lengths, OverlapCase, OverlapTiming, overlap_cases
from runtime.profiling.timing import Clock, Timing, clock_of, group_sizes
from runtime.profiling.world import Case, Outcome, ProfiledWorld

# The sizes at which a machine is measured: many, or a few for a quick profile.


# The size of the vocabulary, which does not affect any operator of a transformer block.
VOCAB = 50304


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """The sizes that a profile measures. ``products`` are the widths of square matrices for GEMMs,
    ``copied_bytes`` the sizes of copies within a device.
    """

    repetitions: int
    products: tuple[int, ...]
    copied_bytes: int
    blocks: tuple[BlockSizes, ...]
    attention: tuple[AttentionSizes, ...]
    transfer_bytes: tuple[int, ...]
    lengths: Lengths


def blocks(
    widths: tuple[tuple[int, int], ...], sequence_length: int, micro_batches: tuple[int, ...]
) -> tuple[BlockSizes, ...]:
    """Transformer blocks with the given pairs of width and number of heads; the feed-forward
    network is four times as wide.
    """
    return tuple(
        BlockSizes(
            hidden=hidden,
            ffn=4 * hidden,
            heads=heads,
            sequence_length=sequence_length,
            vocab=VOCAB,
            micro_batch=micro_batch,
        )
        for hidden, heads in widths
        for micro_batch in micro_batches
    )


def attention_of(of: tuple[BlockSizes, ...]) -> tuple[AttentionSizes, ...]:
    """The attention shapes that these transformer blocks have."""
    return tuple(
        AttentionSizes(
            micro_batch=block.micro_batch,
            sequence_length=block.sequence_length,
            heads=block.heads,
            head_dim=block.hidden // block.heads,
        )
        for block in of
    )


def doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each twice the previous one."""
    return tuple(smallest << power for power in range((largest // smallest).bit_length()))


# The widths and numbers of heads of the catalogue's GPT models with 350 million to 13 billion
# parameters.
GPU_BLOCKS = blocks(((1024, 16), (2048, 16), (2560, 32), (4096, 32), (5120, 40)), 2048, (1, 2, 4))
GPU = ProfileSizes(
    repetitions=10,
    products=(4096, 8192, 16384),
    copied_bytes=GIB_BYTES,
    blocks=GPU_BLOCKS,
    attention=(*attention_of(GPU_BLOCKS), *attention_of(blocks(((2560, 32),), 4096, (1, 2)))),
    transfer_bytes=doubling(MIB_BYTES, GIB_BYTES),
    lengths=Lengths(
        levels=(0, 1, 2, 4), unit_s=4e-3, product_size=4096, chunk_bytes=32 * MIB_BYTES
    ),
)
QUICK_GPU_BLOCKS = blocks(((1024, 16), (2560, 32)), 2048, (1, 2))
QUICK_GPU = ProfileSizes(
    repetitions=5,
    products=(8192,),
    copied_bytes=GIB_BYTES,
    blocks=QUICK_GPU_BLOCKS,
    attention=attention_of(QUICK_GPU_BLOCKS),
    transfer_bytes=tuple(size * MIB_BYTES for size in (1, 4, 16, 64, 256)),
    lengths=Lengths(levels=(0, 1, 2), unit_s=4e-3, product_size=4096, chunk_bytes=32 * MIB_BYTES),
)
CPU_BLOCKS = blocks(((128, 4), (256, 8), (512, 8), (768, 12)), 128, (1, 2, 4))
CPU = ProfileSizes(
    repetitions=7,
    products=(256, 512),
    copied_bytes=256 * MIB_BYTES,
    blocks=CPU_BLOCKS,
    attention=attention_of(CPU_BLOCKS),
    transfer_bytes=doubling(MIB_BYTES // 16, 64 * MIB_BYTES),
    lengths=Lengths(levels=(0, 1, 2, 4), unit_s=4e-3, product_size=256, chunk_bytes=4 * MIB_BYTES),
)
QUICK_CPU_BLOCKS = blocks(((128, 4), (256, 8)), 128, (1, 2))
QUICK_CPU = ProfileSizes(
    repetitions=3,
    products=(256,),
    copied_bytes=64 * MIB_BYTES,
    blocks=QUICK_CPU_BLOCKS,
    attention=attention_of(QUICK_CPU_BLOCKS),
    transfer_bytes=tuple(size * MIB_BYTES for size in (2, 4, 16, 64)),
    lengths=Lengths(levels=(0, 1, 2), unit_s=2e-3, product_size=128, chunk_bytes=4 * MIB_BYTES),
)

# The sizes to measure, by the kind of device and by whether the profile is a quick one.
SIZES = {
    ("cuda", False): GPU,
    ("cuda", True): QUICK_GPU,
    ("cpu", False): CPU,
    ("cpu", True): QUICK_CPU,
}


# Measures the facts of a machine that are not in the tables of times: its memory, peak rates and
# GPU clocks.


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
    """The machine that earlier notes describe; without notes, it is measured now. Notes about
    another kind of machine are refused.
    """
    present = environment.environment_of(devices, revision)
    if path.exists():
        return _noted(path, present, devices.threads, kernel, date)
    progress(f"peaks of {present.device}")
    outside_bytes, communicator_bytes = device_outside_bytes(devices, sizes)
    device_bytes = environment.device_memory_bytes(devices)

    def peak(precision: Precision) -> float:
        rates = [
            product_flop_per_s(precision, size, clock, sizes.repetitions) for size in sizes.products
        ]
        # Rounded to five significant digits, so that the rate of a slow GEMM does not become zero.
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
        communicator_bytes=communicator_bytes,
        host_memory_bytes=environment.host_memory_bytes(),
        memory_gbytes_per_s=round(
            memory_bytes_per_s(sizes.copied_bytes, clock, sizes.repetitions) / GBYTES, 3
        ),
        peak_tflops=tflops,
        attention_kernel=kernel,
    )
    write_yaml(to_mapping(machine), path)
    return machine


def device_outside_bytes(devices: Devices, sizes: ProfileSizes) -> tuple[int, int | None]:
    """The bytes of a device that a process takes outside torch's allocator. On several GPUs, also
    the mean bytes of a communicator: there is one of all GPUs, and one for each smaller group size.
    """
    alone = environment.outside_bytes(devices.first)
    if devices.kind == "cpu" or devices.count == 1:
        return alone, None
    world = ProfiledWorld(devices=devices, repetitions=1, lengths=sizes.lengths)
    connected = world.outside_bytes(max(sizes.transfer_bytes))
    communicators = 1 + len(group_sizes(devices.count))
    return alone, max(0, connected - alone) // communicators


def measured_machine(path: Path, machine: Machine, sizes: ProfileSizes, clock: Clock) -> Machine:
    """Note that the tables are complete, with the GPU clocks after the measurements; reports
    whether the clocks have changed since the beginning.
    """
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
    """The machine in the notes; refused if it is of another kind or was measured in another way.

    If another machine of the same kind continues the tables, it is noted as well.
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
    message = (
        f"{path}: its folder has {problem}, and a folder may have only one kind: give another "
        "folder as --tables"
    )
    raise InputError(message)


def _kind(machine: Environment) -> tuple[object, ...]:
    """The facts that two machines must share for their measurements to be in one table."""
    return (machine.device, machine.num_devices, machine.torch, machine.cuda)


def _going_on(path: Path, noted: Machine, present: Environment, date: str) -> Machine:
    host_bytes, before = environment.host_memory_bytes(), noted.environment
    if (before.driver, noted.host_memory_bytes) == (present.driver, host_bytes):
        if noted.date != date:
            progress(f"{path}: going on with what was measured on {noted.date}")
        return noted
    host = f"{host_bytes / GIB_BYTES:.0f} GiB of host memory"
    versions = ", ".join([*([f"driver {present.driver}"] if present.driver else []), host])
    progress(f"{path}: going on with what was measured on {noted.words}; here {versions}")
    if versions in noted.others:
        return noted
    noted = replace(noted, others=(*noted.others, versions))
    write_yaml(to_mapping(noted), path)
    return noted


# Measures a machine, and writes the tables of docs/reference/measurement-tables.md.
#
# Needs torch, but no package that only the fits need; ``experiments.profile_hardware`` imports this
# module only when it measures.


FAMILIES: tuple[Family, ...] = ("gpt", "llama")
ATTENTIONS: tuple[Attention, ...] = ("flash", "math")

Values = Mapping[str, object]
Measure = Callable[[], Values]


def measured(
    folder: Path, devices: Devices, sizes: ProfileSizes, *, date: str, kernel: AttentionKernel
) -> Machine:
    """Measure the rows that a folder's tables lack; returns the machine."""
    check_kernel(kernel, device=devices.kind, precision=devices.precision, attention="flash")
    settle_kernel(kernel, devices.first)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reject(f"--tables {folder}: {error.strerror}: give another folder")
    path = folder / "machine.yaml"
    with devices.driven(0) as device:
        clock = clock_of(device)
        machine = machine_of(
            path, devices, sizes, clock, date=date, revision=revision(), kernel=kernel
        )
        _measure(Tables.of(folder, machine.environment.device), devices, sizes, clock)
        if devices.count == 1:
            progress("one device: no collectives, no sends; the file describes nodes of one device")
        return measured_machine(path, machine, sizes, clock)


def _measure(tables: Tables, devices: Devices, sizes: ProfileSizes, clock: Clock) -> None:
    """Measure missing rows: first on one device alone, then on all devices together."""
    _fill("operators", tables.operators, _operators(tables.name, devices, sizes, clock))
    _fill("attention", tables.attention, _attention(tables.name, devices, sizes, clock))
    _fill("launches", tables.launches, _launches(tables.name, devices, sizes, clock))
    _fill_together(tables, devices, sizes)


def _fill(what: str, table: ResumedTable, measures: Mapping[tuple[object, ...], Measure]) -> None:
    missing = {key: m for key, m in measures.items() if not table.has(_named(table, key))}
    countdown = Countdown(what=what, total=len(missing))
    for key, measure_ in missing.items():
        table.add(_named(table, key), measure_())
        countdown.step()


def _named(table: ResumedTable, key: tuple[object, ...]) -> Key:
    return dict(zip(table.keys, key, strict=True))


def _operators(
    name: str, devices: Devices, sizes: ProfileSizes, clock: Clock
) -> Mapping[tuple[object, ...], Measure]:
    precision = devices.precision

    def measured(block: BlockSizes, name: str) -> Values:
        operator = places_of(block, devices.kind)[name]
        timed = block_operator(operator, precision, clock, sizes.repetitions)
        return {
            "fwd_us": timed.forward.median_s / MICROSECONDS,
            "bwd_us": timed.backward.median_s / MICROSECONDS,
            "flop": timed.flop,
            "bytes": timed.moved_bytes,
            SPREAD: _spread(timed.forward, timed.backward),
        }

    def step(block: BlockSizes) -> Values:
        parameters = 4 * block.hidden**2 + 2 * block.hidden * block.ffn
        timing = optimizer_step(parameters, precision, clock, sizes.repetitions)
        return {
            "fwd_us": timing.median_s / MICROSECONDS,
            "bwd_us": 0.0,
            "flop": 0,
            "bytes": parameters * MISTLAB.step_moved[precision],
            SPREAD: _spread(timing),
        }

    def measure(block: BlockSizes, name: str) -> Measure:
        return partial(step, block) if name == STEP else partial(measured, block, name)

    return {
        (name, *asdict(block).values(), 1, operator, precision): measure(block, operator)
        for block in sizes.blocks
        for operator in (
            *places_of(block, devices.kind),
            *([STEP] if block.micro_batch == 1 else []),
        )
    }


def _attention(
    name: str, devices: Devices, sizes: ProfileSizes, clock: Clock
) -> Mapping[tuple[object, ...], Measure]:
    precision = devices.precision

    def measured(of: AttentionSizes) -> Values:
        timed = fused_attention(of, precision, clock, sizes.repetitions)
        return {
            "fwd_median_ms": timed.forward.median_s / MILLISECONDS,
            "bwd_median_ms": timed.backward.median_s / MILLISECONDS,
            SPREAD: _spread(timed.forward, timed.backward),
        }

    return {
        (name, "flash_attn", *asdict(of).values(), "{}", precision): partial(measured, of)
        for of in sizes.attention
    }


def _launches(
    name: str, devices: Devices, sizes: ProfileSizes, clock: Clock
) -> Mapping[tuple[object, ...], Measure]:
    def measured(family: Family, attention: Attention) -> Values:
        timed = launches(family, attention, devices.precision, clock, sizes.repetitions)
        return {
            "kernels": timed.kernels,
            "time_us": timed.timing.median_s / MICROSECONDS,
            SPREAD: _spread(timed.timing),
        }

    return {
        (name, family, attention): partial(measured, family, attention)
        for family in FAMILIES
        for attention in ATTENTIONS
    }


def _fill_together(tables: Tables, devices: Devices, sizes: ProfileSizes) -> None:
    """Measure rows on all devices together, in a single run of one process per device."""
    places = {case: _place(case, tables, devices.count) for case in _cases(devices.count, sizes)}
    missing = [case for case, (table, key) in places.items() if not table.has(key)]
    if not missing:
        return
    world = ProfiledWorld(devices=devices, repetitions=sizes.repetitions, lengths=sizes.lengths)
    countdown = Countdown(what="links and streams", total=len(missing))
    for case, outcome in world.measured(missing):
        table, key = places[case]
        table.add(key, _values(outcome, table))
        countdown.step()


def _cases(devices: int, sizes: ProfileSizes) -> list[Case]:
    groups = group_sizes(devices)
    copies = [
        CopyCase(kind=kind, size_bytes=size)
        for kind in ("host_to_device", "device_to_host")
        for size in sizes.transfer_bytes
    ]
    collectives = [
        CollectiveCase(kind=kind, gpus=gpus, size_bytes=size)
        for gpus in groups
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for size in sizes.transfer_bytes
    ]
    sends = [SendCase(size_bytes=size) for size in sizes.transfer_bytes if groups]
    streams = [case for gpus in groups or [1] for case in overlap_cases(gpus, sizes.lengths.levels)]
    return [*copies, *collectives, *sends, *streams]


def _place(case: Case, tables: Tables, devices: int) -> tuple[ResumedTable, Key]:
    """The table to which a measurement belongs, and the key of its row in that table."""
    name = tables.name
    if isinstance(case, CopyCase):
        return tables.copies, _named(
            tables.copies, (name, devices, 1, KINDS[case.kind], case.size_bytes)
        )
    if isinstance(case, OverlapCase):
        levels = " ".join(map(str, case.levels))
        return tables.streams, _named(tables.streams, (name, case.gpus, 1, levels))
    mib = case.size_bytes / MIB_BYTES
    if isinstance(case, SendCase):
        return tables.sends, _named(tables.sends, (name, "intra_node", mib))
    return tables.collectives, _named(tables.collectives, (name, case.gpus, case.kind, mib))


def _values(outcome: Outcome, table: ResumedTable) -> Values:
    if isinstance(outcome, OverlapTiming):
        alone = [0.0 if one is None else one.median_s / MILLISECONDS for one in outcome.alone]
        return {
            "latency_ms": outcome.together.median_s / MILLISECONDS,
            **dict(zip(ALONE, alone, strict=True)),
            SPREAD: _spread(outcome.together),
        }
    return {table.values[0]: outcome.median_s / MILLISECONDS, SPREAD: _spread(outcome)}


def _spread(*timings: Timing) -> float:
    return round(max(timing.spread for timing in timings), 4)
