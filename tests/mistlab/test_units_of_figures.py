"""A figure in another unit is refused by name, or noted where a machine may have it."""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from mistlab import catalog
from mistlab.core.values import InputError, from_mapping, to_mapping
from mistlab.cost.confidence import bounds_of
from mistlab.economy.bill import Prices
from mistlab.economy.price_table import GpuPrice
from mistlab.machine.cluster import Cluster
from mistlab.machine.consistency import doubtful_figures
from mistlab.machine.hardware import Hardware
from mistlab.network.tiers import Tier
from tests.mistlab.test_forty_gpus import GPUS, of_figures
from tests.workloads import workload_of

REFUSED, ASKED, SOME, POSSIBLE = "refused", "refused or noted", "some noted", "possible"
GB_S_1000 = {"TB/s": 1e-3, "MB/s": 1e3}
GB_S = {**GB_S_1000, "Gb/s": 8.0}
THOUSANDS = {"PFLOP/s": 1e-3, "GFLOP/s": 1e3}
SIZES = {"TB": 2.0**-10, "MiB": 2.0**10, "bytes": 2.0**30}
TIMES = {"s": 1e-6, "ms": 1e-3, "ns": 1e3}
MIB = {"GiB": 2.0**-10, "KiB": 2.0**10, "bytes": 2.0**20}
PER_CENT = {"per cent": 100.0}

Units = Mapping[str, float]
# Figures of all GPUs and nodes, with what other units multiply them by and what becomes of them;
# what is possible on some machine, and noted by nothing, has a reason.
STATED: list[tuple[str, Units, str]] = [
    ("gpu.memory_gib", SIZES, REFUSED),
    ("gpu.memory_gbytes_per_s", {"TB/s": 1e-3, "MB/s": 1e3, "Tb/s": 8e-3}, REFUSED),
    ("gpu.memory_gbytes_per_s", {"Gb/s": 8.0}, ASKED),
    *((f"gpu.peak_tflops.{name}", THOUSANDS, REFUSED) for name in ("fp16", "bf16", "fp32")),
    *((f"gpu.peak_tflops.{name}", THOUSANDS, REFUSED) for name in ("tf32", "fp8", "fp4")),
    ("gpu.board_watts", {"kW": 1e-3, "mW": 1e3}, REFUSED),
    ("node.host_memory_gib", SIZES, REFUSED),
    ("node.intra_node_gbytes_per_s", {"TB/s": 1e-3, "TB/s both": 2e-3, "MB/s": 1e3}, REFUSED),
    # PCIe's rate in Gb/s is that of NVLink on A100, and both ways are the next generation's.
    ("node.intra_node_gbytes_per_s", {"Gb/s": 8.0, "both ways": 2.0}, SOME),
    ("node.host_link_gbytes_per_s", GB_S_1000, REFUSED),
    ("node.host_link_gbytes_per_s", {"Gb/s": 8.0}, ASKED),
    ("node.host_link_gbytes_per_s", {"both ways": 2.0}, SOME),
    ("node.inter_node_gbytes_per_s", {"MB/s": 1e3}, ASKED),
    # Networks of 10 Gb/s to 3.2 Tb/s a node are all built.
    ("node.inter_node_gbytes_per_s", {"TB/s": 1e-3, "Tb/s": 8e-3, "Gb/s": 8.0}, SOME),
    # Decimal units are 7 % off, as are GPUs of one name.
    ("gpu.memory_gib", {"GB": 2.0**30 / 1e9}, POSSIBLE),
]
LAST = "transfers.groups.0"
# Calibrated figures of one file.
MEASURED: list[tuple[str, str, Units, str]] = [
    ("h100-80gb", "compute.rates.0.tflops", THOUSANDS, REFUSED),
    ("a100-80gb", "compute.rates.4.gbytes_per_s", GB_S, REFUSED),
    ("a100-80gb", "compute.sustained", PER_CENT, REFUSED),
    ("a100-80gb", "compute.launch_us", TIMES, REFUSED),
    ("h100-80gb", f"{LAST}.host_to_device.gbytes_per_s", GB_S_1000, REFUSED),
    # Copies of all GPUs at once may reach a tenth of their links.
    ("h100-80gb", f"{LAST}.host_to_device.gbytes_per_s", {"Gb/s": 8.0}, POSSIBLE),
    ("a100-80gb", "transfers.in_node.gbytes_per_s", GB_S, REFUSED),
    ("a100-80gb", "transfers.in_node.latency_us", {"s": 1e-6, "ms": 1e-3}, REFUSED),
    # A fit of slow links has latencies up to a third of a second.
    ("a100-80gb", "transfers.in_node.latency_us", {"ns": 1e3}, POSSIBLE),
    ("a100-80gb", "transfers.in_node.largest_mib", {"KiB": 1024.0, "bytes": 2.0**20}, REFUSED),
    # Messages of a few MiB are measured too.
    ("a100-80gb", "transfers.in_node.largest_mib", {"GiB": 2.0**-10}, POSSIBLE),
    ("a100-80gb", "allocator.outside_mib", MIB, REFUSED),
    ("a100-80gb", "allocator.head_mib", {"KiB": 1024.0, "bytes": 2.0**20}, REFUSED),
    # A head of half a GiB is one of half a MiB.
    ("a100-80gb", "allocator.head_mib", {"GiB": 2.0**-10}, POSSIBLE),
    ("a100-80gb", "engines.0.half_width", PER_CENT, REFUSED),
    ("a100-80gb", "engines.0.far_half_width", PER_CENT, REFUSED),
    # A product of the slowdowns of three streams.
    ("a100-80gb", "interference.groups.1.slowdowns.0.factors.0", PER_CENT, POSSIBLE),
    ("a100-80gb", "measured_with.memory_gbytes_per_s", {"TB/s": 1e-3, "MB/s": 1e3}, REFUSED),
    # Only the memory size would tell, which a file may state anew.
    ("a100-80gb", "measured_with.memory_gbytes_per_s", {"Gb/s": 8.0}, POSSIBLE),
    ("a100-80gb", "measured_with.intra_node_gbytes_per_s", GB_S, REFUSED),
    ("a100-80gb", "measured_with.host_link_gbytes_per_s", GB_S_1000, REFUSED),
    ("a100-80gb", "measured_with.peak_tflops.fp16", THOUSANDS, REFUSED),
    ("a100-80gb", "measured_with.board_watts", {"kW": 1e-3, "mW": 1e3}, REFUSED),
    ("h100-80gb", "measured_with.inter_node_gbytes_per_s", {"Gb/s": 8.0, "MB/s": 1e3}, REFUSED),
]


