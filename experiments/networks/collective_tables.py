"""Reads the rows of tables of measured collectives as numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.runs.runs_table import count_of, number_of, rows_of_table, text_of
from mistlab.core.values import InputError, near_matches, one_of, refuse
from mistlab.network.collective_times import (
    OPERATIONS,
    SOCKET_TIERS,
    Collectives,
    GpuLinks,
    ethernet_rate,
    gpu_links,
    socket_rates,
)

# For each column, other names that tables of measured collectives have for it.
SYNONYMS = {
    "collective": ("collective", "operation", "op"),
    "gpus": ("gpus", "group_size", "workers"),
    "size_bytes": ("size_bytes", "bytes"),
    "library": ("kernel", "library", "software", "lib"),
    "bus": ("busbw_gb_s", "busbw_gbps"),
    "rate": ("algbw_gb_s", "algbw_gbps"),
    "cluster": ("group", "source"),
}
TOLD_BY = (*SYNONYMS["collective"],)
NAMES = {
    "alltoall": "all_to_all",
    "all-to-all": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "send/recv": "send",
    "sendrecv": "send",
    "send_recv": "send",
    "p2p": "send",
    "p2p (pipeline)": "send",
    "p2p copy": "send",
}
ELEMENT_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4}
# The message size that is assumed if a row gives none or calls it large: beyond a gibibyte, rates
# no longer grow.
LARGE_BYTES = 2.0**30
_CARDS = re.compile(r"(?:(\d+) ?x ?)?(?<![\d.])(\d+(?:\.\d+)?) ?G(?:b/s|bps|bit/s)")
_BY_NAME = {"hdr": 200.0, "ndr": 400.0, "edr": 100.0}
_NAMED_CARDS = re.compile(r"(?:(\d+) ?x )?(?:one )?(hdr|ndr|edr)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A row of a table: a collective, the links that it uses, and its measured time or rate."""

    where: str
    number: int
    cluster: str
    operation: str
    software: str
    hardware: str
    ranks: int
    nodes: int
    size_bytes: float
    node_rate: float
    card_rate: float
    network: str
    measured_us: float | None
    notes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def links(self) -> GpuLinks:
        """The links that connect the GPUs of the row."""
        return gpu_links()[self.hardware]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCollective:
    """A row that cannot be predicted, and the reason."""

    where: str
    number: int
    problem: str


def collective_rows(path: Path) -> Iterator[CollectiveRow | RefusedCollective]:
    """The rows of a table of measured collectives, in order."""
    for row in rows_of_table(path, needed=(), told_by=TOLD_BY):
        try:
            if row.problem:
                refuse("row", row.problem)
            yield _row(row.where, row.number, row.cells, path.stem)
        except InputError as error:
            yield RefusedCollective(where=row.where, number=row.number, problem=str(error))


