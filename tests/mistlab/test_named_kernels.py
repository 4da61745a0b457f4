"""Rows that name kernels, networks and what their memory counts: what each changes."""

import math

import pytest

from experiments.runs.attention_kernels import OF_ATTENTION, with_kernel
from experiments.runs.driver_memory import (
    CONNECTION_MIB,
    CONTEXT_MIB,
    WHOLE_CONTEXT_MIB,
    buffers_bytes,
    communicator_bytes,
    stages_of_node,
)
from experiments.runs.judged import judged
from experiments.runs.run_jobs import job_of
from experiments.runs.run_sureness import Doubt, Range, RunAnswer, answered
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.core.units import GIB_BYTES, MIB_BYTES
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction
from mistlab.machine.hardware import Hardware
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_finetuning_runs import run

SHARDED = {
    "engine": "PyTorch FSDP2",
    "hardware": "H100-80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "method": "",
    "zero": "fsdp",
}
# Its GPUs share adapters.
OLD = {"hardware": "V100-32GB", "engine": "Megatron-LM", "zero": "1", "precision": "fp16"}


def attention(hardware: Hardware) -> list[float]:
    assert hardware.compute is not None
    return [one.tflops or 0 for one in hardware.compute.rates if one.operators in OF_ATTENTION]


@pytest.mark.parametrize(
    ("text", "hardware", "share"),
    [
        ("FlashAttention 2", "H100-80GB", 0.64),
        ("flash_attention_3", "H100-80GB", 1.2),
        ("sdpa", "B200", 0.39),
        ("fa2", "A100-80GB", 1.0),
        ("cudnn", "H100-80GB", 1.0),
    ],
)
def test_a_named_kernel_has_its_own_rate_whatever_the_engine_has(
    text: str, hardware: str, share: float
) -> None:
    own = run(**{**SHARDED, "hardware": hardware, "attention_kernel": text})
    job = job_of(own).job
    kept = ENGINES[own.engine].shares(own.gpus.hardware)[1]
    of_file = attention(catalog.hardware(own.gpus.hardware))
    reached = [rate * kept for rate in attention(job.cluster.hardware)]
    assert reached == pytest.approx([share * rate for rate in of_file])


def test_without_a_name_rates_are_the_file_s() -> None:
    hardware = catalog.hardware("h100-80gb")
    assert with_kernel(hardware, "", 0.4) is hardware
    assert run(**SHARDED, attention_kernel="written out").attention == "math"


# Attention forward and backward on A100 by FlashAttention 2's paper, in TFLOP/s by tokens.
PAPER = {4096: 173, 8192: 182, 16384: 189}


@pytest.mark.parametrize("tokens", PAPER)
def test_long_sequences_have_the_rates_of_flash_attention_2_s_paper(tokens: int) -> None:
    hardware = catalog.hardware("a100-80gb")
    of_file = attention(hardware)
    for kernel in ("", "flash2", "sdpa"):
        reached = attention(with_kernel(hardware, kernel, 1.0, tokens))
        more = PAPER[tokens] / PAPER[4096]
        assert reached == pytest.approx([more * rate for rate in of_file], rel=0.01)
    # Files have the rates of sequences up to 4,096 tokens.
    assert attention(with_kernel(hardware, "flash2", 1.0, 512)) == of_file


def test_attention_by_other_kernels_does_not_grow_with_the_sequence() -> None:
    a100, h100 = map(catalog.hardware, ("a100-80gb", "h100-80gb"))
    for hardware, kernel, share in ((a100, "triton", 0.7), (a100, "", 0.7), (h100, "flash2", 1.0)):
        short, long = (with_kernel(hardware, kernel, share, count) for count in (1024, 1 << 17))
        assert short == long


def test_a_run_s_rate_of_attention_is_that_of_its_sequences() -> None:
    short, long = (
        attention(job_of(run(engine="HF PEFT", sequence_length=text)).job.cluster.hardware)
        for text in ("4096", "65536")
    )
    assert [b / a for a, b in zip(short, long, strict=True)] == pytest.approx([1.12] * 2, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "gbytes_per_s"),
    [
        ({"network": "4x100 Gb/s RoCE"}, 50.0),
        ({"network": "400 Gb/s a GPU"}, 400.0),
        ({"network": "200 Gbps"}, 25.0),
        ({"notes": "4x200 Gb/s RDMA a node"}, 100.0),
        ({"gpus_per_node": "4"}, 200.0),
        ({}, None),
        ({**OLD, "gpus_per_node": "4"}, None),
    ],
)
def test_a_network_is_what_a_row_says(cells: dict[str, str], gbytes_per_s: float | None) -> None:
    cluster = job_of(run(**{**SHARDED, **cells})).job.cluster
    assert cluster.inter_node_gbytes_per_s == gbytes_per_s


