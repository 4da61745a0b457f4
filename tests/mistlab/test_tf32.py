"""Precisions of 32 bits, fp32 and TF32: engines, GPUs, launch files and the engine ``ddp``."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.kernels import slowdown_of
from mistlab.engines.engine import ENGINES, SINGLE
from mistlab.export.nearest import nearest
from mistlab.export.target import Target, read_back
from mistlab.export.targets import TARGETS
from mistlab.formats.recipes.trainer_recipes import AXOLOTL, LLAMA_FACTORY, TRL
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.launch_files import imported
from tests.workloads import workload_of

BERT = workload_of("bert-large", 512, 64, "fp32", attention="math")
TORCH = ["ddp", "trainer", *(name for name in ENGINES if name.startswith("fsdp"))]


def job(
    precision: str, hardware: str = "a100-40gb", engine: str = "ddp", *, overlaps: bool = False
) -> Job:
    plan = Plan.of_one_gpu(24, 8, engine, {}, replicas=8)
    return Job(
        workload=replace(BERT, precision=precision),  # type: ignore[arg-type]
        cluster=Cluster(hardware=catalog.hardware(hardware), nodes=1, gpus_per_node=8),
        plan=replace(plan, overlap_communication=overlaps),
    )


def seconds(made: Job) -> float:
    predictor = SymbolicPredictor(workload=made.workload, cluster=made.cluster)
    return predictor.predict(made.plan).iteration_s


@pytest.mark.parametrize("engine", TORCH)
def test_in_32_bits_there_is_no_copy_of_weights(engine: str) -> None:
    row = ENGINES[engine]
    for precision in SINGLE:
        memory = row.memory_in(precision)
        assert (memory.weight, memory.gradient, memory.optimizer) == (4, 4, 8)
        assert memory.wide_logits <= 2
        assert row.step_moved_in(precision) == 44
    assert row.memory["fp32"] == row.memory["tf32"]


@pytest.mark.parametrize("name", sorted(catalog.hardware_names()))
def test_gpus_have_tf32_by_their_architecture(name: str) -> None:
    """NVIDIA's from Ampere on, between 16 bits and 32, and AMD's third generation alone."""
    gpu = catalog.hardware(name).gpu
    with_it = {"ampere", "ampere-graphics", "ada", "hopper", "blackwell", "blackwell-graphics"}
    assert gpu.has("tf32") == (gpu.architecture in {*with_it, "cdna3"})
    if (peak := gpu.peak_tflops.tf32) is not None:
        assert gpu.peak_tflops.fp32 <= peak <= gpu.peak_tflops.fp16
        assert slowdown_of(gpu.peak_tflops, "tf32") == pytest.approx(2, rel=0.02)


def test_a_gpu_without_tf32_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"workload.precision: tf32 is not supported by GPU v100-16gb: give fp16 or fp32",
    ):
        job("tf32", "v100-16gb")


def test_tf32_takes_the_bytes_of_32_bits_and_products_of_half_16_bits() -> None:
    """On an A100 a product in 32 bits takes 16 times as long as in 16, in TF32 twice."""
    full, tensor, half = (seconds(job(one)) for one in ("fp32", "tf32", "bf16"))
    assert 2.5 < full / tensor < 8
    assert 1 < tensor / half < 2
    fits = [
        SymbolicPredictor(workload=one.workload, cluster=one.cluster).predict(one.plan)
        for one in (job("fp32"), job("tf32"))
    ]
    assert fits[0].peak_reserved_bytes == fits[1].peak_reserved_bytes


def test_one_bucket_reduces_gradients_after_the_backward_pass() -> None:
    """Their time is added; beside the backward pass only a part of it."""
    bare = seconds(
        replace(
            job("fp32"),
            workload=replace(BERT, global_batch=8),
            plan=Plan.of_one_gpu(24, 8, "ddp", {}),
        )
    )
    after, beside = seconds(job("fp32")), seconds(job("fp32", overlaps=True))
    assert bare < beside < after
    gradients = 4 * 24 * 12 * 1024**2
    assert after - bare > gradients / catalog.hardware("a100-40gb").node.intra_node_bytes_per_s


def test_replicas_of_whole_models_shard_nothing() -> None:
    with pytest.raises(InputError, match=r"zero: 1, but engine ddp"):
        replace(job("fp32"), plan=Plan.of_one_gpu(24, 8, "ddp", {"zero": 1}, replicas=8))


RECIPE = "model_name_or_path: gpt2\noutput_dir: x\nper_device_train_batch_size: 4\n"


@pytest.mark.parametrize(
    ("more", "precision"),
    [
        ("", "fp32"),
        ("bf16: false\nfp16: false\ntf32: false\n", "fp32"),
        ("bf16: false\nfp16: false\ntf32: true\n", "tf32"),
        ("tf32: true\n", "tf32"),
        ("bf16: true\ntf32: true\n", "bf16"),
    ],
)
def test_the_trainer_s_tf32_counts_in_32_bits_alone(more: str, precision: str) -> None:
    made = imported(RECIPE + more, gpus_per_node=4, sequence_length=1024).job
    assert made.workload.precision == precision


@pytest.mark.parametrize("target", [TRL, AXOLOTL, LLAMA_FACTORY], ids=lambda one: one.name)
@pytest.mark.parametrize("precision", SINGLE)
def test_recipes_say_tf32(target: Target, precision: str) -> None:
    made = nearest(job(precision, engine="fsdp", overlaps=True), target)
    assert made.job.workload.precision == precision
    text = target.write(made.job)
    assert "bf16: false" in text
    assert "fp16: false" in text
    assert ("tf32: true" in text) == (precision == "tf32")
    assert read_back(target, text, made.job).workload.precision == precision


@pytest.mark.parametrize("name", ["accelerate", "megatron", "deepspeed", "torchtitan"])
def test_files_without_a_key_for_tf32_get_32_bits_and_a_remark(name: str) -> None:
    llama = workload_of("llama-1.3b", 1024, 64, "tf32")
    plain = replace(job("tf32", engine="fsdp", overlaps=True), workload=llama)
    made = nearest(plain, TARGETS[name])
    assert made.job.workload.precision == "fp32"
    assert "tf32 -> fp32" in next(one.text for one in made.remarks if one.choice == "precision")
