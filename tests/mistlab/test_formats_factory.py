"""LLaMA-Factory's version 1: its sections, and its defaults."""

import pytest

from mistlab.core.values import InputError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

NEW = """
model: Qwen/Qwen3-4B
model_class: llm
train_dataset: rows.yaml
dist_config: {name: fsdp2, dcp_path: null}
micro_batch_size: 2
cutoff_len: 4096
"""


def test_version_1_of_llama_factory_has_defaults_of_its_own() -> None:
    assert format_of(source_of(NEW, "a.yaml")).name == "llama-factory"
    found = imported(NEW, gpus_per_node=8)
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.model.name, work.sequence_length, work.global_batch) == ("qwen3-4b", 4096, 16)
    assert (work.precision, work.states, work.train) == ("bf16", "16bit", "all")
    assert (stage.zero, stage.micro_batch, stage.checkpointed_layers) == (3, 2, 36)
    assert not texts(found, "ignored")
    bare = imported(NEW.replace("micro_batch_size: 2\ncutoff_len: 4096\n", ""), gpus_per_node=8)
    assert bare.job.plan.stages[0].micro_batch == 1
    assert bare.job.workload.sequence_length == 2048


def test_its_batch_and_its_switches_are_read() -> None:
    more = "global_batch_size: 64\nenable_activation_checkpointing: false\nbf16: false\n"
    found = imported(NEW + more, gpus_per_node=8)
    (stage,) = found.job.plan.stages
    assert (found.job.plan.micro_batches, found.job.workload.global_batch) == (4, 64)
    assert (stage.checkpointed_layers, found.job.workload.precision) == (0, "fp32")
    split = imported(f"{NEW}cp_size: 2\nbatching_strategy: padding_free\n", gpus_per_node=8)
    (stage,) = split.job.plan.stages
    assert (stage.context_parallel, stage.context_exchange, stage.data_parallel) == (2, 2, 4)
    assert "sequences" not in texts(split, "assumed")
    muon = imported(f"{NEW}optim_config: {{name: muon, wd: 0.1}}\n", gpus_per_node=8)
    assert "muon is predicted as AdamW" in texts(muon, "ignored")["optim"]


def test_its_adapters_and_their_base_are_read() -> None:
    more = """
peft_config: {name: lora, r: 16, target_modules: all}
quant_config: {name: bnb, quantization_bit: 4}
"""
    work = imported(NEW + more, gpus_per_node=8).job.workload
    assert (work.train, work.adapter_rank, work.base) == ("adapters", 16, "4bit")
    assert work.adapter_targets == "all"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model_class: llm", "model_class: cls", "model_class: cls is not supported"),
        ("name: fsdp2", "name: fsdpturbo, ep_size: 8", r"dist_config\.ep_size: 8 is not supported"),
        ("cutoff_len", "peft_config: {name: freeze}\ncutoff_len", "freeze is not supported"),
        ("cutoff_len", "cp_mode: ring\ncutoff_len", "cp_mode: only ulysses is supported"),
    ],
)
def test_what_is_not_read_of_version_1_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(NEW.replace(old, new), gpus_per_node=8)
