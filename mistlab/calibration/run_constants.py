"""Fits a few constants of the hardware, the engine and the cluster profile to the measured
iteration times of whole training runs.

A fitted constant is what whole runs sustain: the share of the fastest GEMMs' rate, the bus
bandwidth of collectives inside a node and between nodes, the latency of groups that span nodes, the
host's time for a block, the time by which one cluster is late. A few runs in a hundred are many
times slower for reasons of their cluster, so the fit counts large errors less than by their square.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.engines.engine import Engine, ExpertExchange
from mistlab.machine.cluster import Profile
from mistlab.machine.hardware import Compute, GroupTransfers, Hardware, Line, Rate, Transfers

# The assumed ratio of fused attention's backward rate to its forward rate.
BACKWARD_SHARE = 0.8
# A logarithmic error above this size counts linearly rather than by its square, since it is
# probably common to all runs of a cluster.
COMMON_ERROR = 0.05
SMALLEST_MIB, LARGEST_MIB = 1.0, 1024.0
# The shapes of rank groups whose collectives are fitted, each as GPUs in a node and number of
# nodes: first the shapes inside one node, then those over several nodes, by name.
INSIDE = ((2, 1), (4, 1), (8, 1))
ACROSS = {"pair": (1, 2), "two": (8, 2), "four": (8, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSetting:
    """The hardware, engine and cluster profile whose constants are fitted to measured runs."""

    hardware: Hardware
    engine: Engine
    profile: Profile | None = None


# A function that predicts the seconds of all measured runs for one choice of constants.
Predicted = Callable[[ConstantSetting], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant that is fitted to measured runs: the range of its value, and its meaning in
    words.
    """

    low: float
    high: float
    words: str


CONSTANTS: Mapping[str, Constant] = {
    "sustained": Constant(low=0.4, high=1.0, words="share of the fastest GEMMs' rate"),
    "memory_gbytes_per_s": Constant(
        low=300, high=7000, words="bandwidth of memory-bound operators"
    ),
    "attention_tflops": Constant(
        low=50, high=1500, words="rate of fused causal attention, forward"
    ),
    "node_gbytes_per_s": Constant(low=50, high=900, words="bus bandwidth of collectives in a node"),
    "node_latency_us": Constant(low=1, high=300, words="latency of a collective in a node"),
    "network_gbytes_per_s": Constant(low=10, high=800, words="bus bandwidth of a node's network"),
    "pair_latency_us": Constant(
        low=1, high=900, words="latency of a collective of two GPUs on two nodes"
    ),
    "two_latency_us": Constant(
        low=10, high=3000, words="latency of a collective of two whole nodes"
    ),
    "four_latency_us": Constant(
        low=10, high=6000, words="latency of a collective of four whole nodes"
    ),
    "host_ms": Constant(low=0.1, high=20, words="host time of a block, forward and backward"),
    "end_ms": Constant(low=0.01, high=20, words="host time of a pass of embedding or head"),
    "step_ms": Constant(low=0.01, high=30, words="host time of a block's optimizer step"),
    "sharded_step_ms": Constant(
        low=0.01, high=30, words="further host time of a sharded block's step"
    ),
    "products_share": Constant(low=0.4, high=1.3, words="share of their rate that GEMMs reach"),
    "attention_share": Constant(
        low=0.2, high=1.5, words="share of its rate that fused attention reaches"
    ),
    "memory_share": Constant(low=0.3, high=2.0, words="share of the bandwidth that kernels reach"),
    "eight_bit_share": Constant(
        low=0.3, high=2, words="share of their rate that 8-bit GEMMs reach"
    ),
    "expert_us": Constant(
        low=0.1, high=300, words="time of each expert of a rank, in an exchange of tokens"
    ),
    "exchange_ms": Constant(low=0.01, high=20, words="wait for the host in an exchange of tokens"),
    "block_ms": Constant(
        low=0.01, high=20, words="delay of a block on this cluster, per rank to a power"
    ),
    "block_power": Constant(
        low=0.1, high=3, words="the power of the number of ranks in that delay"
    ),
    "send_ms": Constant(low=1, high=2000, words="delay of a send between stages on this cluster"),
}
OF_PROFILE = ("block_ms", "block_power", "send_ms")


