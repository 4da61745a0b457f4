"""Checks that the figures of a hardware file are in the units of their fields, and agree."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeAlias

from mistlab.core.units import GIB_BYTES, MIB_BYTES, TFLOP
from mistlab.core.values import refuse

# These types stand for values of ``mistlab.machine.hardware`` and ``mistlab.machine.cluster``,
# which import this file.
Hardware: TypeAlias = Any
DatasheetFigures: TypeAlias = Any
Line: TypeAlias = Any
Rate: TypeAlias = Any
Cluster: TypeAlias = Any

# Error messages name the unit of a figure with one of these texts, each with an example.
IN_GIB = "GiB (81,920 MiB are 80)"
OF_MEMORY = "GB/s (3.35 TB/s are 3350, as are 26,800 Gb/s)"
OF_PEAK = "TFLOP/s (0.989 PFLOP/s are 989)"
OF_LINK = "GB/s of one direction (900 both ways are 450, 0.9 TB/s are 900)"
OF_HOST = "GB/s of one direction (PCIe 5.0 x16 has 63)"
OF_NETWORK = "GB/s of the node (3200 Gb/s are 400; where there is no network any rate)"
OF_BOARD = "watts of one GPU (0.7 kW are 700)"
OF_NODE = "GiB of the node (2 TB are 2048, 524,288 MiB are 512)"
OF_TIME = "microseconds (0.04 ms are 40)"
IN_MIB = "MiB (0.5 GiB are 512)"

# The plausible ranges of figures, wider than all datasheets; a figure outside is in another unit.
# PCIe 3.0 with one lane has 0.985 GB/s (datasheet).
_USUAL: dict[str, tuple[float, float, str]] = {
    "memory_gbytes_per_s": (60, 40_000, OF_MEMORY),
    "peak_tflops.fp16": (3, 100_000, OF_PEAK),
    "board_watts": (5, 5000, OF_BOARD),
    "intra_node_gbytes_per_s": (0.95, 5000, OF_LINK),
    "host_link_gbytes_per_s": (0.95, 2000, OF_HOST),
}
_GIB, _HOST_GIB, _HOST_GIB_OF_GPU = (1, 1500), (4, 8192), (1, 1024)
# The smallest and the largest factor between two figures, by datasheets: fewer bits are never
# slower, links read the GPU's memory, and GPUs can always communicate through the host.
_AGREEING: tuple[tuple[str, float, float, str, str], ...] = (
    ("peak_tflops.bf16", 1 / 64, 8, "peak_tflops.fp16", OF_PEAK),
    ("peak_tflops.fp32", 1 / 256, 1, "peak_tflops.fp16", OF_PEAK),
    ("peak_tflops.tf32", 1 / 8, 1.25, "peak_tflops.fp16", OF_PEAK),
    ("peak_tflops.fp8", 0.9, 16, "peak_tflops.fp16", OF_PEAK),
    ("peak_tflops.fp4", 0.9, 32, "peak_tflops.fp16", OF_PEAK),
    ("memory_gbytes_per_s", 0, 120, "memory_gib", OF_MEMORY),
    ("intra_node_gbytes_per_s", 1 / 16, 1e9, "host_link_gbytes_per_s", OF_LINK),
    ("intra_node_gbytes_per_s", 0, 0.5, "memory_gbytes_per_s", OF_LINK),
    ("host_link_gbytes_per_s", 0, 0.5, "memory_gbytes_per_s", OF_HOST),
)
# A GPU's network is at most this many times as fast as its link to the host, and has at most this
# many GB/s.
_OF_HOST_LINK, _MOST_NETWORK_OF_GPU = 2.5, 200
# The plausible range of the time to launch a kernel, and the smallest plausible latency of a
# transfer unless it is 0, in microseconds; measured latencies begin at 5.
_LAUNCH_US, _LEAST_LATENCY_US = (0.2, 5000), 0.05
_LEAST_MIB = 1
# Measured curves may exceed datasheet figures by this factor. Then, the size of the square GEMM at
# which they are compared.
_SLACK, _SIDE = 1.0625, 8192
# The tolerance for attention is larger, since its measured rates were divided by the share that
# engines reach.
_SLACK_OF_ATTENTION = 4
# A measured curve that reaches less than this share of the datasheet figure is in a unit a thousand
# times as large.
_LEAST_SHARE = 0.002
_OR_EDITED = "give a lower rate, or add measured_with, the figures of the machine that was measured"
# These operator classes only move bytes. Below, the peak rate that bounds each of the other
# classes.
_MOVING = ("memory", "scan", "step")
_PEAK_OF: dict[str, str] = {
    **dict.fromkeys(("matmul", "grouped_matmul", "attention_forward", "attention_backward"), ""),
    **dict.fromkeys(("matmul_8bit", "grouped_matmul_8bit"), "fp8"),
    "matmul_4bit": "fp4",
}
# The GB/s in one direction of the fastest links of each GPU architecture, by datasheets: between
# GPUs, of a GPU's network, to the host.
_LINKS_OF = {
    "volta": (150, 12.5, 15.75),
    "turing": (50, 12.5, 15.75),
    "ampere": (300, 25, 31.5),
    "ampere-graphics": (56.25, 25, 31.5),
    "ada": (63, 50, 31.5),
    "hopper": (450, 50, 450),
    "blackwell": (900, 100, 450),
    "blackwell-graphics": (63, 100, 63),
    "cdna2": (150, 25, 36),
    "cdna3": (448, 50, 63),
    "cdna4": (537.6, 100, 63),
}
# A GPU's memory has at most this many GB/s for each GiB, and a network has at least this many GB/s;
# other figures get a note.
_USUAL_OF_GIB, _SLOW_NETWORK = 90, 1.0
# A figure gets a note if it exceeds those of datasheets by more than this factor.
_DOUBTFUL = 1.1


def check_consistency(hardware: Hardware) -> None:
    """Refuse figures that are in another unit, and figures or curves that contradict one another.

    Hosts that stand for GPUs have figures of any size, and so have nodes whose links were measured.
    """
    if _is_stated(hardware):
        node = hardware.node
        _in_range("gpu.memory_gib", hardware.gpu.memory_gib, *_GIB, IN_GIB)
        ends = zip(_HOST_GIB, _HOST_GIB_OF_GPU, strict=True)
        least, most = (max(of_node, node.gpus * of_gpu) for of_node, of_gpu in ends)
        _in_range("node.host_memory_gib", node.host_memory_gib, least, most, OF_NODE)
        _check_figures(hardware, hardware.figures, "")
        if hardware.measured_with is not None:
            _check_figures(hardware, hardware.measured_with, "measured_with.")
        _check_launches(hardware)
        _check_lines(hardware)
    _check_rates(hardware)


def _is_stated(hardware: Hardware) -> bool:
    """Whether the figures were written down by a person, for a machine with GPUs."""
    return hardware.gpu.cores is None and hardware.provenance.node.kind != "measured"


def _in_range(path: str, value: float, least: float, most: float, usual: str) -> None:
    if not least <= value <= most:
        bound = f"less than {least:g}" if value < least else f"more than {most:g}"
        refuse(path, f"{value:g} is {bound}, outside the range of GPUs: give {usual}")


def _check_figures(hardware: Hardware, figures: DatasheetFigures, holder: str) -> None:
    def path_of(name: str) -> str:
        return f"{holder or ('node.' if hasattr(hardware.node, name) else 'gpu.')}{name}"

    for name, (least, most, usual) in _USUAL.items():
        if (value := attrgetter(name)(figures)) is not None:
            _in_range(path_of(name), value, least, most, usual)
    for name, least, most, other, usual in _AGREEING:
        if holder and other == "memory_gib":
            # A user may change the memory size, but curves were measured with the original one, so
            # they are not compared with it.
            continue
        value = attrgetter(name)(figures)
        unit = attrgetter(other)(hardware.gpu if other == "memory_gib" else figures)
        if value is not None and not least * unit <= value <= most * unit:
            limit, word = (least, "below") if value < least * unit else (most, "above")
            bound = f"{other} {unit:g}"
            if limit != 1:
                bound = f"{limit * unit:.4g}, which is {limit:.3g} times {bound}"
            refuse(path_of(name), f"{value:g} is {word} {bound}: give {usual}")
    if problem := _too_fast(figures, hardware.node.gpus):
        refuse(path_of("inter_node_gbytes_per_s"), problem)


def _too_fast(figures: DatasheetFigures, gpus: int) -> str:
    """What is wrong with a network that is faster than any node of these GPUs has; empty if nothing
    is.
    """
    network = figures.inter_node_gbytes_per_s
    of_gpu = min(_MOST_NETWORK_OF_GPU, _OF_HOST_LINK * figures.host_link_gbytes_per_s)
    if network <= of_gpu * gpus:
        return ""
    return f"{network:g} is more than any node of {gpus} such GPUs has: give {OF_NETWORK}"


def _check_launches(hardware: Hardware) -> None:
    """Refuse launch times, and memory outside of torch, that are in another unit."""
    compute, allocator = hardware.compute, hardware.allocator
    if compute is not None and compute.launch_us > 0:
        _in_range("compute.launch_us", compute.launch_us, *_LAUNCH_US, OF_TIME)
    most = hardware.gpu.memory_gib * GIB_BYTES / MIB_BYTES
    for name in () if allocator is None else ("head_mib", "outside_mib", "communicator_mib"):
        if value := getattr(allocator, name):
            _in_range(f"allocator.{name}", value, _LEAST_MIB, most, IN_MIB)


def _check_rates(hardware: Hardware) -> None:
    """Refuse measured rates of operators that are above the datasheet's, or far below."""
    figures, compute = hardware.measured_with or hardware.figures, hardware.compute
    peaks = figures.peak_tflops
    for index, rate in enumerate(() if compute is None else compute.rates):
        assert compute is not None
        path, name = f"compute.rates[{index}]", rate.operators
        if _is_stated(hardware):
            for figure, stated in (
                ("tflops", peaks.fp16),
                ("gbytes_per_s", figures.memory_gbytes_per_s),
            ):
                value = getattr(rate, figure)
                if value is not None and value < _LEAST_SHARE * stated:
                    unit = OF_PEAK if figure == "tflops" else OF_MEMORY
                    key = "peak_tflops" if figure == "tflops" else "memory_gbytes_per_s"
                    refuse(
                        f"{path}.{figure}",
                        f"{value:g} of {name} is far below {key} {stated:g}: give {unit}",
                    )
        if _is_stated(hardware) and name in _MOVING and rate.gbytes_per_s is not None:
            moved, most = rate.gbytes_per_s * compute.sustained, figures.memory_gbytes_per_s
            if moved > _SLACK * most:
                refuse(
                    "compute.rates",
                    f"the rate of {name} is {moved:.0f} GB/s, above memory_gbytes_per_s {most:g}: "
                    f"{_OR_EDITED}",
                )
        if name in _PEAK_OF and rate.tflops is not None:
            narrow = _PEAK_OF[name]
            peak = getattr(peaks, narrow) if narrow else max(peaks.fp16, peaks.bf16 or 0.0)
            reached = _reached_tflops(rate) * compute.sustained
            slack = _SLACK_OF_ATTENTION if name.startswith("attention") else _SLACK
            if peak is not None and reached > slack * peak:
                refuse(
                    "compute.rates",
                    f"the rate of {name} is {reached:.0f} TFLOP/s, above peak_tflops {peak:g}: "
                    f"{_OR_EDITED}",
                )


