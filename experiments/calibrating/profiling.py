"""Measuring a machine into tables of the documented schema.

Needs torch, and nothing that only fits need: ``experiments.profile_hardware`` imports it when it is
asked to measure.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from experiments.calibrating.measure_machine import machine_of, measured_machine
from experiments.calibrating.noted_machine import Machine
from experiments.calibrating.profile_sizes import ProfileSizes
from experiments.calibrating.profile_tables import ALONE, KINDS, SPREAD, Tables
from experiments.calibrating.resumed_table import Key, ResumedTable
from experiments.cli.commandline import progress
from experiments.cli.countdown import Countdown
from experiments.cli.rundir import revision
from mistlab.engines.mistlab import MISTLAB
from mistlab.values.errors import InputError
from mistlab.values.model import Family
from mistlab.values.units import MIB_BYTES, MICROSECONDS, MILLISECONDS
from mistlab.values.workload import Attention
from runtime.models.attention_kernel import AttentionKernel, check_kernel, settle_kernel
from runtime.profiling.environment import Devices
from runtime.profiling.launches import launches
from runtime.profiling.links import CollectiveCase, CopyCase, SendCase
from runtime.profiling.operator_times import (
    STEP,
    AttentionSizes,
    BlockSizes,
    block_operator,
    fused_attention,
    optimizer_step,
    places_of,
)
from runtime.profiling.side_by_side import OverlapCase, OverlapTiming, overlap_cases
from runtime.profiling.timing import Clock, Timing, clock_of, group_sizes
from runtime.profiling.world import Case, Outcome, ProfiledWorld

FAMILIES: tuple[Family, ...] = ("gpt", "llama")
ATTENTIONS: tuple[Attention, ...] = ("flash", "math")

Values = Mapping[str, object]
Measure = Callable[[], Values]


def measured(
    folder: Path, devices: Devices, sizes: ProfileSizes, *, date: str, kernel: AttentionKernel
) -> Machine:
    """Measure what a folder's tables lack; the machine that they are of."""
    check_kernel(kernel, device=devices.kind, precision=devices.precision, attention="flash")
    settle_kernel(kernel, devices.first)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--tables {folder}: {error.strerror}: give another folder"
        raise InputError(message) from None
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
    """Fill the tables with what they lack: first one device by itself, then all together."""
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

    def measured(block: BlockSizes, place: str) -> Values:
        operator = places_of(block, devices.kind)[place]
        found = block_operator(operator, precision, clock, sizes.repetitions)
        return {
            "fwd_us": found.forward.median_s / MICROSECONDS,
            "bwd_us": found.backward.median_s / MICROSECONDS,
            "flop": found.flop,
            "bytes": found.moved_bytes,
            SPREAD: _spread(found.forward, found.backward),
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

    def measure(block: BlockSizes, place: str) -> Measure:
        return partial(step, block) if place == STEP else partial(measured, block, place)

    return {
        (name, *asdict(block).values(), 1, place, precision): measure(block, place)
        for block in sizes.blocks
        for place in (*places_of(block, devices.kind), *([STEP] if block.micro_batch == 1 else []))
    }


def _attention(
    name: str, devices: Devices, sizes: ProfileSizes, clock: Clock
) -> Mapping[tuple[object, ...], Measure]:
    precision = devices.precision

    def measured(of: AttentionSizes) -> Values:
        found = fused_attention(of, precision, clock, sizes.repetitions)
        return {
            "fwd_median_ms": found.forward.median_s / MILLISECONDS,
            "bwd_median_ms": found.backward.median_s / MILLISECONDS,
            SPREAD: _spread(found.forward, found.backward),
        }

    return {
        (name, "flash_attn", *asdict(of).values(), "{}", precision): partial(measured, of)
        for of in sizes.attention
    }


def _launches(
    name: str, devices: Devices, sizes: ProfileSizes, clock: Clock
) -> Mapping[tuple[object, ...], Measure]:
    def measured(family: Family, attention: Attention) -> Values:
        found = launches(family, attention, devices.precision, clock, sizes.repetitions)
        return {
            "kernels": found.kernels,
            "time_us": found.timing.median_s / MICROSECONDS,
            SPREAD: _spread(found.timing),
        }

    return {
        (name, family, attention): partial(measured, family, attention)
        for family in FAMILIES
        for attention in ATTENTIONS
    }


def _fill_together(tables: Tables, devices: Devices, sizes: ProfileSizes) -> None:
    """What takes all devices at once, in one run of the processes that drive them."""
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
    """The table of a case, and its key there."""
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