def keys_of(path: str) -> list[str | int]:
    return [int(key) if key.isdecimal() else key for key in path.split(".")]


def edited(plain: Any, path: str, edit: Callable[[float], float]) -> Any:
    plain = deepcopy(plain)
    *way, last = keys_of(path)
    place = plain
    for key in way:
        place = place[key]
    place[last] = edit(place[last])
    return plain


def has(plain: Any, path: str) -> bool:
    for key in keys_of(path):
        plain = None if plain is None else plain[key]
    return plain is not None


def doubts(hardware: Hardware, **given: Any) -> tuple[str, ...]:
    gpus = hardware.node.gpus
    return doubtful_figures(Cluster(hardware=hardware, nodes=2, gpus_per_node=gpus, **given))


def outcome(plain: Any, path: str, factor: float) -> str:
    """What becomes of a file with one figure in another unit; its message names the figure."""
    name = path.rsplit(".", maxsplit=1)[-1]
    try:
        hardware = from_mapping(Hardware, edited(plain, path, lambda value: factor * value))
    except InputError as error:
        names = (name, "compute.rates", "transfers.groups")
        return "refused" if any(one in str(error) for one in names) else f"told as {error}"
    return "noted" if any(name in note for note in doubts(hardware)) else "silent"


ALLOWED = {
    REFUSED: {"refused"},
    ASKED: {"refused", "noted"},
    SOME: {"refused", "noted", "silent"},
    POSSIBLE: {"silent"},
}
PLAIN = {name: to_mapping(of_figures(name)) for name in GPUS}


