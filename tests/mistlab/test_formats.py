"""Files are recognised by their own keys; what is none of the formats is refused as what it is."""

from pathlib import Path

import pytest

import mistlab
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.formats.content import content_of
from mistlab.formats.file_formats import FORMATS, format_of
from mistlab.shell.session import LaunchFile
from tests.mistlab.launch_files import imported, source_of

# A file of each format, with as few keys as its framework would start with.
RECOGNISED = {
    "megatron-test": "MODEL_ARGS: {--num-layers: 12}\nTEST_TYPE: regular\n",
    "primus": "modules: {pre_trainer: {framework: megatron, overrides: {}}}\n",
    "llama-factory": "stage: sft\nfinetuning_type: full\nmodel_name_or_path: x\n",
    "axolotl": "base_model: x\nsequence_len: 4096\nmicro_batch_size: 1\n",
    "nemo": "trainer: {devices: 8}\nmodel: {tensor_model_parallel_size: 2}\n",
    "megatron-bridge": "model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 8}\n",
    "flagscale": "system: {tensor_model_parallel_size: 2}\nmodel: {num_layers: 12}\n",
    "megatron-yaml": "language_model: {num_layers: 12}\nmodel_parallel: {}\n",
    "torchtitan": "model: {name: llama3}\ntraining: {seq_len: 8192}\njob: {}\n",
    "nanotron": "parallelism: {dp: 2, tp: 2, pp: 1}\nmodel: {model_config: {}}\n",
    "gpt-neox": '{"pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 12}\n',
    "olmo": "device_train_microbatch_size: 2\nmodel: {d_model: 8}\nfsdp: {wrapping_strategy: x}\n",
    "llm-foundry": "model: {d_model: 64}\nmax_duration: 1ba\nglobal_train_batch_size: 8\n",
    "huggingface-model": "model_type: llama\nhidden_size: 64\n",
    "hf-trainer": "model_name_or_path: x\nper_device_train_batch_size: 4\nlearning_rate: 1e-5\n",
    "accelerate": "distributed_type: FSDP\nnum_processes: 8\n",
    "deepspeed": '{"train_batch_size": 8, "bf16": {"enabled": true}}',
    "megatron": "torchrun pretrain_gpt.py --num-layers 12",
    "kubernetes": "apiVersion: v1\nkind: Pod\n",
    "plan": "workload: {model: gpt2}\ncluster: {nodes: 1}\nplan: {stages: []}\n",
    "prices": "date: 2026-11-28\nsource: x\ngpus: [{hardware: l4-24gb, usd_per_gpu_hour: 1}]\n",
    "maxtext": "base_config: base.yml\nper_device_batch_size: 4\n",
    "torchtune": "model: {_component_: a.b}\noptimizer: {_component_: c}\n",
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_file_is_recognised_by_its_own_keys(name: str) -> None:
    assert format_of(LaunchFile(text=RECOGNISED[name])).name == name


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("plan", "it needs no import: give it to predict, will_it_fit, tune --from or export"),
        ("prices", "it describes no run: give it to estimate by --prices"),
    ],
)
def test_a_file_of_this_package_is_told_where_it_goes(name: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        imported(RECOGNISED[name])


@pytest.mark.parametrize("ending", ["", ".txt", ".template"])
def test_the_ending_of_a_name_does_not_decide(ending: str) -> None:
    for name, text in RECOGNISED.items():
        assert format_of(LaunchFile(text=text, name=f"run{ending}")).name == name


def test_every_format_reads_under_its_own_name() -> None:
    assert all(row.name == name for name, row in FORMATS.items())
    assert {row.target for row in FORMATS.values()} <= {
        "megatron",
        "deepspeed",
        "torchtitan",
        "accelerate",
    }


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("", "a.yaml", "is empty"),
        ("a\0b", "a.sh", "is a binary file"),
        ("<!DOCTYPE html><html></html>", "a.sh", "is an HTML page"),
        ('{"cells": [], "nbformat": 4}', "a.ipynb", "is a notebook"),
        ("#!/usr/bin/perl\nprint 1;\n", "run", "is a program for perl"),
        ("import os\n\ndef main():\n    pass\n", "a.py", "is a Python program"),
        ("2025-01-01 00:00:01 start\n" * 9, "out.txt", "is a log of a run"),
        ("hello\nthere\n", "a.txt", "is neither a launch script nor a configuration"),
        ("a: [1\n", "a.yaml", "line 2, column 1: a list in .* closing bracket: write it"),
        ('{"a": }', "a.json", "line 1, column 7: Expecting value: correct the JSON"),
        (
            '{\n "train_batch_size": CONFIG_BATCH,\n}',
            "a.json",
            "is a template: CONFIG_BATCH stands",
        ),
        ("[a\n", "a.toml", "correct the TOML"),
        ("lr: 1\nfoo: 2\n", "a.yaml", "is in no supported format: its keys are lr, foo:"),
        ("- 1\n- 2\n", "a.yaml", "not a mapping"),
    ],
)
def test_what_is_no_launch_file_is_refused_as_what_it_looks_like(
    text: str, name: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        format_of(LaunchFile(text=text, name=name))


@pytest.mark.parametrize("name", ["olmo", "huggingface-model", "kubernetes", "maxtext"])
def test_what_is_recognised_and_not_read_is_named(name: str) -> None:
    with pytest.raises(InputError, match=r"this looks like .*, which cannot be imported: "):
        imported(RECOGNISED[name])


def test_a_script_is_known_without_an_ending_and_in_any_line_ending() -> None:
    for text in (
        "#!/bin/bash\necho",
        "export A=1\r\ntorchrun train.py --x 1\r\n",
        "python a.py -x",
    ):
        assert content_of(LaunchFile(text=text)).kind == "shell"


def test_a_program_that_nobody_knows_is_refused_by_its_line() -> None:
    with pytest.raises(InputError, match=r"line 2: my_train.py is not a supported program"):
        imported("#!/bin/bash\ntorchrun my_train.py --width 12 --depth 3\n", "run.sh")


def test_remarks_on_cost_come_first_and_equal_ones_are_joint() -> None:
    text = """
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "steps_per_print": 10,
         "zero_optimization": {"stage": 2, "zero_quantized_gradients": true},
         "strange_a": 1, "strange_b": 2, "train_batch_size": "auto"}
    """
    source = source_of(text, "ds.json")
    found = format_of(source).read(source, _given())
    lines = [str(remark) for remark in found.remarks]
    assert "gradients are predicted as reduced in 16 bits" in lines[0]
    assert any("strange_a, strange_b: is not supported here" in line for line in lines)
    assert lines[-1].startswith("noted: settings: steps_per_print")


def test_only_the_first_unknown_settings_have_lines_of_their_own() -> None:
    strange = ", ".join(f'"strange_{count}": {count}' for count in range(9))
    text = f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{}}, {strange}}}'
    source = source_of(text, "ds.json")
    found = format_of(source).read(source, _given())
    lines = [str(remark) for remark in found.remarks if "strange" in str(remark)]
    assert len(lines) == 2
    assert "strange_0, strange_1, strange_2: is not supported here" in lines[0]
    assert "6 more settings are not supported here: strange_3" in lines[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: ${b}\nb: ${a}\nlanguage_model: {x: 1}\nmodel_parallel: {}\n", "refers to itself"),
        ("a: &x {b: '${.}'}\nlanguage_model: {x: '${a}'}\nmodel_parallel: {}\n", "are missing"),
    ],
)
def test_references_in_a_circle_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RECOGNISED["torchtitan"] + "compile: {enable: true, components: 3}\n", "components: 3 is"),
        (
            RECOGNISED["torchtitan"] + "parallelism: {pipeline_parallel_degree: 99999999999}\n",
            "pipeline stages, more than the 32 blocks",
        ),
    ],
)
def test_values_of_another_kind_or_size_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(text.replace("llama3", "llama3, flavor: 8B"), nodes=1, gpus_per_node=8)