def columns_of(rows: Sequence[CollectiveRow]) -> Collectives:
    """Converts rows to columns, one array for each field."""

    def texts(values: Iterator[str]) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
        return np.array(list(values), dtype=object)

    def numbers(values: Iterator[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.array(list(values), dtype=float)

    return Collectives(
        operation=texts(row.operation for row in rows),
        software=texts(row.software for row in rows),
        generation=texts(row.links.generation for row in rows),
        network=texts(row.network for row in rows),
        ranks=numbers(row.ranks for row in rows),
        nodes=numbers(row.nodes for row in rows),
        size_bytes=numbers(row.size_bytes for row in rows),
        gpu_rate=numbers(row.links.gbytes_per_s for row in rows),
        is_switched=np.array([row.links.kind == "switched" for row in rows]),
        adds_in_switch=np.array([row.links.adds_in_switch for row in rows]),
        node_rate=numbers(row.node_rate for row in rows),
        card_rate=numbers(row.card_rate for row in rows),
    )


def _row(where: str, number: int, cells: Mapping[str, str], table: str) -> CollectiveRow:
    operation = _operation(_text(cells, "collective"))
    hardware = hardware_named(text_of(cells, "hardware"))
    nodes = count_of(cells, "nodes") or 1
    ranks, notes = _ranks(cells, nodes)
    size_bytes, of_size = _size(cells)
    node_rate, card_rate, of_network = _network(cells, hardware, ranks / nodes, nodes)
    software = _software(_text(cells, "library"), operation)
    row = CollectiveRow(
        where=where,
        number=number,
        cluster=f"{table}, {_text(cells, 'cluster') or hardware}, {hardware}",
        operation=operation,
        software=software,
        hardware=hardware,
        ranks=ranks,
        nodes=nodes,
        size_bytes=size_bytes,
        node_rate=node_rate,
        card_rate=card_rate,
        network=_kind_of_network(cells, hardware),
        measured_us=None,
        notes=(*notes, *of_size, *of_network),
    )
    return _measured(row, cells)


def _text(cells: Mapping[str, str], column: str) -> str:
    return next(filter(None, (text_of(cells, name) for name in SYNONYMS[column])), "")


def _number(cells: Mapping[str, str], column: str) -> float | None:
    return next(filter(None, (number_of(cells, name) for name in SYNONYMS[column])), None)


def _operation(text: str) -> str:
    name = NAMES.get(text.casefold(), text.casefold())
    if not name:
        refuse("collective", f"is empty: give one of {', '.join(OPERATIONS)}")
    if name not in OPERATIONS:
        refuse("collective", f"{text} cannot be predicted{near_matches(name, OPERATIONS)}")
    return name


def hardware_named(text: str) -> str:
    """The GPU that a text names as a whole word: ``L40S`` does not match ``L4``, nor ``H1000``
    ``H100``.
    """
    known = sorted(gpu_links(), key=len, reverse=True)
    for name in known:
        pattern = name.replace("-", "[ -]?")
        if re.search(rf"(?<![A-Z0-9]){pattern}(?![0-9]|[A-Z](?![A-Z]))", text.upper()):
            return name
    if re.search(r"(?<![A-Z0-9])GH(?![A-Z0-9])", text.upper()):
        return "GH200"
    return refuse(
        "hardware",
        f"{f'{text} names no' if text else 'is empty: it needs a'} GPU whose links are known"
        f"{near_matches(text, known)}",
    )


def _ranks(cells: Mapping[str, str], nodes: int) -> tuple[int, tuple[str, ...]]:
    counts = [count_of(cells, name) for name in SYNONYMS["gpus"]]
    ranks = next(filter(None, counts), None)
    per_node = count_of(cells, "gpus_per_node")
    if per_node and ranks == per_node and nodes == 2 and text_of(cells, "to_gpus"):
        # Such a row counts the ranks of one node only; they exchange data with equally many ranks
        # on the other node.
        ranks *= nodes
    notes: tuple[str, ...] = ()
    if ranks is None:
        ranks = nodes * (per_node or 8)
        notes = () if per_node else (f"no gpus: {ranks} on {nodes} nodes are assumed",)
    if ranks % nodes:
        refuse("nodes", f"{nodes} do not divide {ranks} GPUs: give a divisor of {ranks}")
    if ranks < 2:
        refuse("gpus", f"{ranks} is too few for a collective: give at least 2")
    return ranks, notes


def _size(cells: Mapping[str, str]) -> tuple[float, tuple[str, ...]]:
    size_bytes = _number(cells, "size_bytes")
    if size_bytes is not None:
        return size_bytes, ()
    elements = number_of(cells, "elements")
    if elements is not None:
        kind = text_of(cells, "dtype").casefold()
        if kind not in ELEMENT_BYTES:
            problem = f"{kind} is unknown" if kind else "is empty, and elements need their type"
            refuse("dtype", f"{problem}: give {one_of([*ELEMENT_BYTES])}, or a column size_bytes")
        return elements * ELEMENT_BYTES[kind], ()
    if text_of(cells, "quantity").startswith("smallest"):
        return 8.0, ("no size: 8 bytes are assumed",)
    return LARGE_BYTES, ("no size: 1 GiB is assumed",)


def _software(text: str, operation: str) -> str:
    name = text.casefold()
    if operation == "all_reduce" and ("custom" in name or "trtllm" in name):
        return "trtllm" if "trtllm" in name else "eager" if "eager" in name else "graph"
    return "torch" if "bench" in name and "nccl-tests" not in name else "nccl"


def _network(
    cells: Mapping[str, str], hardware: str, in_node: float, nodes: int
) -> tuple[float, float, tuple[str, ...]]:
    """The bandwidth of a node's network and of one of its network adapters in GB/s, as the row
    states it or by the default of the node.
    """
    if nodes == 1:
        return 0.0, 0.0, ()
    links = gpu_links()[hardware]
    if links.cards and text_of(cells, "network") in SOCKET_TIERS:
        pairs = min(in_node, count_of(cells, "to_gpus") or in_node)
        rate = links.node_gbytes_per_s * min(1.0, pairs / links.cards)
        return rate, rate, (f"{hardware} has a network card for each GPU, which is taken",)
    kind = _kind_of_network(cells, hardware)
    if kind == "ethernet":
        rate = ethernet_rate()
        note = "no network: the Ethernet of a workstation's board (1 Gb/s) is assumed"
        return rate, rate, (note,)
    if kind == "sockets":
        rate = socket_rates(text_of(cells, "network"), in_node)
        return rate, rate, ()
    text = text_of(cells, "network") or text_of(cells, "hardware")
    match, named = _CARDS.search(text), _NAMED_CARDS.search(text)
    if match or named:
        if match:
            cards, gbits = int(match[1] or 1), float(match[2])
        else:
            assert named
            cards, gbits = int(named[1] or 1), _BY_NAME[named[2].casefold()]
        if not cards * gbits:
            refuse(
                "network", f"{text} has no bandwidth: give cards and their rate, as 8 x 400 Gb/s"
            )
        return cards * gbits / 8, gbits / 8, ()
    rate = links.node_gbytes_per_s
    given = text_of(cells, "network")
    what = f"network {given} says no rate" if given else "no network"
    note = f"{what}: {rate:g} GB/s a node are assumed, as nodes of {hardware} often have"
    return rate, rate / 8 if rate > 50 else rate, (note,)


def _kind_of_network(cells: Mapping[str, str], hardware: str) -> str:
    """The kind of network between nodes: TCP sockets in a cloud or between workstations, EFA, or
    RDMA.
    """
    links = gpu_links()[hardware]
    has_sockets = "sockets" in text_of(cells, "library") and not links.cards
    if has_sockets and text_of(cells, "network") in SOCKET_TIERS:
        at_desk = links.at_desk or _is_at_desk(text_of(cells, "to_hardware"))
        return "ethernet" if at_desk else "sockets"
    text = " ".join(text_of(cells, name) for name in ("network", "hardware", "software"))
    return "efa" if "EFA" in text else "rdma"


def _is_at_desk(text: str) -> bool:
    """Whether a text names the GPU of a workstation; false for unknown GPUs."""
    with suppress(InputError):
        return gpu_links()[hardware_named(text)].at_desk
    return False


def _measured(row: CollectiveRow, cells: Mapping[str, str]) -> CollectiveRow:
    took = number_of(cells, "time_us")
    if took is None and (milliseconds := number_of(cells, "latency_ms")) is not None:
        took = 1e3 * milliseconds
    bus, rate = _number(cells, "bus"), _number(cells, "rate")
    if took is None and bus:
        factor = float(columns_of([row]).bus_factor[0])
        took = factor * row.size_bytes / bus / 1e3
    if took is None and rate:
        took = row.size_bytes / rate / 1e3
    return replace(row, measured_us=took)