@pytest.mark.parametrize(
    ("engine", "more", "name"),
    [
        ("HF Transformers + DeepSpeed", {"zero": "2"}, "deepspeed-trainer"),
        ("Megatron-DeepSpeed", {"zero": "1"}, "deepspeed-pipe"),
        ("Megatron-DeepSpeed", {"zero": "3"}, "deepspeed"),
        ("llm.c (C/CUDA)", {}, "trainer-c"),
        ("torchtune", {"notes": "torch.compile; compile"}, "fsdp-compiled-blocks"),
        ("torchtune", {"notes": "torch.compile; chunked loss"}, "fsdp-compiled"),
        ("prime-rl (PyTorch FSDP2)", {"notes": "torch.compile; sft"}, "fsdp-compiled-blocks"),
        ("PyTorch FSDP2", {"compiled": "no"}, "fsdp-eager"),
        ("KempnerForge (PyTorch FSDP2)", {"tp": "2", "gpus": "2"}, None),
    ],
)
def test_who_runs_a_model_s_own_operators_is_known(
    engine: str, more: dict[str, str], name: str | None
) -> None:
    found = run(engine=engine, method="", **more)
    assert found.engine == name or (name is None and found.engine.endswith("-whole-logits"))


def predicted(**cells: str) -> Prediction:
    job = job_of(run(**{**SHARDED, **cells})).job
    return SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)


def _peak(one: Prediction) -> int:
    return one.stages[0].peak_allocated_bytes


def test_ranks_that_split_no_logits_hold_those_of_the_others_too() -> None:
    cells = {"notes": "torch.compile", "tp": "4", "micro_batch": "4", "global_batch": "16"}
    cells |= {"precision": "bf16 (all)"}
    split = predicted(**cells)
    whole = predicted(**cells, engine="KempnerForge (PyTorch FSDP2)")
    wide = ENGINES["fsdp-compiled-blocks"].memory["bf16"].wide_logits
    of_rank = split.stages[0].memory.logits
    assert of_rank == pytest.approx(2 * 4 * 2048 * 128256 / 4, rel=0.05)
    more = _peak(whole) - _peak(split)
    assert more == pytest.approx((1 + wide) * of_rank * 3, rel=1e-3)


def test_a_driver_counts_the_context_and_communicators_too() -> None:
    cells = {"memory_gib": "30", "step_s": "1", "tp": "2"}
    found = job_of(run(**SHARDED, **cells))
    one = SymbolicPredictor(workload=found.job.workload, cluster=found.job.cluster)
    answer = answered(one.predict(found.job.plan), found)

    def gib(kind: str, date: str = "") -> float:
        kinds = {"memory_kind": kind, "date": date}
        row = TableRow(file="runs.csv", number=1, line=2, cells={**SHARDED, **cells, **kinds})
        return judged(row, answer).predicted_gib or math.nan

    # Of tensor ranks, data ranks and all: 24 channels of a ring and two neighbours in a tree.
    mib = CONTEXT_MIB + 3 * 24 * 3 * CONNECTION_MIB
    outside = mib * MIB_BYTES / GIB_BYTES
    assert gib("nvidia-smi, rounded") - gib("reserved") == pytest.approx(outside)
    # Before torch 1.13 a process has all kernels on its GPU.
    old, new = (gib("nvidia-smi", date) for date in ("2022-10", "2022-11"))
    assert (old - new) * GIB_BYTES == pytest.approx((WHOLE_CONTEXT_MIB - CONTEXT_MIB) * MIB_BYTES)


def test_channels_and_communicators_are_those_of_links_and_stages() -> None:
    cells = {**SHARDED, "zero": "0", "gpus": "24", "pp": "3", "layers": "24"}
    job = job_of(run(**{**cells, "engine": "Megatron-LM"})).job
    each = communicator_bytes(job.cluster)
    # All, data ranks, a replica's norm, each neighbour; and the ends, which share a table.
    assert [size / each for size in buffers_bytes(job)] == pytest.approx([5, 5, 5])
    assert stages_of_node(job) == 1
    pair = job_of(run(**{**cells, "engine": "Megatron-LM", "gpus": "6"})).job
    assert stages_of_node(pair) == 3
    old = job_of(run(**{**SHARDED, **OLD, "zero": "0"})).job.cluster
    assert communicator_bytes(old) == each / 2


def test_tokens_a_second_stand_for_seconds() -> None:
    around = Range(least_s=1.0, longest_s=1.0, way=1.0)
    doubt = Doubt(kind=job_of(run()).kind, gpus=8, range=around)
    answer = RunAnswer(doubt=doubt, sequences=16)
    cells = {"sequence_length": "2048", "tokens_per_s_per_gpu": "1024"}
    row = TableRow(file="runs.csv", number=1, line=2, cells=cells)
    assert judged(row, answer).measured_s == pytest.approx(4.0)


def test_without_a_degree_within_experts_as_many_ranks_have_unlike_experts_as_said() -> None:
    cells = {"model": "mixtral-8x7b", "tp": "2", "ep": "8", "gpus": "8", "method": ""}
    found = run(engine="Megatron-LM", **cells)
    assert (found.expert_parallel, found.expert_tensor_parallel) == (8, 1)
    roomy = run(engine="Megatron-LM", **{**cells, "gpus": "16"})
    assert (roomy.expert_parallel, roomy.expert_tensor_parallel) == (8, 2)


def test_adapters_beside_products_of_8_bits_are_predicted() -> None:
    cells = {"engine": "Megatron-Bridge", "zero": "1", "notes": "lora", "precision": "fp8"}
    assert predicted(**cells).iteration_s > 0
