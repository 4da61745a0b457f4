"""A Llama 8B on forty and more GPUs, each told by the figures of its datasheet alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.job import job_from_mapping
from mistlab.machine.hardware import CALIBRATED, Hardware
from simulators.symbolic import SymbolicPredictor
from tests.sweep import sweep

# NVIDIA's from V100 and AMD's from MI210 on.
GPUS = sorted(catalog.hardware_names())
MORE = (1.3, 2.0)
FIGURES = (
    *("memory_gib", "memory_gbytes_per_s", "fp16", "bf16", "fp8", "board_watts"),
    *("host_memory_gib", "intra_node_gbytes_per_s", "inter_node_gbytes_per_s"),
    "host_link_gbytes_per_s",
)
PLAN = {
    "micro_batches": 8,
    "stages": [
        {
            "layers": 16,
            "micro_batch": 1,
            "data_parallel": 4,
            "tensor_parallel": 2,
            "zero": 2,
            "offload": {"optimizer": 1.0},
        }
    ]
    * 2,
}


def of_figures(name: str) -> Hardware:
    """The GPU without anything that was measured on it."""
    stated = catalog.stated_hardware(name)
    nothing = dict.fromkeys(CALIBRATED)
    provenance = replace(stated.provenance, **nothing)
    return replace(stated, **nothing, measured_with=None, provenance=provenance)


def with_more(hardware: Hardware, more: float) -> Iterator[tuple[str, Hardware]]:
    """The hardware with more of each figure that it has, as far as any GPU may have."""
    gpu, node = hardware.gpu, hardware.node
    for name in FIGURES:
        if hasattr(gpu.peak_tflops, name):
            if (peak := getattr(gpu.peak_tflops, name)) is not None:
                peaks = replace(gpu.peak_tflops, **{name: more * peak})
                yield name, replace(hardware, gpu=replace(gpu, peak_tflops=peaks))
        elif hasattr(gpu, name):
            yield name, replace(hardware, gpu=replace(gpu, **{name: more * getattr(gpu, name)}))
        else:
            yield name, replace(hardware, node=replace(node, **{name: more * getattr(node, name)}))


def seconds(hardware: Hardware) -> float:
    """The predicted seconds of an iteration on two nodes of eight, or more of fewer."""
    job = job_from_mapping(
        {
            "workload": {
                "model": "llama3-8b",
                "sequence_length": 2048,
                "global_batch": 32,
                "attention": "flash",
                "precision": "fp16",
            },
            "cluster": {"hardware": hardware, "nodes": 4, "gpus_per_node": 4},
            "plan": PLAN,
        }
    )
    return (
        SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan).iteration_s
    )


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("factors", sweep([(MORE[-1:],), (MORE,)], first=1))
def test_ten_figures_of_a_gpu_predict_it_and_more_of_none_takes_longer(
    name: str, factors: Sequence[float]
) -> None:
    hardware = of_figures(name)
    plain_s = seconds(catalog.with_all_groups(hardware))
    peak_s = 6 * 8.03e9 * 32 * 2048 / 16 / (hardware.gpu.peak_tflops.fp16 * 1e12)
    assert peak_s < plain_s < 1000 * peak_s
    last_s = dict.fromkeys(FIGURES, plain_s * (1 + 1e-9))
    for more in factors:
        for figure, edited in with_more(hardware, more):
            edited_s = seconds(catalog.with_all_groups(edited))
            assert edited_s <= last_s[figure], (figure, more)
            last_s[figure] = edited_s * (1 + 1e-9)


def test_there_are_forty() -> None:
    assert len(GPUS) >= 40