def _reached_tflops(rate: Rate) -> float:
    """The TFLOP/s that operators of one class reach if they have the floating-point operations and
    the bytes of a GEMM of large square matrices.
    """
    flop = 2.0 * _SIDE**3
    seconds: float = flop * rate.s_per_flop + 6.0 * _SIDE**2 * rate.s_per_byte
    return flop / seconds / TFLOP


def _check_lines(hardware: Hardware) -> None:
    """Refuse measured curves of transfers that are above the datasheet rates of links, or far
    below.
    """
    figures = hardware.measured_with or hardware.figures
    most_mib = hardware.gpu.memory_gib * GIB_BYTES / MIB_BYTES
    for path, name, line, share, stated in _lines(hardware, figures):
        moved = f"{name} moves {line.gbytes_per_s * share:.3g} GB/s over a link"
        if line.gbytes_per_s * share > _SLACK * stated:
            refuse(
                "transfers.groups",
                f"{moved}, above the {stated:g} GB/s of the link's datasheet: {_OR_EDITED}",
            )
        if line.gbytes_per_s < _LEAST_SHARE * stated:
            refuse(
                f"{path}.gbytes_per_s",
                f"{line.gbytes_per_s:g} is far below the {stated:g} GB/s of the link's "
                "datasheet: give GB/s (0.45 TB/s are 450)",
            )
        if 0 < line.latency_us < _LEAST_LATENCY_US:
            refuse(
                f"{path}.latency_us",
                f"{line.latency_us:g} is less than {_LEAST_LATENCY_US:g}, faster than any "
                f"transfer: give {OF_TIME}",
            )
        if line.largest_mib > most_mib:
            refuse(
                f"{path}.largest_mib",
                f"{line.largest_mib:g} is more than a GPU's memory of {most_mib:g} MiB: give "
                "MiB (1,048,576 bytes are 1)",
            )


