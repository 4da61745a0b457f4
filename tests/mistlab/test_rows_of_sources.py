"""What rows of other people's runs say of networks, padded experts and what leaves a GPU."""

import pytest

from experiments.measured.predict_runs import RowPredictor
from experiments.runs.run_jobs import ADAPTER_GBYTES_PER_S, job_of
from experiments.runs.run_sureness import PAGEABLE, RunAnswer
from experiments.runs.runs_table import TableRow
from mistlab.job.prediction import Prediction
from tests.mistlab.test_runs import run

CELLS = {
    "engine": "Megatron-DeepSpeed",
    "hardware": "V100-32GB",
    "gpus": "8",
    "gpus_per_node": "4",
    "model": "gpt",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "ffn": "8192",
    "vocab": "50304",
    "sequence_length": "2048",
    "global_batch": "64",
    "micro_batch": "8",
    "tp": "1",
    "pp": "1",
    "zero": "1",
    "recompute": "full",
    "precision": "fp16",
}


def answer(**cells: str) -> RunAnswer:
    row = TableRow(file="t.csv", number=1, line=2, cells={**CELLS, **cells})
    (found,) = RowPredictor().answers_of([row])
    return found.answer


def predicted(**cells: str) -> Prediction:
    found = answer(**cells)
    assert found.prediction is not None, found.refused
    return found.prediction


def test_nodes_with_fewer_gpus_than_a_cloud_s_machine_have_an_adapter() -> None:
    """V100s of 16 GB are known from a cloud's nodes of eight, at 25 Gb/s."""
    asked = {"hardware": "V100-16GB", "gpus": "16", "precision": "fp16", "engine": "Megatron-LM"}
    small, whole = (
        job_of(run(**asked, gpus_per_node=count)).job.cluster.inter_node_gbytes_per_s
        for count in ("4", "8")
    )
    assert small == ADAPTER_GBYTES_PER_S
    assert whole is None


def test_padded_experts_take_as_long_as_more_experts_a_token() -> None:
    experts = {"experts": "16", "topk": "2", "engine": "FSDP2", "hardware": "H100", "zero": "3"}
    experts |= {"model": "llama3-like", "kv_heads": "16", "precision": "bf16"}
    even, padded, wide = (
        predicted(**{**experts, **more}).iteration_s
        for more in ({}, {"experts_by": "bmm over padded experts"}, {"topk": "6"})
    )
    assert even < padded
    # Between 2 of 16 and all 16, the middle in logarithms is 5.7.
    assert padded == pytest.approx(wide)


def test_inputs_of_blocks_on_the_host_leave_the_peak_and_passes_wait_for_them() -> None:
    kept = predicted()
    left = predicted(notes="checkpoints in host memory")
    inputs = 24 * 8 * 2048 * 2048 * 2
    gone = kept.stages[0].peak_allocated_bytes - left.stages[0].peak_allocated_bytes
    assert gone == pytest.approx(inputs, rel=0.1)
    # Both ways, a micro-batch of 64 / 8 / 8, at a part of 15.75 GB/s.
    waits_s = left.iteration_s - kept.iteration_s
    assert waits_s == pytest.approx(2 * gone / (PAGEABLE * 15.75e9), rel=0.01)


def test_activations_of_some_layers_on_the_host_leave_the_peak() -> None:
    peaks = [
        predicted(recompute="none", offload=offload, micro_batch="2").stages[0]
        for offload in ("none", "activations of 12 layers")
    ]
    gone = peaks[0].peak_allocated_bytes - peaks[1].peak_allocated_bytes
    assert gone == pytest.approx(peaks[0].memory.activations / 2, rel=0.01)


def test_an_answer_has_the_probability_that_it_fits_and_bounds_of_its_peak() -> None:
    found = answer(recompute="none", micro_batch="8").mapping("fullest")
    assert found["fits"] is False
    assert 0 <= found["fit_probability"] < 0.5
    low, high = found["peak_reserved_gib_low"], found["peak_reserved_gib_high"]
    assert low < found["peak_reserved_gib"] < high