@pytest.mark.parametrize(("path", "units", "expected"), STATED)
def test_figures_of_all_gpus_in_another_unit(path: str, units: Units, expected: str) -> None:
    for unit, factor in units.items():
        found = {outcome(one, path, factor) for one in PLAIN.values() if has(one, path)}
        assert found <= ALLOWED[expected], unit
        if expected in (ASKED, SOME):
            assert "noted" in found, unit


@pytest.mark.parametrize(("name", "path", "units", "expected"), MEASURED)
def test_calibrated_figures_in_another_unit(
    name: str, path: str, units: Units, expected: str
) -> None:
    plain = to_mapping(catalog.stated_hardware(name))
    for unit, factor in units.items():
        assert outcome(plain, path, factor) in ALLOWED[expected], unit


def numbers(kind: Any) -> set[str]:
    """The names of all numbers of a kind of value, and of the values in it."""
    found: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        parts = [part for one in (hint, *get_args(hint)) for part in (one, *get_args(one))]
        if any(part in (int, float) for part in parts):
            found.add(name)
        for part in parts:
            if is_dataclass(part):
                found |= numbers(part)
    return found


# Counts, shares, and figures whose other units are those of fields of the same kind.
WITHOUT_UNIT = {
    *("cores", "gpus", "gpus_in_node", "nodes", "runs", "hidden", "sequence_length", "reach"),
    *("offset", "smallest_mib", "communicator_mib"),
    *("step_bytes_a_parameter", "head_bytes_a_parameter"),
}


def test_the_tables_have_every_figure_of_a_hardware_file() -> None:
    tabled = {
        next(key for key in reversed(path.split(".")) if not key.isdecimal())
        for path in (*(path for path, *_ in STATED), *(path for _, path, *_ in MEASURED))
    }
    assert tabled | WITHOUT_UNIT == numbers(Hardware)


@pytest.mark.parametrize("name", GPUS)
def test_no_file_of_the_catalogue_is_doubted(name: str) -> None:
    assert doubts(catalog.stated_hardware(name)) == doubts(catalog.hardware(name)) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"intra_node_gbytes_per_s": 0.9}, "intra_node_gbytes_per_s is 0.9.* TB/s, give 900"),
        ({"intra_node_gbytes_per_s": 900.0}, "450 each way: give 450 if both .*112.5 if .* Gb/s"),
        ({"inter_node_gbytes_per_s": 3200.0}, "inter_node_gbytes_per_s is 3200.*400 if .* Gb/s"),
        ({"inter_node_gbytes_per_s": 0.4}, "inter_node_gbytes_per_s is 0.4.* TB/s, give 400"),
        ({"host_memory_gib": 2.0}, "host_memory_gib is 2.*2 TB are 2048"),
        ({"memory_gib": 0.08}, "memory_gib is 0.08: .* TB"),
    ],
)
def test_numbers_of_a_plan_or_an_option_in_another_unit_are_noted_at_predictions(
    given: dict[str, float], words: str
) -> None:
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8, **given)
    notes = bounds_of(workload_of("gpt3-1.3b", 2048, 32), cluster, "mistlab").notes(16)
    (note,) = doubtful_figures(cluster)
    assert note in notes
    assert re.search(words, note)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory_gib": 81920.0}, "memory_gib: 81920.0 is too large.*81,920 MiB are 80"),
        ({"host_memory_gib": 2.0**31}, "host_memory_gib: .*524,288 MiB are 512"),
    ],
)
def test_memory_of_a_plan_in_another_unit_is_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8, **given)