def values_of(setting: ConstantSetting) -> dict[str, float]:
    """The current value of each constant in a hardware, an engine and a cluster profile."""
    hardware, engine = setting.hardware, setting.engine
    compute, transfers, host = hardware.compute, hardware.transfers, engine.host
    names = "products_share", "attention_share", "memory_share"
    values = dict(zip(names, engine.shares(hardware.name), strict=True))
    values["eight_bit_share"] = engine.eight_bit_on.get(hardware.name, 1.0)
    values |= _of_exchange(engine.expert_exchange)
    if compute is not None:
        values["sustained"] = compute.sustained
        values["memory_gbytes_per_s"] = compute.rate("memory").gbytes_per_s or 0.0
        values["attention_tflops"] = compute.rate("attention_forward").tflops or 0.0
    if transfers is not None:
        values |= _values_of_transfers(transfers)
    if host is not None:
        values["host_ms"] = 1e3 * (host.forward_s + host.backward_s)
        values["end_ms"] = 1e3 * host.end_s
        values["step_ms"] = 1e3 * host.step_s
        values["sharded_step_ms"] = 1e3 * host.sharded_step_s
    if setting.profile is not None:
        values |= {name: getattr(setting.profile, name) for name in OF_PROFILE}
    return values


def _values_of_transfers(transfers: Transfers) -> dict[str, float]:
    values = {}
    lines = {(g.gpus_in_node, g.nodes): g.all_gather for g in transfers.groups}
    if (inside := lines.get((8, 1))) is not None:
        values["node_gbytes_per_s"] = inside.gbytes_per_s * 7 / 8
        values["node_latency_us"] = inside.latency_us
    if (across := lines.get((8, 2))) is not None:
        values["network_gbytes_per_s"] = across.gbytes_per_s * 15 / 16
    for name, shape in ACROSS.items():
        if (line := lines.get(shape)) is not None:
            values[f"{name}_latency_us"] = line.latency_us
    return values


def _of_exchange(exchange: ExpertExchange) -> dict[str, float]:
    """The constants of how an engine exchanges tokens between experts, without those that are
    zero.
    """
    values = {"expert_us": 1e6 * exchange.expert_s, "exchange_ms": 1e3 * exchange.wait_s}
    return {name: value for name, value in values.items() if value}


def with_values(setting: ConstantSetting, values: Mapping[str, float]) -> ConstantSetting:
    """The hardware, engine and cluster profile with some constants set to new values."""
    every = {**values_of(setting), **values}
    hardware, engine, profile = setting.hardware, setting.engine, setting.profile
    if profile is not None:
        of_profile = {name: every[name] for name in OF_PROFILE}
        profile = replace(profile, **of_profile)  # type: ignore[arg-type]
    compute, transfers = hardware.compute, hardware.transfers
    if compute is not None:
        compute = _compute(compute, every)
    if transfers is not None and any(name.endswith(("_per_s", "_us")) for name in values):
        transfers = _transfers(transfers, every)
    if (host := engine.host) is not None:
        forward = host.forward_s / (host.forward_s + host.backward_s)
        host = replace(
            host,
            forward_s=forward * every["host_ms"] * 1e-3,
            backward_s=(1 - forward) * every["host_ms"] * 1e-3,
            end_s=every["end_ms"] * 1e-3,
            step_s=every["step_ms"] * 1e-3,
            sharded_step_s=every["sharded_step_ms"] * 1e-3,
        )
    return ConstantSetting(
        hardware=replace(hardware, compute=compute, transfers=transfers),
        engine=replace(
            engine,
            host=host,
            products_share=every["products_share"],
            attention_share=every["attention_share"],
            memory_share=every["memory_share"],
            shares_on={},
            eight_bit_on={**engine.eight_bit_on, hardware.name: every["eight_bit_share"]},
            expert_exchange=replace(
                engine.expert_exchange,
                expert_s=1e-6 * every.get("expert_us", 0.0),
                wait_s=1e-3 * every.get("exchange_ms", 0.0),
            ),
        ),
        profile=profile,
    )


