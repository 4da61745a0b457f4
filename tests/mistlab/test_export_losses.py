"""A loss in chunks in other frameworks' words: written and read back where they have words for it,
told where they have none."""

import re
from typing import Any

import pytest

from mistlab.engines.engine import ENGINES
from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.export.target import read_back
from mistlab.formats.component_recipes import read_automodel, read_torchtune
from mistlab.formats.hf_tuners import read_axolotl
from mistlab.formats.recipes.exports import EXPORTS
from mistlab.job.job import Job, job_from_mapping
from mistlab.shell.session import LaunchFile

WITH_WORDS = ("torchtitan", "torchtune", "automodel", "trl", "axolotl", "llama-factory")
WITHOUT = ("megatron", "torchtitan-toml", "megatron-bridge")
OF_SCRIPTS = ("deepspeed", "accelerate")


def job_of(loss: str, engine: str = "trainer", **workload: Any) -> Job:
    return job_from_mapping(
        {
            "workload": {
                "model": "llama3-8b",
                "sequence_length": 4096,
                "global_batch": 64,
                "attention": "flash",
                "precision": "bf16",
                "loss": loss,
                **workload,
            },
            "cluster": {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 8},
            "plan": {
                "engine": engine,
                "micro_batches": 8,
                "stages": [
                    {
                        "layers": 32,
                        "data_parallel": 8,
                        "tensor_parallel": 1,
                        "micro_batch": 1,
                        "zero": 3,
                        "checkpointed_layers": 32,
                    }
                ],
            },
        }
    )


@pytest.mark.parametrize("loss", ["whole", "chunked"])
@pytest.mark.parametrize("name", WITH_WORDS)
def test_a_loss_in_chunks_is_written_and_read_back(name: str, loss: str) -> None:
    target = EXPORTS[name]
    form = nearest(job_of(loss), target)
    text = target.write(form.job)
    assert form.job.workload.loss == loss
    assert read_back(target, text, form.job).workload.loss == loss
    assert text != target.write(
        nearest(job_of({"whole": "chunked"}.get(loss, "whole")), target).job
    )


@pytest.mark.parametrize("name", WITHOUT)
def test_a_framework_without_chunks_loses_them_and_says_so(name: str) -> None:
    form = nearest(job_of("chunked"), EXPORTS[name])
    assert form.job.workload.loss == "whole"
    (remark,) = (remark for remark in form.remarks if remark.choice == "loss")
    assert "chunked -> whole" in remark.text


@pytest.mark.parametrize("name", OF_SCRIPTS)
def test_what_a_training_script_decides_is_told(name: str) -> None:
    target = EXPORTS[name]
    assert target.notes is not None
    told, silent = (
        " ".join(target.notes(nearest(job_of(loss), target).job)) for loss in ("chunked", "whole")
    )
    assert "has to compute the loss in chunks" in told
    assert "loss" not in silent


@pytest.mark.parametrize(
    ("engine", "length"), [("trainer", 32768), ("fsdp", 131072), ("fsdp", 512)]
)
def test_torchtune_s_chunks_are_no_longer_than_predicted(engine: str, length: int) -> None:
    job = job_of("chunked", engine, sequence_length=length)
    written = re.search(r"num_output_chunks: (\d+)", EXPORTS["torchtune"].write(job))
    assert written is not None
    chunks = int(written[1])
    assert length / chunks <= ENGINES[engine].chunk_tokens
    assert chunks >= 8


JOB = job_of("whole")
GIVEN = Given(hardware=JOB.cluster.hardware, gpus_per_node=8, nodes=1, model=JOB.workload.model)
TORCHTUNE = """
model: {_component_: torchtune.models.llama3.llama3_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
dataset: {packed: true}
batch_size: 1
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.modules.loss.LOSS}
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 64, local_batch_size: 1}
model: {_target_: x.from_pretrained, pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.AdamW}
loss_fn: {_target_: nemo_automodel.components.loss.LOSS}
"""