def test_lists_of_harmless_settings_are_read_and_hold_each_name_once() -> None:
    package = Path(mistlab.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    files = sorted((package / "export" / "harmless").glob("*.txt"))
    assert len(files) >= 10
    for file in files:
        names = file.read_text(encoding="utf-8").split()
        assert len(names) == len(set(names)), file.name
        assert any(f'harmless_names("{file.stem}")' in source for source in sources), file.name


def _given() -> Given:
    return Given(
        hardware=catalog.hardware("h100-80gb"),
        model=catalog.model("llama3-8b"),
        nodes=1,
        gpus_per_node=8,
        sequence_length=4096,
    )


@pytest.mark.parametrize(
    ("text", "name", "command"),
    [
        (
            "model_id_or_path: a/b\nlora: {rank: 64}\nseq_len: 4096\nbatch_size: 1\n",
            "a.yaml",
            "mistlab tune --train lora --rank 64 --model a/b --sequence-length 4096",
        ),
        (
            "llm_backbone: a/b\narch: {dtype: int4}\ntraining: {lora_r: 4, lr: 1}\n",
            "a.yaml",
            "mistlab tune --train lora --rank 4 --base 4bit --model a/b --sequence-length N",
        ),
        ("torchrun train.py --lr 1 --rank 0\n", "a.sh", "mistlab tune --model NAME"),
    ],
)
def test_training_in_no_known_format_is_described_by_a_command(
    text: str, name: str, command: str
) -> None:
    with pytest.raises(InputError, match=f"; or describe its training by {command}"):
        imported(text, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [("width: 3\nrank: 2\n", "a.yaml"), ("torchrun train_dpo.py --lr 1 --max_length 2\n", "a.sh")],
)
def test_no_command_describes_what_is_no_training_by_next_tokens(text: str, name: str) -> None:
    with pytest.raises(InputError) as refused:
        imported(text, name)
    assert "mistlab tune" not in str(refused.value)