def _compute(compute: Compute, values: Mapping[str, float]) -> Compute:
    changed: dict[str, dict[str, float]] = {
        "memory": {"gbytes_per_s": values["memory_gbytes_per_s"]},
        "attention_forward": {"tflops": values["attention_tflops"]},
        "attention_backward": {"tflops": values["attention_tflops"] * BACKWARD_SHARE},
    }
    rates = tuple(_rate(rate, changed.get(rate.operators, {})) for rate in compute.rates)
    return replace(compute, rates=rates, sustained=min(1.0, values["sustained"]))


def _rate(rate: Rate, changed: Mapping[str, float]) -> Rate:
    return replace(rate, **changed) if changed else rate  # type: ignore[arg-type]


def _transfers(transfers: Transfers, values: Mapping[str, float]) -> Transfers:
    """A hardware's transfer times with other latencies and bandwidths of collectives; copies
    between GPU and host are unchanged.
    """
    copies = {(g.gpus_in_node, g.nodes): g for g in transfers.groups}
    node, network = values["node_gbytes_per_s"], values.get("network_gbytes_per_s")
    groups = [_group(shape, node, values["node_latency_us"], copies) for shape in INSIDE]
    for name, shape in ACROSS.items():
        if network is not None and f"{name}_latency_us" in values:
            rate = network * shape[0] / 8
            groups.append(_group(shape, rate, values[f"{name}_latency_us"], copies))
    return replace(transfers, groups=tuple(groups))


def _group(
    shape: tuple[int, int],
    bus_gbytes_per_s: float,
    latency_us: float,
    copies: Mapping[tuple[int, int], GroupTransfers],
) -> GroupTransfers:
    """The latencies and bandwidths of collectives over groups of one shape; an all-reduce takes as
    long as a reduce-scatter and an all-gather.
    """
    ranks = shape[0] * shape[1]
    rate = bus_gbytes_per_s * ranks / (ranks - 1)

    def line(latency: float, rate: float) -> Line:
        return Line(
            latency_us=round(latency, 2),
            gbytes_per_s=round(rate, 4),
            smallest_mib=SMALLEST_MIB,
            largest_mib=LARGEST_MIB,
        )

    copies_of_shape = copies.get(shape)
    return GroupTransfers(
        gpus_in_node=shape[0],
        nodes=shape[1],
        all_gather=line(latency_us, rate),
        reduce_scatter=line(latency_us, rate),
        all_reduce=line(2 * latency_us, rate / 2),
        host_to_device=None if copies_of_shape is None else copies_of_shape.host_to_device,
        device_to_host=None if copies_of_shape is None else copies_of_shape.device_to_host,
    )


def fitted(
    setting: ConstantSetting,
    names: Sequence[str],
    predicted: Predicted,
    measured_s: Floats,
    *,
    evaluations: int,
) -> dict[str, float]:
    """Fit the named constants such that predicted seconds are nearest to the ``measured_s`` of
    runs.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415 (only where something is fitted)

    start = values_of(setting)
    low, high = (
        np.log([getattr(CONSTANTS[name], end) for name in names]) for end in ("low", "high")
    )

    def errors(logs: Floats) -> Floats:
        new = with_values(setting, dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.log(predicted(new) / measured_s)

    first = np.clip(np.log([start[name] for name in names]), low + 1e-6, high - 1e-6)
    fit = least_squares(
        errors,
        first,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=COMMON_ERROR,
        diff_step=0.01,
        max_nfev=evaluations,
    )
    return dict(zip(names, np.exp(fit.x).tolist(), strict=True))
