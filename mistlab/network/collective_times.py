"""The times of collectives over the links of GPUs and nodes, by a model of latencies and rates.

A collective takes its latency, the transfer of its bytes, and a multiple of the square root of
their product: a message sent in chunks pays the latency for each chunk, and with the best number of
chunks this costs twice that root. Arrays have an entry for each collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Self

import numpy as np

from mistlab.core.arrays import Bools, Column, Floats
from mistlab.core.files import parse_yaml
from mistlab.core.units import GBYTES, MICROSECONDS
from mistlab.core.values import from_mapping

# NVLink switches add up an all-reduce themselves (NVLS) from this message size on, in groups of at
# least this many GPUs.
SWITCHED_BYTES, SWITCHED_GPUS = 2**21, 5
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
# How far apart two cloud nodes are that communicate over sockets (TCP); rates are looked up by
# these names.
SOCKET_TIERS = ("same zone", "same region", "two regions")
SOCKETS = ("sockets", "ethernet")
# The software that calls a collective: NCCL (or RCCL) alone or through torch; or an inference
# engine's own all-reduce, launched by a CUDA graph ("graph"), by the host ("eager") or by
# TensorRT-LLM ("trtllm").
SOFTWARE = ("nccl", "torch", "graph", "eager", "trtllm")
DIRECT = SOFTWARE[2:]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """A GPU's links to the other GPUs of its node, and its node's links to other nodes, from
    datasheets.

    ``gbytes_per_s`` counts one direction. ``kind`` is ``switched`` if GPUs reach one another at
    this rate, and ``pcie`` if they go through the host. GPUs of one ``generation`` have similar
    latencies; ``adds_in_switch`` says that switches can add up all-reduces. GPUs that are sold with
    network ``cards`` use these between nodes, in clouds too; GPUs of workstations (``at_desk``) use
    sockets over the Ethernet of their boards.
    """

    gbytes_per_s: float
    kind: str
    generation: str
    node_gbytes_per_s: float = 0.0
    cards: int = 0
    at_desk: bool = False
    adds_in_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveNumbers:
    """Latencies in microseconds, and rates as shares of the links' rates, fitted to measurements of
    collectives.
    """

    launch_us: float
    graph_launch_us: float
    trtllm_launch_us: float
    eager_host_us: float
    torch_host_us: float
    hop_us: float
    pcie_hop_us: float
    direct_hop_us: float
    direct_pcie_hop_us: float
    network_us: float
    network_hop_us: float
    all_reduce_share: float
    gather_share: float
    all_to_all_share: float
    send_share: float
    direct_share: float
    pcie_share: float
    pcie_crowding: float
    switch_gain: float
    network_share: float
    network_send_share: float
    chunks: float
    direct_chunks: float
    pcie_chunks: float
    network_chunks: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fitted numbers, in the order of fields."""
        return tuple(entry.name for entry in fields(cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The result of fitting collective times: numbers for all GPUs, and factors on latencies by GPU
    generation and kind of network.

    ``latency`` multiplies the latencies of GPUs, ``host`` the time that hosts take for an eager
    call, ``network`` the latencies of messages between nodes, by the kind of network. ``bounds``
    are the 5 % and 95 % quantiles of measured over predicted seconds, for clusters left out of the
    fit.
    """

    numbers: CollectiveNumbers
    latency: Mapping[str, float]
    host: Mapping[str, float]
    network: Mapping[str, float]
    bounds: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Collectives as columns: the operation, the calling software, the number of ranks, the message
    size and the links of each.

    ``size_bytes`` is the message size as in nccl-tests: what every rank has after an all-gather,
    has before a reduce-scatter, and sends in an all-to-all. Rates are GB/s in one direction.
    Network rates are those of a node and of one of its cards; for sockets, the rate that their
    processes reach.
    """

    operation: Column
    software: Column
    generation: Column
    network: Column
    ranks: Floats
    nodes: Floats
    size_bytes: Floats
    gpu_rate: Floats
    is_switched: Bools
    adds_in_switch: Bools
    node_rate: Floats
    card_rate: Floats

    def __len__(self) -> int:
        return len(self.ranks)

    def where(self, kept: Bools) -> Self:
        """Select the collectives by a mask."""
        columns = {entry.name: getattr(self, entry.name)[kept] for entry in fields(self)}
        return type(self)(**columns)

    @property
    def kinds(self) -> Column:
        """The kind by which each collective's error bounds are looked up.

        It is the links that limit it or, for inference engines' own all-reduces, "direct".
        """
        inside = np.where(self.is_switched, "switched", "pcie")
        inside = np.where(self._is_direct, "direct", inside)
        across = np.where(self.network == "ethernet", "ethernet", "network")
        across = np.where(self.network == "sockets", "sockets", across)
        return np.where(self.nodes > 1, across, inside)

    @property
    def is_socket(self) -> Bools:
        """A mask of the collectives that go over sockets (TCP), between cloud nodes or over a
        workstation's Ethernet.
        """
        return np.isin(self.network, SOCKETS)

    @property
    def bus_factor(self) -> Floats:
        """The factor by which nccl-tests converts a message's bytes per second into bus bandwidth,
        for each collective.
        """
        share = np.where(self.operation == "send", 1.0, (self.ranks - 1) / self.ranks)
        return np.where(self.operation == "all_reduce", 2 * share, share)

    @property
    def _is_direct(self) -> Bools:
        return np.isin(self.software, DIRECT)

    def seconds(self, fitted: Fitted) -> Floats:
        """The seconds of each collective if it is repeated, with no other work at the same time."""
        numbers = fitted.numbers
        latency = self._latency_us(fitted)
        transfer = self._transfer_us(numbers)
        inside = np.where(self.is_switched, numbers.chunks, numbers.pcie_chunks)
        inside = np.where(self._is_direct & self.is_switched, numbers.direct_chunks, inside)
        chunks = np.where(self.nodes > 1, numbers.network_chunks, inside)
        total = latency + transfer + chunks * np.sqrt(latency * transfer)
        host = np.select(
            [self.software == "eager", self.software == "torch"],
            [numbers.eager_host_us, numbers.torch_host_us],
            0.0,
        )
        host_us = host * _factors(fitted.host, self.generation)
        seconds: Floats = MICROSECONDS * np.maximum(host_us, total)
        return seconds

    def _latency_us(self, fitted: Fitted) -> Floats:
        numbers = fitted.numbers
        launch = np.select(
            [~self._is_direct, self.software == "trtllm"],
            [numbers.launch_us, numbers.trtllm_launch_us],
            numbers.graph_launch_us,
        )
        hop = np.where(self.is_switched, numbers.hop_us, numbers.pcie_hop_us)
        direct = np.where(self.is_switched, numbers.direct_hop_us, numbers.direct_pcie_hop_us)
        hop = np.where(self._is_direct, direct, hop)
        in_node = self.ranks / self.nodes
        inside = (launch + hop * self._steps(in_node)) * _factors(fitted.latency, self.generation)
        across = numbers.network_us + numbers.network_hop_us * self._steps(np.log2(self.nodes) + 1)
        across = across * _factors(fitted.network, self.network)
        latency: Floats = inside + np.where(self.nodes > 1, across, 0.0)
        return latency

    def _steps(self, ranks: Floats) -> Floats:
        """The number of latencies that add up in a collective over a ring.

        An all-to-all counts only 0.3 steps per rank, since its messages leave together.
        """
        steps: Floats = (ranks - 1) * np.select(
            [self.operation == "all_reduce", self.operation == "all_to_all"], [2.0, 0.3], 1.0
        )
        return steps

    def _transfer_us(self, numbers: CollectiveNumbers) -> Floats:
        """The microseconds in which a collective's bytes are transferred: inside nodes or between
        nodes, whichever takes longer.
        """
        in_node = self.ranks / self.nodes
        is_send, is_exchange = self.operation == "send", self.operation == "all_to_all"
        twice = np.where(self.operation == "all_reduce", 2.0, 1.0)
        spread = np.where(is_send, 1.0, twice * (self.ranks - 1) / self.ranks)
        inside = np.where(in_node > 1, spread, 0.0)
        # A message between nodes goes through the network card of its rank; an all-to-all uses the
        # cards of all its ranks in a node.
        per_node = np.minimum(self.node_rate, self.card_rate * in_node)
        rate = np.select([is_send, is_exchange], [self.card_rate, per_node / in_node], per_node)
        across = np.select(
            [is_send, is_exchange],
            [1.0, 1 - in_node / self.ranks],
            twice * (self.nodes - 1) / self.nodes,
        )
        inside_us = inside * self.size_bytes / (self._gpu_rate(numbers) * GBYTES * MICROSECONDS)
        network = np.where(is_send, numbers.network_send_share, numbers.network_share)
        network = np.where(self.is_socket, 1.0, network)
        network = network * np.where(self.nodes > 1, rate, np.inf)
        across_us = across * self.size_bytes / (network * GBYTES * MICROSECONDS)
        return np.where(is_send & (self.nodes > 1), across_us, np.maximum(inside_us, across_us))

    def _gpu_rate(self, numbers: CollectiveNumbers) -> Floats:
        """The rate in GB/s that a collective reaches over the links of a GPU inside its node."""
        share = np.select(
            [
                self.operation == "all_reduce",
                self.operation == "all_to_all",
                self.operation == "send",
            ],
            [numbers.all_reduce_share, numbers.all_to_all_share, numbers.send_share],
            numbers.gather_share,
        )
        in_node = self.ranks / self.nodes
        added = self.adds_in_switch & (self.operation == "all_reduce") & ~self._is_direct
        added = added & (in_node >= SWITCHED_GPUS) & (self.size_bytes >= SWITCHED_BYTES)
        share = np.where(added, share * numbers.switch_gain, share)
        share = np.where(self._is_direct, numbers.direct_share, share)
        # A send involves only two GPUs, so no other GPU competes for its PCIe links.
        others = np.where(self.operation == "send", 0.0, np.maximum(in_node - 2, 0))
        crowded = 1 + numbers.pcie_crowding * others
        return self.gpu_rate * np.where(self.is_switched, share, numbers.pcie_share / crowded)


def first_guess() -> Fitted:
    """The starting values for fits of collective times: the same for all GPUs, without factors by
    generation.
    """
    numbers = CollectiveNumbers(**_catalogue()["start"])
    return Fitted(numbers=numbers, latency={}, host={}, network={}, bounds={})


def _factors(by_kind: Mapping[str, float], kinds: Column) -> Floats:
    return np.array([by_kind.get(name, 1.0) for name in kinds], dtype=float)


@cache
def fitted_collectives() -> Fitted:
    """The fitted numbers of collective times that the catalogue holds."""
    plain = _catalogue()["fitted"]
    return Fitted(
        numbers=CollectiveNumbers(**plain["numbers"]),
        latency=plain["latency"],
        host=plain["host"],
        network=plain["network"],
        bounds={kind: tuple(pair) for kind, pair in plain["bounds"].items()},
    )


def ethernet_rate() -> float:
    """The rate of a workstation's onboard Ethernet in GB/s."""
    return float(_catalogue()["sockets"]["workstation"]["gbytes_per_s"])


def socket_rates(tier: str, streams: float) -> float:
    """The rate in GB/s at which a cloud node sends over sockets (TCP) to another node.

    ``streams`` processes send; ``tier`` is the distance between the nodes.
    """
    numbers = _catalogue()["sockets"][tier]
    return float(numbers["gbytes_per_s"] * streams ** numbers["power"])


@cache
def gpu_links() -> Mapping[str, GpuLinks]:
    """The links of each GPU in the catalogue, by the GPU's name."""
    return {
        name: from_mapping(GpuLinks, values, f"gpus.{name}")
        for name, values in _catalogue()["gpus"].items()
    }


def _catalogue() -> dict[str, Any]:
    path = files("mistlab.catalog") / "collectives.yaml"
    return parse_yaml(path.read_text(encoding="utf-8"), "collectives.yaml")
