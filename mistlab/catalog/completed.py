"""Completes hardware that has only datasheet figures: takes measured figures of the nearest
calibrated GPU, scaled by both datasheets.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log2
from typing import Any

from mistlab.machine.hardware import (
    ARCHITECTURES,
    EIGHT_BIT,
    LENT,
    Compute,
    DatasheetFigures,
    GroupTransfers,
    Hardware,
    Line,
    Node,
    PeakTflops,
    ProvenanceKind,
    Rate,
    Source,
    Transfers,
)

# Added to the distance between two GPUs, measured in doublings of their figures: for another
# architecture, for another product line, for a calibrated GPU that is older than the other, and for
# another maker.
OTHER_ARCHITECTURE, OTHER_LINE, OLDER, OTHER_MAKER = 1.0, 4.0, 1.0, 8.0
# GPU links of at most this many GB/s, the rate of PCIe 5 x16, are assumed to be PCIe.
MOST_OF_PCIE = 64.0
# The groups of figures in a hardware file that describe links between GPUs and to their hosts.
LINKS = ("interference", "transfers")
# The factor by which a new GPU generation raises the GEMM rate per watt: measured 1.58 from A100 to
# H100, and 1.16 from H100 to B200.
A_WATT = 1.36
# Two numbers fitted to 16-bit training in C++ (llmq) on L40S, RTX 4090, 5060 Ti and PRO 6000, and
# limited to what L4 reaches. ``OF_POWER``: how much of a GPU's arithmetic rate follows its board
# power rather than its peak rate, as an exponent. ``MOST_OF_PEAK``: the largest share of its peak
# that a GPU sustains in large GEMMs (clocks exceed the datasheet's where neither power nor memory
# limits them). With one of the four GPUs left out the exponent is 0.51 to 0.63; the share depends
# on the 5060 Ti.
OF_POWER = 0.57
MOST_OF_PEAK = 0.93
# Groups of figures that are scaled when they come from another GPU; other groups are copied.
SCALED = ("compute", "transfers")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
COPIES = ("host_to_device", "device_to_host")


def completed(hardware: Hardware, calibrated: Sequence[Hardware]) -> Hardware:
    """Return the hardware with missing groups of figures taken from the nearest calibrated
    hardware.

    These figures are scaled by ratios of both datasheets: rates of GEMMs by the peaks in their
    precision and by the power of the boards, rates of bytes by the memory bandwidths, collectives
    by the links that they cross, copies by the links to the host. Latencies and slowdowns stay as
    they are. Rates of operators and rates of links may come from different hardware.
    """
    for group in LENT:
        lender = nearest(hardware, calibrated, by_links=group in LINKS)
        value = getattr(lender, group)
        if getattr(hardware, group) is not None or value is None:
            continue
        if group == "compute":
            value = scaled_compute(value, lender, hardware)
        if group == "transfers":
            value = scaled_transfers(value, lender.node, hardware.node)
        kind: ProvenanceKind = "scaled" if group in SCALED else "borrowed"
        source = Source(kind=kind, source=lender.name)
        provenance = replace(hardware.provenance, **{group: source})
        hardware = replace(hardware, **{group: value}, provenance=provenance)
    return hardware


def restated(hardware: Hardware) -> Hardware:
    """Return the hardware with its measured curves scaled to its own datasheet, where that differs
    from the machine on which the curves were measured.
    """
    then, now = hardware.measured_with, hardware.figures
    if then is None or then == now:
        return hardware
    measured, changes = _stating(hardware, then), changed_figures(then, now)
    text = f"its curves were measured at {', '.join(changes)}: they are scaled to what it states"
    source = Source(kind="restated", source=text)
    groups: dict[str, Any] = {}
    if hardware.compute is not None:
        groups["compute"] = scaled_compute(hardware.compute, measured, hardware)
    if hardware.transfers is not None:
        groups["transfers"] = scaled_transfers(hardware.transfers, measured.node, hardware.node)
    sources = {name: source for name, value in groups.items() if value != getattr(hardware, name)}
    provenance = replace(hardware.provenance, **sources)
    return replace(hardware, **groups, provenance=provenance, measured_with=now)


def _stating(hardware: Hardware, figures: DatasheetFigures) -> Hardware:
    """A copy of the hardware with other datasheet figures for its GPU and node."""
    gpu = replace(
        hardware.gpu,
        memory_gbytes_per_s=figures.memory_gbytes_per_s,
        peak_tflops=figures.peak_tflops,
        board_watts=figures.board_watts,
    )
    node = replace(
        hardware.node,
        intra_node_gbytes_per_s=figures.intra_node_gbytes_per_s,
        inter_node_gbytes_per_s=figures.inter_node_gbytes_per_s,
        host_link_gbytes_per_s=figures.host_link_gbytes_per_s,
    )
    return replace(hardware, gpu=gpu, node=node)


def changed_figures(then: DatasheetFigures, now: DatasheetFigures) -> list[str]:
    """Return a text for each datasheet figure in which two hardware descriptions differ, with its
    value in the first one.
    """
    changes = []
    for figure in fields(then):
        before, after = getattr(then, figure.name), getattr(now, figure.name)
        if isinstance(before, PeakTflops):
            changes += [
                f"{figure.name}.{peak.name} {getattr(before, peak.name) or 0:g}"
                for peak in fields(before)
                if getattr(before, peak.name) != getattr(after, peak.name)
            ]
        elif before != after:
            changes.append(f"{figure.name} {before or 0:g}")
    return changes


def nearest(
    hardware: Hardware, calibrated: Sequence[Hardware], *, by_links: bool = False
) -> Hardware:
    """Return the nearest calibrated hardware: by architecture first, then by the number of
    doublings between datasheet figures.

    For rates of operators, the line of GPUs comes first; figures are the peak and the memory's
    bandwidth. For links, racks come first, then cards behind PCIe; figures are the rates inside a
    node and to the host. So an edited figure brings no other lender, which might be slower.
    """

    def apart(other: Hardware) -> tuple[float, ...]:
        pairs = zip(_figures(hardware, by_links), _figures(other, by_links), strict=True)
        doublings = sum(abs(log2(mine / its)) for mine, its in pairs)
        between = _between_architectures(hardware, other)
        if by_links:
            classes = zip(_class_of_links(hardware), _class_of_links(other), strict=True)
            return (*(mine != its for mine, its in classes), between, doublings)
        return (between >= OTHER_LINE, between > 0, doublings + between)

    return min(calibrated, key=apart)


def _figures(hardware: Hardware, by_links: bool) -> tuple[float, ...]:
    gpu, node = hardware.gpu, hardware.node
    if by_links:
        return node.intra_node_gbytes_per_s, node.host_link_gbytes_per_s
    return gpu.peak_tflops.fp16, gpu.memory_gbytes_per_s


def _class_of_links(hardware: Hardware) -> tuple[bool, bool]:
    """Whether the hardware is a rack (one NVLink domain), and whether only PCIe links the GPUs of a
    node.
    """
    node = hardware.node
    return node.is_rack, node.intra_node_gbytes_per_s <= MOST_OF_PCIE


def _between_architectures(hardware: Hardware, other: Hardware) -> float:
    mine, its = hardware.gpu.architecture, other.gpu.architecture
    if mine is None or its is None or mine == its:
        return 0.0
    target, lent = ARCHITECTURES[mine], ARCHITECTURES[its]
    if target.maker != lent.maker:
        return OTHER_MAKER
    newer = lent.generation - target.generation
    return OTHER_ARCHITECTURE + OTHER_LINE * (target.line != lent.line) + OLDER * (newer < 0)


def scaled_compute(compute: Compute, lender: Hardware, hardware: Hardware) -> Compute:
    """Return the operator rates of a calibrated GPU, scaled to another GPU by both datasheets.

    Rates of bytes are scaled by the memories' bandwidths. Arithmetic rates are limited by the peak
    rate and by the power that the board draws, from which newer GPUs of a line get more: they are
    scaled by the peak with exponent 1 - ``OF_POWER``, and by power with exponent ``OF_POWER``; or
    by the peak alone if the power is unknown. The result stays below ``MOST_OF_PEAK`` of the peak,
    or below the calibrated GPU's share of its peak if that is larger. GEMMs in a precision that
    only one of the two GPUs has are left out; other rates stand in for them.
    """
    memory = hardware.gpu.memory_gbytes_per_s / lender.gpu.memory_gbytes_per_s
    power = (hardware.gpu.board_watts or 0.0) / (lender.gpu.board_watts or 1.0)
    power *= A_WATT ** _generations(hardware, lender)

    def arithmetic(tflops: float, mine: float, its: float) -> float:
        by_peak = tflops * mine / its
        most = max(by_peak, MOST_OF_PEAK * mine / compute.sustained)
        return (
            min(most, by_peak ** (1 - OF_POWER) * (tflops * power) ** OF_POWER)
            if power
            else by_peak
        )

    def scaled(rate: Rate) -> Rate | None:
        peak = _precision_of(rate.operators)
        mine, its = (getattr(one.gpu.peak_tflops, peak) for one in (hardware, lender))
        if mine is None or its is None:
            return None
        return replace(
            rate,
            tflops=None if rate.tflops is None else round(arithmetic(rate.tflops, mine, its), 4),
            gbytes_per_s=None
            if rate.gbytes_per_s is None
            else round(rate.gbytes_per_s * memory, 4),
        )

    return replace(compute, rates=tuple(rate for one in compute.rates if (rate := scaled(one))))


def _generations(hardware: Hardware, lender: Hardware) -> int:
    """Return by how many generations a GPU is newer than the calibrated one; 0 if they are of
    different product lines.
    """
    mine, its = hardware.gpu.architecture, lender.gpu.architecture
    if mine is None or its is None:
        return 0
    target, lent = ARCHITECTURES[mine], ARCHITECTURES[its]
    is_alike = (target.maker, target.line) == (lent.maker, lent.line)
    return target.generation - lent.generation if is_alike else 0


def _precision_of(operators: str) -> str:
    if operators == "matmul_4bit":
        return "fp4"
    return "fp8" if operators in EIGHT_BIT else "fp16"


def scaled_transfers(transfers: Transfers, lender: Node, node: Node) -> Transfers:
    """Return the transfer latencies and bandwidths of a calibrated machine, scaled to another
    machine by the link rates of both datasheets.
    """
    inside = node.intra_node_gbytes_per_s / lender.intra_node_gbytes_per_s
    across = node.inter_node_gbytes_per_s / lender.inter_node_gbytes_per_s
    host = node.host_link_gbytes_per_s / lender.host_link_gbytes_per_s

    def group_of(group: GroupTransfers) -> GroupTransfers:
        factors = dict.fromkeys(COLLECTIVES, inside if group.nodes == 1 else across)
        factors |= dict.fromkeys(COPIES, host)
        lines: Any = {name: _faster(getattr(group, name), by) for name, by in factors.items()}
        return replace(group, **lines)

    return replace(
        transfers,
        groups=tuple(map(group_of, transfers.groups)),
        in_node=_faster(transfers.in_node, inside),
        across_nodes=_faster(transfers.across_nodes, across),
    )


def _faster(line: Line | None, factor: float) -> Line | None:
    if line is None or factor == 1.0:
        return line
    return replace(line, gbytes_per_s=line.gbytes_per_s * factor)