PRICES = {"usd_per_gpu_hour": 2.0, "watts": 700.0, "overhead": 1.1, "kg_per_kwh": 0.4}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("usd_per_gpu_hour", 250.0, "250 cents are 2.5"),
        ("usd_per_gpu_hour", 98.0, "a node of 8 for 98 is 12.25"),
        ("watts", 0.7, "0.7 kW are 700"),
        ("watts", 10_200.0, "watts of one GPU"),
        ("overhead", 110.0, "120 % are 1.2"),
        ("kg_per_kwh", 414.0, "414 g are 0.414"),
    ],
)
def test_prices_in_another_unit_are_refused(name: str, value: float, words: str) -> None:
    assert Prices(**PRICES)
    with pytest.raises(InputError, match=f"{name}.*{words}"):
        Prices(**{**PRICES, name: value})


def test_latencies_of_a_network_in_seconds_are_refused() -> None:
    with pytest.raises(InputError, match=r"latency_us: 5e-06 is too small.*0.04 ms are 40"):
        Tier(name="leaf", gpus=16, latency_us=5e-6)
    assert Tier(name="leaf", gpus=16, latency_us=0).latency_us == 0


def test_prices_of_a_table_in_cents_are_refused() -> None:
    with pytest.raises(InputError, match=r"usd_per_gpu_hour.*250 cents are 2.5"):
        GpuPrice(hardware="h100-80gb", usd_per_gpu_hour=250.0)


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        (
            "h100-80gb",
            "gpu.peak_tflops.fp8",
            500.0,
            "fp8: 500 is below 890.1, .* 0.9 times",
        ),
        ("b200-180gb", "gpu.peak_tflops.fp4", 1000.0, "fp4: 1000 is below"),
        (
            "b200-180gb",
            "compute.rates.6.tflops",
            9000.0,
            "matmul_8bit is .* above peak_tflops 4500",
        ),
        (
            "b200-180gb",
            "compute.rates.8.tflops",
            2e4,
            "matmul_4bit is .* above peak_tflops 9000",
        ),
        (
            "a100-80gb",
            "compute.rates.4.gbytes_per_s",
            2800.0,
            "the rate of memory is .* above memory_gbytes_per_s",
        ),
        (
            "a100-80gb",
            "compute.rates.2.tflops",
            2e3,
            "attention_forward is .* above peak_tflops",
        ),
        (
            "a100-80gb",
            "transfers.in_node.gbytes_per_s",
            330.0,
            "in_node moves 330 GB/s .*above the 300",
        ),
        (
            "h100-80gb",
            "transfers.across_nodes.gbytes_per_s",
            500.0,
            "across_nodes moves .*above the 400",
        ),
    ],
)
def test_figures_that_contradict_one_another_are_refused(
    name: str, path: str, value: float, words: str
) -> None:
    plain = to_mapping(catalog.stated_hardware(name))
    assert from_mapping(Hardware, plain)
    with pytest.raises(InputError, match=words):
        from_mapping(Hardware, edited(plain, path, lambda _: value))


def test_a_host_that_stands_for_gpus_has_figures_of_any_size() -> None:
    hardware = of_figures("l4-24gb")
    host = replace(hardware.gpu, cores=8, memory_gbytes_per_s=20.0)
    small = replace(hardware.node, host_memory_gib=2.0, intra_node_gbytes_per_s=0.5)
    assert doubts(replace(hardware, gpu=host, node=small)) == ()
    with pytest.raises(InputError, match=r"host_memory_gib.*2 TB are 2048"):
        replace(hardware, node=small)


def test_a_smaller_memory_or_host_link_is_no_fault_of_the_measured_figures() -> None:
    plain = to_mapping(catalog.stated_hardware("a100-80gb"))
    for path, value in (("gpu.memory_gib", 15.0), ("gpu.memory_gbytes_per_s", 900.0)):
        plain = edited(plain, path, lambda _, value=value: value)
    assert from_mapping(Hardware, plain).gpu.memory_gib == 15.0
    slow = to_mapping(catalog.stated_hardware("h100-80gb"))
    for path, value in (
        ("node.host_link_gbytes_per_s", 1.0),
        ("node.inter_node_gbytes_per_s", 10.0),
    ):
        slow = edited(slow, path, lambda _, value=value: value)
    assert from_mapping(Hardware, slow).node.host_link_gbytes_per_s == 1.0