def _lines(
    hardware: Hardware, figures: DatasheetFigures
) -> Iterator[tuple[str, str, Line, float, float]]:
    """The measured curves of transfers, each with its path, its name, the share of its bytes that
    one link carries, and the datasheet rate of that link.
    """
    transfers = hardware.transfers
    if transfers is None:
        return
    link, host = figures.intra_node_gbytes_per_s, figures.host_link_gbytes_per_s
    network = figures.inter_node_gbytes_per_s
    for name, stated in (("in_node", link), ("across_nodes", network)):
        if (line := getattr(transfers, name)) is not None:
            yield f"transfers.{name}", name, line, 1.0, stated
    for index, group in enumerate(transfers.groups):
        inside = group.nodes == 1 and (group.gpus_in_node - 1) / group.gpus_in_node
        between = link if group.nodes == 1 else network
        for name, share, stated in (
            *(("all_gather", inside, between), ("reduce_scatter", inside, between)),
            *(("all_reduce", 2 * inside, between), ("all_to_all", inside, between)),
            *(("host_to_device", 1.0, host), ("device_to_host", 1.0, host)),
        ):
            if (line := getattr(group, name)) is not None:
                yield f"transfers.groups[{index}].{name}", name, line, share, stated


def doubtful_figures(cluster: Cluster) -> tuple[str, ...]:
    """Notes on figures that are possible for a machine, but were probably meant in another unit."""
    return tuple(_doubts(cluster)) if _is_stated(cluster.hardware) else ()