@pytest.mark.parametrize(
    ("read", "text", "name", "loss"),
    [
        (read_torchtune, TORCHTUNE, "LinearCrossEntropyLoss", "chunked"),
        (read_torchtune, TORCHTUNE, "CEWithChunkedOutputLoss", "whole"),
        (read_automodel, AUTOMODEL, "linear_ce.FusedLinearCrossEntropy", "chunked"),
        (read_automodel, AUTOMODEL, "chunked_ce.ChunkedCrossEntropy", "whole"),
        (read_automodel, AUTOMODEL, "te_parallel_ce.TEParallelCrossEntropy", "whole"),
        (read_automodel, AUTOMODEL, "masked_ce.MaskedCrossEntropy", "whole"),
    ],
)
def test_a_loss_that_keeps_all_logits_is_whole_whatever_its_name(
    read: Any, text: str, name: str, loss: str
) -> None:
    made = read(LaunchFile(text=text.replace("LOSS", name)), GIVEN)
    assert made.job.workload.loss == loss
    told = [remark for remark in made.remarks if remark.choice == "loss"]
    assert bool(told) == (loss == "whole" and "Masked" not in name)
    # Losses that widen a chunk at a time take less than is predicted, and imports say so.
    less = "copies and gradients are of a chunk, and take half of what is predicted for logits"
    is_less = any(less in remark.text for remark in told)
    assert is_less == (loss == "whole" and "Chunked" in name)


@pytest.mark.parametrize(
    ("read", "text", "key", "meant"),
    [
        (read_torchtune, TORCHTUNE, "gradient_acumulation_steps: 8", "gradient_accumulation_steps"),
        (
            read_automodel,
            AUTOMODEL,
            "distributed: {activation_checkpoint: true}",
            "activation_checkpointing",
        ),
    ],
)
def test_a_misspelt_key_of_a_recipe_is_told(read: Any, text: str, key: str, meant: str) -> None:
    source = text.replace("LOSS", "LinearCrossEntropyLoss")
    told = [remark.text for remark in read(LaunchFile(text=source + key), GIVEN).remarks]
    plain = [remark.text for remark in read(LaunchFile(text=source), GIVEN).remarks]
    assert any(f"(did you mean {meant}?)" in line for line in told)
    assert not any("did you mean" in line for line in plain)


@pytest.mark.parametrize(
    ("read", "text", "keys", "told"),
    [
        (read_torchtune, TORCHTUNE, "custom_sharded_layers: [output]", ["custom_sharded_layers"]),
        (read_torchtune, TORCHTUNE, "seed: 3\ndevice: cuda", []),
        (read_automodel, AUTOMODEL, "magic: {much: 3}", ["magic"]),
        (read_automodel, AUTOMODEL, "rng: {seed: 3}\nrecipe: any", []),
    ],
)
def test_keys_that_a_recipe_s_import_does_not_read_are_told(
    read: Any, text: str, keys: str, told: list[str]
) -> None:
    source = text.replace("LOSS", "LinearCrossEntropyLoss")
    own, plain = (read(LaunchFile(text=one), GIVEN).remarks for one in (source + keys, source))
    assert [remark.choice for remark in own if remark not in plain] == told
    assert len(own) == len(plain) + len(told)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", []),
        ("lora_dropout: 0.0, apply_lora_to_output: false", []),
        ("lora_dropout: 0.05", ["model.lora_dropout"]),
        ("apply_lora_to_output: true", ["model.apply_lora_to_output"]),
    ],
)
def test_what_torchtune_s_adapters_have_beyond_a_plan_s_is_told(more: str, told: list[str]) -> None:
    lora = "lora_llama3_8b, lora_attn_modules: [q_proj], lora_rank: 8"
    text = TORCHTUNE.replace("LOSS", "LinearCrossEntropyLoss")
    text = text.replace("llama3_8b}", f"{lora}, {more}}}")
    remarks = read_torchtune(LaunchFile(text=text), GIVEN).remarks
    assert [remark.choice for remark in remarks if remark.kind == "ignored"] == told


def test_axolotl_s_chunked_cross_entropy_keeps_all_logits() -> None:
    text = """
base_model: meta-llama/Meta-Llama-3-8B
micro_batch_size: 1
gradient_accumulation_steps: 8
sequence_len: 4096
sample_packing: true
bf16: true
optimizer: adamw_torch_fused
chunked_cross_entropy: true
"""
    made = read_axolotl(LaunchFile(text=text), GIVEN)
    assert made.job.workload.loss == "whole"
    assert any(remark.choice == "chunked_cross_entropy" for remark in made.remarks)
