"""Fits a hardware file to the tables of a machine that was profiled; needs no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.calibration import fit_links, fits
from experiments.calibration.fit_operators import launch_time, operator_rates
from experiments.calibration.noted_machine import Machine
from experiments.calibration.profile_tables import KINDS, ResumedTable, Tables
from mistlab import catalog
from mistlab.core.units import GBYTES, GIB_BYTES, MIB_BYTES, MILLISECONDS
from mistlab.machine.hardware import Allocator, Gpu, Hardware, Node, Provenance, Source

# The network bandwidth that is assumed for a single node without a datasheet: 10 Gb/s.
ASSUMED_NETWORK_GBYTES_PER_S = 1.25
# The memory allocator constants of this hardware are used as long as no memory peaks of training
# runs were measured on the profiled machine.
ALLOCATOR_OF = "l4-24gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to fit: the hardware's name, the folder with its tables, and the hardware whose
    datasheet gives the peak rates.
    """

    name: str
    tables: Path
    datasheet: Hardware | None
    seed: int


def profiled(request: Request, machine: Machine) -> tuple[Hardware, list[fits.Fitted]]:
    """Fit a hardware file to all tables that were measured on a machine."""
    tables = Tables.of(request.tables, machine.environment.device)
    return fits.applied(_steps(tables, machine, request.seed), _bare(request, machine, tables))


def _steps(tables: Tables, machine: Machine, seed: int) -> list[fits.Step]:
    of_node = len(tables.collectives) > 0
    together = [
        *([fit_links.collectives(tables.collectives.path, None)] if of_node else []),
        fit_links.point_to_point(tables.sends.path, None),
    ]
    return [
        fit_links.bandwidth(tables.copies.path, None),
        *(together if machine.environment.num_devices > 1 or len(tables.sends) else []),
        *([fit_links.collectives(tables.network.path, None)] if len(tables.network) else []),
        fit_links.streams(tables.streams.path, None, seed),
        operator_rates(
            tables.operators.path,
            None,
            without_weight_gradients=False,
            attention=(tables.attention.path, None),
            attention_tflops=None,
        ),
        launch_time(tables.launches.path, None),
    ]


def _bare(request: Request, machine: Machine, tables: Tables) -> Hardware:
    """The hardware before any group of figures is fitted."""
    allocator, of_allocator = _allocator(machine)
    node, of_node = _node(machine, tables, request.datasheet)
    gpu, of_gpu = _gpu(machine, request.datasheet)
    return Hardware(
        name=request.name,
        description=machine.words,
        gpu=gpu,
        node=node,
        allocator=allocator,
        provenance=Provenance(gpu=of_gpu, node=of_node, allocator=of_allocator),
    )


def _gpu(machine: Machine, datasheet: Hardware | None) -> tuple[Gpu, Source]:
    gpu = Gpu(
        memory_gib=round(machine.device_memory_bytes / GIB_BYTES, 3),
        memory_gbytes_per_s=machine.memory_gbytes_per_s,
        peak_tflops=machine.peak_tflops,
        cores=None if machine.is_gpu else machine.threads,
    )
    if datasheet is None:
        text = f"fastest products and copies, memory as torch sees it: {machine.words}"
        return gpu, Source(kind="measured", source=text)
    text = f"{datasheet.provenance.gpu.source}; memory as torch sees it: {machine.words}"
    return replace(datasheet.gpu, memory_gib=gpu.memory_gib), Source(kind="datasheet", source=text)


def _node(machine: Machine, tables: Tables, datasheet: Hardware | None) -> tuple[Node, Source]:
    copies_gbytes_per_s = min(_longest(tables.copies, kind, 1) for kind in KINDS.values())
    between, notes = copies_gbytes_per_s, ["longest copies and sends"]
    if machine.environment.num_devices > 1:
        between = _longest(tables.sends, "intra_node", MIB_BYTES)
    else:
        notes.append("between GPUs the host link's rate, not measured")
    network = ASSUMED_NETWORK_GBYTES_PER_S
    if len(tables.network):
        network = round(network_gbytes_per_s(tables.network), 4)
        notes.append("network by the longest all-gather between nodes, all GPUs at once")
    elif datasheet is not None:
        network = datasheet.node.inter_node_gbytes_per_s
        notes.append(f"network of {datasheet.name}")
    else:
        notes.append("network of 10 Gb/s assumed")
    node = Node(
        gpus=machine.environment.num_devices,
        host_memory_gib=round(_host_bytes(machine) / GIB_BYTES, 3),
        intra_node_gbytes_per_s=round(between, 4),
        inter_node_gbytes_per_s=network,
        host_link_gbytes_per_s=round(copies_gbytes_per_s, 4),
    )
    return node, Source(kind="measured", source=f"{', '.join(notes)}: {machine.words}")


def _longest(table: ResumedTable, kind: str, unit_bytes: int) -> float:
    """The rate in GB/s of the largest transfer of one kind. Each row of the table has a key, which
    ends in the kind and the bytes, followed by the time.
    """
    of_kind, size = table.keys[-2:]
    rows = (row for row in table.rows if row[of_kind] == kind)
    row = max(rows, key=lambda row: float(row[size]))
    seconds = float(row[table.values[0]]) * MILLISECONDS
    return float(row[size]) * unit_bytes / seconds / GBYTES


def network_gbytes_per_s(table: ResumedTable) -> float:
    """The network bandwidth of a node in GB/s, from the largest all-gather of groups with one GPU
    per node: in a ring, each rank sends all parts but one.
    """
    gathers = [row for row in table.rows if row["collective"] == "all_gather"]
    row = max(
        (row for row in gathers if row["gpus"] == row["nodes"]),
        key=lambda row: float(row["full_mib"]),
    )
    nodes = int(row["nodes"])
    gpus = max(int(one["gpus"]) for one in gathers) // nodes
    sent = float(row["full_mib"]) * MIB_BYTES * (nodes - 1) / nodes
    return gpus * sent / (float(row["time_ms"]) * MILLISECONDS) / GBYTES


def _host_bytes(machine: Machine) -> int:
    """The bytes of host memory. On a machine without GPUs it is half of the memory; the other half
    stands for the memory of devices.
    """
    return machine.host_memory_bytes // (1 if machine.is_gpu else 2)


def _allocator(machine: Machine) -> tuple[Allocator, Source]:
    outside_mib = round(machine.outside_bytes / MIB_BYTES, 1)
    of_group = machine.communicator_bytes
    communicator_mib = None if of_group is None else round(of_group / MIB_BYTES, 1)
    if not machine.is_gpu:
        allocator = Allocator(
            step_bytes_a_parameter=0.0,
            head_bytes_a_parameter=0.0,
            head_mib=0.0,
            outside_mib=outside_mib,
        )
        text = "a CPU's allocator holds nothing back; outside of it a process without tensors"
        return allocator, Source(kind="measured", source=text)
    lent = catalog.hardware(ALLOCATOR_OF).allocator
    assert lent is not None
    text = f"{ALLOCATOR_OF}; measured outside of torch's allocator: {outside_mib} MiB"
    text += "" if of_group is None else f", and {communicator_mib} MiB for each communicator"
    lent = replace(lent, outside_mib=outside_mib, communicator_mib=communicator_mib)
    return lent, Source(kind="borrowed", source=text)
