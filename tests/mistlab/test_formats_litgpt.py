"""LitGPT's files and lines: adapters by switches of layers, and what one GPU and several do."""

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Imported
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

FULL = """
checkpoint_dir: checkpoints/Qwen/Qwen3-8B
precision: bf16-true
devices: 4
num_nodes: 1
data: {class_path: litgpt.data.Alpaca2k}
train: {global_batch_size: 64, micro_batch_size: 4, max_seq_length: 512, epochs: 1}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-4}}
"""
LORA = FULL.replace("devices: 4", "devices: 1\nlora_r: 32\nlora_query: true\nlora_value: true")
LINE = "litgpt finetune_lora Qwen/Qwen3-8B --train.micro_batch_size 2 --train.max_seq_length 512\n"


def adapted(found: Imported) -> tuple[object, ...]:
    work = found.job.workload
    return (work.train, work.base, work.adapter_rank, work.adapter_targets)


def test_several_gpus_shard_all_and_recompute_all() -> None:
    assert format_of(source_of(FULL, "a.yaml")).name == "litgpt"
    found = imported(FULL, "a.yaml")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.train, work.states, work.precision) == ("all", "16bit", "bf16")
    assert (work.sequence_length, work.global_batch) == (512, 64)
    assert (stage.zero, stage.data_parallel, stage.checkpointed_layers) == (3, 4, 36)
    assert (stage.micro_batch, found.job.plan.micro_batches) == (4, 4)
    assert found.job.plan.engine == "trainer-loop"
    assert not texts(found, "ignored")


def test_one_gpu_keeps_activations() -> None:
    found = imported(LORA, "a.yaml")
    (stage,) = found.job.plan.stages
    assert (stage.zero, stage.data_parallel, stage.checkpointed_layers) == (0, 1, 0)
    assert "zero" not in texts(found, "assumed")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("", ("adapters", "16bit", 32, "attention")),
        ("lora_mlp: true", ("adapters", "16bit", 32, "all")),
        ("quantize: bnb.nf4-dq", ("adapters", "4bit", 32, "attention")),
        ("quantize: bnb.int8-training", ("adapters", "8bit", 32, "attention")),
    ],
)
def test_switches_name_the_layers_with_adapters(more: str, what: tuple[object, ...]) -> None:
    found = imported(f"{LORA}{more}\n", "a.yaml")
    assert adapted(found) == what
    if what[-1] == "attention":
        assert "q_proj v_proj" in texts(found, "assumed")["lora_target"]


def test_a_line_has_defaults_of_its_program() -> None:
    assert adapted(imported(LINE, "a.sh")) == ("adapters", "16bit", 8, "attention")
    whole = imported(LINE.replace("_lora", "_full"), "a.sh")
    assert (whole.job.workload.train, whole.job.workload.global_batch) == ("all", 16)
    line = f"{LINE.strip()} --config a.yaml --devices 2\n"
    named = imported(line, "a.sh", files={"a.yaml": LORA})
    assert adapted(named) == ("adapters", "16bit", 32, "attention")
    assert named.job.cluster.gpus_per_node == 2
    assert named.job.plan.stages[0].micro_batch == 2


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("max_seq_length: 512, ", "", "max_seq_length: is not given.*give --sequence-length"),
        ("devices: 1", "devices: auto", "devices: auto .*give --gpus-per-node"),
        ("bf16-true", "bf15", "precision: 'bf15' is unknown: give bf16-true"),
        ("devices: 1", "devices: 2\nquantize: bnb.nf4", "on one GPU alone: give devices 1"),
        ("devices: 1", "devices: 1\nquantize: gptq", "quantize: gptq is not supported"),
    ],
)
def test_what_litgpt_cannot_run_is_refused(was: str, now: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        imported(LORA.replace(was, now), "a.yaml")


def test_precisions_are_lightning_s() -> None:
    mixed = imported(FULL.replace("bf16-true", "16-mixed"), "a.yaml").job.workload
    assert (mixed.precision, mixed.states) == ("fp16", "mixed")
    single = imported(FULL.replace("bf16-true", "32-true"), "a.yaml").job.workload
    assert single.precision == "fp32"
    assert texts(imported(f"{LORA}lora_head: true\n", "a.yaml"), "ignored")["lora_head"]
