"""Measures collectives and messages between nodes, and adds them to the tables of the first node's
profile.
"""

from collections.abc import Iterator
from pathlib import Path

from experiments.calibration.noted_machine import noted_machine
from experiments.calibration.profile_tables import SPREAD, Key, ResumedTable, Tables
from experiments.calibration.profiling import SIZES, ProfileSizes
from experiments.cli.commandline import Countdown, progress
from mistlab.core.units import MIB_BYTES, MILLISECONDS
from mistlab.core.values import reject
from runtime.comm.processes import gathered, world_of_launcher
from runtime.profiling.environment import devices_of, usual_kind
from runtime.profiling.links import Collective, CollectiveCase, SendCase
from runtime.profiling.network import NodesOfRun, rank_of_nodes
from runtime.profiling.node_checks import check_devices
from runtime.profiling.timing import Timing

Case = CollectiveCase | SendCase
KINDS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def measured(folder: Path, device: str | None, *, quick: bool) -> bool:
    """Measure those rows of the tables about the network that are still missing. Returns whether
    this process is the one that writes the tables.
    """
    of = NodesOfRun.of_launcher()
    kind = device or usual_kind()
    for warning in check_devices(devices_of(kind, of.gpus), precision="fp32", option="precision"):
        if world_of_launcher().local_rank == 0:
            progress(f"warning: {warning}")
    sizes = SIZES[kind, quick]
    # The tables are checked before the processes connect: if they belonged to another machine, this
    # process would stop here and the others would wait for it in vain.
    tables = _tables(folder, of) if world_of_launcher().rank == 0 else None
    with rank_of_nodes(of, kind, sizes.repetitions) as rank:
        places = {} if tables is None else _places(tables, of, sizes)
        missing = [case for case, (table, key) in places.items() if not table.has(key)]
        missing = gathered(missing)[0]
        countdown = Countdown(what="between nodes", total=len(missing))
        for case in missing:
            timing = case.measured(rank)
            if tables is not None:
                table, key = places[case]
                table.add(key, _values(timing))
                countdown.step()
    return tables is not None


def _tables(folder: Path, of: NodesOfRun) -> Tables:
    """The tables of the first node; tables that were measured with another number of GPUs are
    refused.
    """
    machine = noted_machine(folder)
    count = machine.environment.num_devices
    if count != of.gpus:
        reject(
            f"--tables {folder}: were measured on nodes of {count} devices, but torchrun started "
            f"{of.gpus} processes a node: give torchrun --nproc-per-node {count}"
        )
    return Tables.of(folder, machine.environment.device)


def _places(
    tables: Tables, of: NodesOfRun, sizes: ProfileSizes
) -> dict[Case, tuple[ResumedTable, Key]]:
    """For each measurement to make, the table to which it belongs, and the key of its row in that
    table.
    """
    return dict(_listed(tables, of, sizes))


def _listed(
    tables: Tables, of: NodesOfRun, sizes: ProfileSizes
) -> Iterator[tuple[Case, tuple[ResumedTable, Key]]]:
    for size in sizes.transfer_bytes:
        send = SendCase(size_bytes=size, peer=of.gpus)
        yield send, _place(tables.sends, tables.name, "inter_node", size / MIB_BYTES)
    for in_node in of.shapes:
        gpus = in_node * of.nodes
        for kind in KINDS:
            for size in sizes.transfer_bytes:
                case = CollectiveCase(kind=kind, gpus=gpus, size_bytes=size)
                row = (tables.name, gpus, of.nodes, kind, size / MIB_BYTES)
                yield case, _place(tables.network, *row)


def _place(table: ResumedTable, *values: object) -> tuple[ResumedTable, Key]:
    return table, dict(zip(table.keys, values, strict=True))


def _values(timing: Timing) -> dict[str, object]:
    return {"time_ms": timing.median_s / MILLISECONDS, SPREAD: round(timing.spread, 4)}
