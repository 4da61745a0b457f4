"""What a hardware file states is believed: an edit of any figure moves predictions, or is told."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError, from_mapping, to_mapping
from mistlab.cost.confidence import bounds_of, half_width_at
from mistlab.cost.kernels import slowdowns_of_group
from mistlab.cost.memory import room_bytes
from mistlab.cost.side_by_side import factors_of, overlapped
from mistlab.job.job import job_from_mapping
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from simulators.symbolic import SymbolicPredictor
from tests.sweep import sweep
from tests.workloads import workload_of

Path = tuple[str | int, ...]
# Names of shapes and of the places of measured runs, and what is kept for readers alone. 16-bit
# curves are measured with one peak: those of bf16, fp32 and TF32 count by the stated peaks.
DOUBLINGS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)
KEYS = ("gpus_in_node", "nodes", "smallest_mib", "largest_mib", "runs", "at")
NOT_READ = tuple(("measured_with", "peak_tflops", name) for name in ("bf16", "fp32", "tf32"))
OFFLOAD = {"weights": 0.5, "gradients": 0.5, "optimizer": 1.0, "activations": 0.5}


def leaves(plain: Any, path: Path = ()) -> Iterator[Path]:
    """The places of all figures."""
    if isinstance(plain, dict | list):
        for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            if key not in KEYS and (*path, key) not in NOT_READ:
                yield from leaves(value, (*path, key))
    elif isinstance(plain, int | float) and not isinstance(plain, bool):
        yield path


@cache
def plain_of(name: str) -> dict[str, Any]:
    return to_mapping(catalog.stated_hardware(name), omit_defaults=True)


def at(plain: Any, path: Path) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def edited(name: str, path: Path, factor: float) -> Hardware:
    plain = deepcopy(plain_of(name))
    holder, old = at(plain, path[:-1]), at(plain, path)
    new = old * factor or 10.0
    holder[path[-1]] = max(1, round(new)) if isinstance(old, int) else new
    return catalog.with_all_groups(from_mapping(Hardware, plain))


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "gpt3-1.3b", "attention": "flash", "precision": "fp16"},
    "written out": {"model": "gpt3-1.3b", "attention": "math", "precision": "fp16"},
    "of 32 bits": {"model": "gpt3-1.3b", "attention": "math", "precision": "fp32"},
    "of TF32": {"model": "gpt3-1.3b", "attention": "math", "precision": "tf32"},
    "bf16": {"model": "gpt3-1.3b", "attention": "flash", "precision": "bf16"},
    "experts": {"model": "qwen3-30b-a3b", "attention": "flash", "precision": "fp16"},
    "experts of 8 bits": {"model": "qwen3-30b-a3b", "attention": "flash", "precision": "fp8"},
    "8 bits": {"model": "llama3-8b", "attention": "flash", "precision": "fp8"},
    "4 bits": {"model": "llama3-8b", "attention": "flash", "precision": "fp4"},
    "scans": {"model": "nemotron-h-8b", "attention": "flash", "precision": "bf16"},
}


def answers(
    hardware: Hardware, kind: str, engine: str, shape: tuple[int, int], **stage: Any
) -> tuple[Any, ...]:
    """All that is predicted of a plan over so many GPUs of so many nodes."""
    gpus, nodes = shape
    ranks = gpus * nodes
    layers = catalog.model(MODELS[kind]["model"]).layers
    one = {"layers": layers, "data_parallel": ranks, "tensor_parallel": 1, "micro_batch": 1}
    job = job_from_mapping(
        {
            "workload": {**MODELS[kind], "sequence_length": 2048, "global_batch": 2 * ranks},
            "cluster": {"hardware": hardware, "nodes": nodes, "gpus_per_node": gpus},
            "plan": {"engine": engine, "micro_batches": 2, "stages": [{**one, **stage}]},
        }
    )
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    found = predictor.predict(job.plan)
    memory = room_bytes(job.cluster), job.cluster.host_memory_bytes
    return replace(found, notes=()), *memory


def moves(name: str, path: Path) -> bool:
    """Whether an edit to half, or to a fifth more, moves any of the answers or is refused."""
    for factor in (1.2, 0.5):
        try:
            other = edited(name, path, factor)
            for question in questions(name, path):
                if question(catalog.hardware(name)) != question(other):
                    return True
        except InputError:
            return True
    return False


def _without_curves(name: str) -> set[str]:
    """The figures of ``measured_with`` that no measured curve of a file depends on."""
    plain = plain_of(name)
    network = any(group["nodes"] > 1 for group in plain["transfers"]["groups"])
    rates = {rate["operators"] for rate in plain["compute"]["rates"]}
    narrow = {"fp8": "matmul_8bit", "fp4": "matmul_4bit"}
    unread = {precision for precision, operators in narrow.items() if operators not in rates}
    return unread if network else {*unread, "inter_node_gbytes_per_s"}


def is_read(name: str, path: Path) -> bool:
    """Whether a prediction reads a figure: copies count by groups of one node, where there are
    any; a figure of ``measured_with`` counts where the file has curves that were measured with it.
    """
    if path[0] == "measured_with":
        return path[-1] not in _without_curves(name)
    if path[-2] not in ("host_to_device", "device_to_host") or path[1] != "groups":
        return True
    groups = plain_of(name)["transfers"]["groups"]
    nodes = [group["nodes"] for group in groups if path[-2] in group]
    return at(groups, path[2:3])["nodes"] == min(nodes)


def questions(name: str, path: Path) -> Iterator[Any]:
    """Questions whose answers may depend on a figure, the likeliest first."""
    room = path[0]
    shape = (min(2, catalog.stated_hardware(name).node.gpus), 2)
    if room == "interference":
        group = at(plain_of(name), path[:3])
        yield lambda hardware: slots_of(hardware, group["gpus_in_node"], group["nodes"])
        return
    if room == "engines":
        yield lambda hardware: [
            half_width_at(one, doublings) for one in hardware.engines for doublings in DOUBLINGS
        ]
        return
    if room == "transfers" and path[1] == "groups":
        group = at(plain_of(name), path[:3])
        shape = group["gpus_in_node"], group["nodes"]
    stages: list[tuple[str, str, dict[str, Any]]] = [
        ("dense", "mistlab", {"zero": 3, "offload": OFFLOAD}),
        ("dense", "mistlab", {}),
        ("written out", "megatron", {}),
        ("dense", "deepspeed", {"zero": 1}),
    ]
    precisions = catalog.stated_hardware(name).gpu.peak_tflops
    if precisions.bf16:
        stages += [("bf16", "megatron-core", {}), ("scans", "megatron-core", {})]
    stages.append(("experts", "megatron-core", {"expert_parallel": shape[0] * shape[1]}))
    if precisions.fp8:
        stages += [("8 bits", "megatron-core", {}), ("experts of 8 bits", "megatron-core", {})]
    if precisions.fp4:
        stages.append(("4 bits", "megatron-core", {}))
    stages += [
        (kind, "mistlab", {}) for kind in ("of 32 bits", "of TF32")[: 1 + bool(precisions.tf32)]
    ]
    for kind, engine, stage in stages:
        yield lambda hardware, of=(kind, engine), stage=stage: answers(
            hardware, *of, shape, **stage
        )
    pair = {"layers": 12, "data_parallel": shape[0]}
    yield lambda hardware: piped(hardware, 1, [pair] * 2)
    yield lambda hardware: piped(hardware, 2, [pair] * 2)
    whole = catalog.stated_hardware(name).node.gpus
    yield lambda hardware: answers(hardware, "dense", "mistlab", (whole, 1))


def piped(hardware: Hardware, nodes: int, stages: list[dict[str, Any]]) -> Any:
    """A pipeline of two stages, in a node or in one each."""
    gpus = sum(stage["data_parallel"] for stage in stages) // nodes
    if gpus > hardware.node.gpus:
        return None
    batch = 4 * stages[0]["data_parallel"]
    common = {"tensor_parallel": 1, "micro_batch": 1}
    job = job_from_mapping(
        {
            "workload": {**MODELS["dense"], "sequence_length": 2048, "global_batch": batch},
            "cluster": {"hardware": hardware, "nodes": nodes, "gpus_per_node": gpus},
            "plan": {"micro_batches": 4, "stages": [{**stage, **common} for stage in stages]},
        }
    )
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return replace(predictor.predict(job.plan), notes=())


def slots_of(hardware: Hardware, gpus_in_node: int, nodes: int) -> list[float]:
    """How long streams of many lengths take side by side in a group of this shape."""
    assert hardware.interference is not None
    group = slowdowns_of_group(hardware.interference, gpus_in_node=gpus_in_node, nodes=nodes)
    lengths = np.random.default_rng(0).exponential(1.0, (400, 4))
    lengths[:200] *= np.random.default_rng(1).random((200, 4)) < 0.6
    seconds: list[float] = overlapped(lengths, factors_of(group)).tolist()
    return seconds


ALL = [
    (name, path)
    for name in catalog.hardware_names()
    for path in leaves(plain_of(name))
    if is_read(name, path)
]
DRAWN = np.random.default_rng(0).permutation(len(ALL))


@pytest.mark.parametrize("number", sweep(DRAWN.tolist(), first=40))
def test_an_edit_of_any_figure_moves_a_prediction(number: int) -> None:
    name, path = ALL[number]
    assert moves(name, path), (name, path, at(plain_of(name), path))


STATED = [
    ("gpu", "memory_gbytes_per_s"),
    ("gpu", "board_watts"),
    ("gpu", "peak_tflops"),
    ("node", "intra_node_gbytes_per_s"),
    ("node", "inter_node_gbytes_per_s"),
    ("node", "host_link_gbytes_per_s"),
]


@pytest.mark.parametrize(("part", "figure"), STATED)
def test_half_of_a_stated_figure_of_a_measured_gpu_takes_longer_and_is_told(
    part: str, figure: str
) -> None:
    own = catalog.hardware("h100-80gb")
    other = edited_part(own, part, figure)
    nodes = 1 if "intra_node" in figure else 2
    # Beside copies a slower product may end a slot sooner: copies slow one another down less.
    stage = {"zero": 3, "offload": {"optimizer": 1.0, "weights": 0.5} if "host" in figure else {}}
    before, after = (
        answers(hardware, "dense", "mistlab", (8, nodes), **stage)[0] for hardware in (own, other)
    )
    assert after.iteration_s > before.iteration_s
    work = workload_of("gpt3-1.3b", 2048, 32)
    bounds, scaled = (bounds_of(work, cluster(one), "mistlab") for one in (own, other))
    assert scaled.around(16, 0.3)[1] > bounds.around(16, 0.3)[1]
    (note, *_) = scaled.notes(16)
    assert figure in note
    assert "scaled" in note


def edited_part(hardware: Hardware, part: str, figure: str) -> Hardware:
    of = getattr(hardware, part)
    value = getattr(of, figure)
    half = (
        replace(value, fp16=value.fp16 / 2, bf16=value.bf16 / 2)
        if figure == "peak_tflops"
        else value / 2
    )
    return catalog.with_all_groups(replace(hardware, **{part: replace(of, **{figure: half})}))


def cluster(hardware: Hardware) -> Cluster:
    return Cluster(hardware=hardware, nodes=2, gpus_per_node=8)


def test_curves_without_the_figures_of_their_measurement_win_and_that_is_told() -> None:
    own = replace(catalog.hardware("h100-80gb"), measured_with=None)
    node = replace(own.node, inter_node_gbytes_per_s=50.0)
    other = catalog.with_all_groups(replace(own, node=node))
    assert other.transfers == own.transfers
    (note, *_) = bounds_of(workload_of("gpt3-1.3b", 2048, 32), cluster(other), "mistlab").notes(16)
    assert "whatever gpu and node state" in note
    assert "measured_with" in note


def test_curves_are_scaled_once() -> None:
    other = edited_part(catalog.hardware("l4-24gb"), "node", "intra_node_gbytes_per_s")
    assert catalog.with_all_groups(other) == other


@pytest.mark.parametrize(
    ("place", "value", "remedy"),
    [
        ("gpu.memory_gib", 81920.0, "81,920 MiB are 80"),
        ("gpu.memory_gbytes_per_s", 3.35, "3.35 TB/s are 3350"),
        ("gpu.peak_tflops.fp16", 0.989, "0.989 PFLOP/s are 989"),
        ("node.inter_node_gbytes_per_s", 3200.0, "3200 Gb/s are 400"),
        ("node.intra_node_gbytes_per_s", 0.45, "of one direction"),
        ("gpu.memory_gbytes_per_s", 0.0, "0.0 is too small: .*above 0, GB/s .3.35 TB/s are 3350"),
        ("gpu.peak_tflops.fp16", 0.0, "0.0 is too small: .*above 0, TFLOP/s"),
        ("node.intra_node_gbytes_per_s", 0.0, "0.0 is too small: .*above 0, GB/s of one direction"),
        ("node.inter_node_gbytes_per_s", 0.0, "0.0 is too small: .*no network any rate"),
        ("node.host_link_gbytes_per_s", 0.0, "0.0 is too small: .*above 0, .*PCIe 5.0 x16 has 63"),
    ],
)
def test_figures_of_another_unit_are_asked_back_by_name(
    place: str, value: float, remedy: str
) -> None:
    plain = deepcopy(plain_of("l4-24gb"))
    *path, last = place.split(".")
    at(plain, tuple(path))[last] = value
    with pytest.raises(InputError, match=f"{place}.*{remedy}"):
        from_mapping(Hardware, plain)


@pytest.mark.parametrize(
    ("path", "factor", "words"),
    [
        (("compute", "rates", 0, "tflops"), 3.0, "matmul is .* above peak_tflops 121"),
        (("transfers", "groups", 0, "all_gather", "gbytes_per_s"), 20.0, "all_gather moves"),
        (("transfers", "groups", 0, "host_to_device", "gbytes_per_s"), 9.0, "host_to_device moves"),
    ],
)
def test_curves_above_the_stated_figures_are_refused(path: Path, factor: float, words: str) -> None:
    with pytest.raises(InputError, match=f"{words}.*measured_with"):
        edited("l4-24gb", path, factor)