def _doubts(cluster: Cluster) -> Iterator[str]:
    node, gpu = cluster.hardware.node, cluster.hardware.gpu
    if cluster.memory_gib is not None and cluster.memory_gib < _GIB[0]:
        yield f"memory_gib is {cluster.memory_gib:g}: give {IN_GIB}, if these are TB"
    host_gib = cluster.host_memory_gib
    if host_gib is not None and host_gib < node.gpus:
        yield f"host_memory_gib is {host_gib:g}, below one for each GPU: give {OF_NODE}"
    if gpu.memory_gbytes_per_s > _USUAL_OF_GIB * gpu.memory_gib:
        given = gpu.memory_gbytes_per_s
        yield f"memory_gbytes_per_s is {given:g}: if these are Gb/s, give {given / 8:g}"
    intra = cluster.given_gbytes_per_s("intra_node_gbytes_per_s") or node.intra_node_gbytes_per_s
    inter = cluster.given_gbytes_per_s("inter_node_gbytes_per_s") or node.inter_node_gbytes_per_s
    for name, rate, least in (
        ("intra_node", intra, node.host_link_gbytes_per_s / 16),
        ("inter_node", inter, _SLOW_NETWORK),
    ):
        if rate < least:
            yield f"{name}_gbytes_per_s is {rate:g}: if these are TB/s, give {1000 * rate:g}"
    if gpu.architecture not in _LINKS_OF:
        return
    link, network, host = _LINKS_OF[gpu.architecture]
    for name, rate, most in (
        ("intra_node", intra, link),
        ("inter_node", inter, network * node.gpus),
        ("host_link", node.host_link_gbytes_per_s, host),
    ):
        if rate > _DOUBTFUL * most:
            both = "" if name == "inter_node" else f"{rate / 2:g} if both ways are counted, "
            yield (
                f"{name}_gbytes_per_s is {rate:g}, and {gpu.architecture} GPUs have {most:g} each "
                f"way: give {both}{rate / 8:g} if these are Gb/s"
            )
