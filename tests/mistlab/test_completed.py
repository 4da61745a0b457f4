"""Hardware of datasheet figures alone: completed from the nearest calibrated GPU, and believed."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.catalog.completed import completed, nearest
from mistlab.core.files import write_yaml
from mistlab.core.values import InputError, from_mapping, to_mapping
from mistlab.job.job import hardware_from, job_from_mapping
from mistlab.machine.hardware import CALIBRATED, Gpu, Hardware, Node, can_lend, is_calibrated
from simulators.symbolic import SymbolicPredictor

DATASHEETS = sorted({*catalog.hardware_names()} - {*catalog.calibrated_names()})
# Chips that share their rates' measurements.
KIN = {"gb200": "b200", "b300": "b200", "gb300": "b200", "mi325x": "mi300x"}
FIGURES = {
    "gpu": {
        "architecture": "ampere",
        "memory_gib": 79.0,
        "memory_gbytes_per_s": 2039.0,
        "peak_tflops": {"fp16": 312.0, "bf16": 312.0, "fp32": 19.5},
        "board_watts": 400.0,
    },
    "node": {
        "gpus": 8,
        "host_memory_gib": 1024.0,
        "intra_node_gbytes_per_s": 200.0,
        "inter_node_gbytes_per_s": 50.0,
        "host_link_gbytes_per_s": 31.5,
    },
}
SOURCE = {"kind": "datasheet", "source": "somebody's datasheet"}


def of_figures() -> Hardware:
    plain = {"name": "mine", **FIGURES, "provenance": {"gpu": SOURCE, "node": SOURCE}}
    return from_mapping(Hardware, plain)


def stripped(hardware: Hardware) -> Hardware:
    nothing = dict.fromkeys(CALIBRATED)
    return replace(hardware, **nothing, provenance=replace(hardware.provenance, **nothing))


def seconds(hardware: Hardware, **stage: object) -> float:
    """Of a plan that computes, exchanges in and between nodes, and offloads."""
    plan = {"data_parallel": 4, "tensor_parallel": 4, "micro_batch": 1, "zero": 2, "layers": 16}
    chosen = {**plan, "offload": {"activations": 0.5, "optimizer": 1.0}, **stage}
    job = job_from_mapping(
        {
            "workload": {
                "model": "llama3-8b",
                "sequence_length": 4096,
                "global_batch": 32,
                "attention": "flash",
                "precision": "fp16",
            },
            "cluster": {"hardware": hardware, "nodes": 4, "gpus_per_node": 8},
            "plan": {"micro_batches": 8, "stages": [chosen] * 2},
        }
    )
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return predictor.predict(job.plan).iteration_s


def scaled(hardware: Hardware, part: str, name: str, factor: float) -> Hardware:
    old = getattr(hardware, part)
    return replace(hardware, **{part: replace(old, **{name: factor * getattr(old, name)})})


RATES = [
    ("gpu", "memory_gbytes_per_s"),
    ("gpu", "board_watts"),
    *(("node", entry.name) for entry in fields(Node) if entry.name.endswith("gbytes_per_s")),
]


@pytest.mark.parametrize(("part", "name"), RATES)
def test_every_rate_of_a_datasheet_is_believed(part: str, name: str) -> None:
    """More of it never takes longer, and half of it takes longer at once."""
    hardware = of_figures()
    times = [
        seconds(catalog.with_all_groups(scaled(hardware, part, name, factor)))
        for factor in (0.5, 1.0, 1.25)
    ]
    assert times[0] > times[1] >= times[2]


def test_its_peak_is_believed() -> None:
    hardware = of_figures()
    peaks = hardware.gpu.peak_tflops
    times = []
    for factor in (0.5, 1.0, 1.25):
        gpu = replace(hardware.gpu, peak_tflops=replace(peaks, fp16=factor * peaks.fp16))
        whole = catalog.with_all_groups(replace(hardware, gpu=gpu))
        times.append(seconds(whole, offload={"activations": 0.0}))
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[1]


@pytest.mark.parametrize("name", DATASHEETS)
def test_a_datasheet_of_the_catalogue_predicts(name: str) -> None:
    hardware = catalog.hardware(name)
    assert is_calibrated(hardware)
    assert not is_calibrated(catalog.stated_hardware(name))
    assert hardware.gpu.architecture is not None
    assert hardware.gpu.board_watts is not None
    compute, gpu = hardware.compute, hardware.gpu
    assert compute is not None
    for rate in compute.rates:
        if rate.operators == "matmul" and rate.tflops is not None:
            share = rate.tflops * compute.sustained / gpu.peak_tflops.fp16
            assert 0.3 < share < 0.95
        if rate.operators == "memory" and rate.gbytes_per_s is not None:
            assert 0.5 < rate.gbytes_per_s / gpu.memory_gbytes_per_s <= 1


def test_a_gpu_takes_the_rates_of_its_architecture_and_links_like_its_own() -> None:
    for name, rates, links in (
        ("a800-80gb", "a100-80gb", "a100-40gb"),
        ("h20-96gb", "h100-80gb", "h100-80gb"),
        ("h100-pcie-80gb", "h100-80gb", None),
        ("rtx-4090-24gb", "l4-24gb", None),
        ("mi355x-288gb", "mi325x-256gb", None),
    ):
        provenance = catalog.hardware(name).provenance
        compute, transfers = provenance.compute, provenance.transfers
        assert compute is not None
        assert transfers is not None
        assert (compute.kind, compute.source) == ("scaled", rates)
        assert links in (None, transfers.source)
    pcie = catalog.hardware("h100-pcie-80gb").provenance.transfers
    assert pcie is not None
    assert pcie.source in ("l4-24gb", "a10g-24gb")


def test_a_copy_of_a_calibrated_gpu_is_that_gpu() -> None:
    own = catalog.hardware("a100-80gb")
    again = catalog.with_all_groups(stripped(own))
    assert again.compute == own.compute
    assert seconds(again) == pytest.approx(seconds(own), rel=0.1)


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "b200-180gb", "v100-32gb", "l4-24gb"])
def test_a_calibrated_gpu_is_near_what_others_say_of_it(name: str) -> None:
    """Products with all measurements of its chip left out: within 30 % of its own rate."""
    own = catalog.hardware(name)
    chip = name.split("-", maxsplit=1)[0]
    others = [
        one
        for other in catalog.calibrated_names()
        if can_lend(one := catalog.hardware(other))
        and KIN.get(other.split("-")[0], other.split("-")[0]) != chip
    ]
    lent = completed(stripped(own), others).compute
    assert lent is not None
    assert own.compute is not None
    rates = [compute.rate("matmul").tflops for compute in (lent, own.compute)]
    assert rates[0] is not None
    assert rates[1] is not None
    ratio = rates[0] * lent.sustained / (rates[1] * own.compute.sustained)
    assert 0.75 < ratio < 1.3


def test_its_bounds_are_wider_and_a_note_says_why() -> None:
    degrees = {"data_parallel": 8, "tensor_parallel": 1, "zero": 1}
    plan = {"micro_batches": 8, "stages": [{"micro_batch": 1, "layers": 32, **degrees}]}
    work = {"model": "llama3-8b", "sequence_length": 2048, "global_batch": 64}
    answers = []
    for hardware in ("h100-80gb", "h800-80gb"):
        job = job_from_mapping(
            {
                "workload": {**work, "attention": "flash", "precision": "bf16"},
                "cluster": {"hardware": hardware, "nodes": 1, "gpus_per_node": 8},
                "plan": {**plan, "engine": "megatron-core"},
            }
        )
        predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
        answers.append(predictor.predict(job.plan))
    widths = [answer.iteration_s_high / answer.iteration_s_low for answer in answers]
    assert widths[1] > 1.2 * widths[0]
    note = "nobody measured h800-80gb: rates of h100-80gb, scaled by datasheets"
    assert note in answers[1].notes
    assert note not in answers[0].notes


def test_files_and_mappings_of_figures_are_completed_and_their_plans_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    write_yaml(to_mapping(of_figures(), omit_defaults=True), path)
    hardware = hardware_from(str(path), Path())
    assert hardware == catalog.with_all_groups(of_figures())
    assert hardware_from(to_mapping(hardware, omit_defaults=True), Path()) == hardware


def test_without_an_architecture_figures_alone_decide() -> None:
    hardware = of_figures()
    bare = replace(hardware, gpu=replace(hardware.gpu, architecture=None))
    measured = [catalog.hardware(name) for name in ("a100-80gb", "l4-24gb", "mi300x-192gb")]
    assert nearest(bare, measured).name == "a100-80gb"
    slow = scaled(bare, "node", "intra_node_gbytes_per_s", 0.15)
    assert nearest(slow, measured, by_links=True).name == "l4-24gb"


def test_an_unknown_architecture_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"architecture: .*hoper.*hopper"):
        replace(of_figures().gpu, architecture="hoper")
    assert Gpu.__dataclass_fields__["architecture"].default is None
