"""What a file lacks for a plan is asked for all at once, with the option or key that gives it."""

import re

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.formats.file_formats import format_of
from mistlab.shell.session import LaunchFile

DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}'
AXOLOTL = "base_model: me/mine\ndatasets: []\nadapter: lora\nlora_r: 16\nmicro_batch_size: 2\n"
TRAINER = "torchrun --nproc-per-node $N sft.py --model_name_or_path $BASE --max_length $LENGTH"
MEGATRON = (
    "torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py --num-layers 32 "
    "--tensor-model-parallel-size $TP --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length $LENGTH --micro-batch-size $SIZE --global-batch-size $BATCH"
)


def imported_error(text: str, **given: object) -> str:
    source = LaunchFile(text=text)
    options = Given(**{"hardware": catalog.hardware("h100-80gb"), **given})  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        format_of(source).imported(source, options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            DEEPSPEED,
            [
                "model: .* give --model",
                "gpus_per_node: .* give --gpus-per-node",
                "micro_batch: .* --micro-batch, or train_micro_batch_size_per_gpu in the file",
                "sequence_length: .* give --sequence-length",
            ],
        ),
        (
            DEEPSPEED[:-1] + ', "bf16": {"enabled": "auto"}}',
            [
                "bf16.enabled: auto .* give --precision",
                "model: .* give --model",
                "gpus_per_node: .* give --gpus-per-node",
                "micro_batch: .* --micro-batch, or train_micro_batch_size_per_gpu in the file",
                "sequence_length: .* give --sequence-length",
            ],
        ),
        (
            AXOLOTL,
            [
                "base_model: 'me/mine' is not the name of a known model: give --model",
                "gpus_per_node: .* give --gpus-per-node",
                "sequence_length: .* give --sequence-length, or sequence_len in the file",
            ],
        ),
        (
            TRAINER,
            [
                r"model_name_or_path: .*\$BASE is not set .* or --model NAME",
                r"max_length: .*\$LENGTH is not set .* give --set LENGTH=VALUE",
                r"--nproc-per-node: .*\$N .* give --set N=VALUE, or --gpus-per-node N",
            ],
        ),
        (
            MEGATRON,
            [
                rf"{where}: .* give --set {name}=VALUE"
                for where, name in (
                    ("--nnodes", "NODES"),
                    ("--tensor-model-parallel-size", "TP"),
                    ("--seq-length", "LENGTH"),
                    ("--micro-batch-size", "SIZE"),
                    ("--global-batch-size", "BATCH"),
                )
            ],
        ),
        (
            "trainer: {devices: 8}\nmodel: {tensor_model_parallel_size: 2}\n",
            [
                "model.hidden_size, model.num_attention_heads, model.num_layers: are missing",
                "micro_batch: .* give --micro-batch",
                "sequence_length: .* give --sequence-length",
            ],
        ),
    ],
)
def test_all_facts_that_a_file_lacks_are_named_at_once(text: str, facts: list[str]) -> None:
    message = imported_error(text)
    assert sorted(map(message.count, ("give --model", "--sequence-length"))) <= [1, 1]
    for fact in facts:
        assert len(re.findall(fact, message)) == 1, message


def test_what_is_given_is_not_asked_for() -> None:
    asked = imported_error(DEEPSPEED, model=catalog.model("llama3-8b"), micro_batch=1)
    assert asked == (
        "gpus_per_node: is missing in the file: give --gpus-per-node; "
        "sequence_length: is missing in the file: give --sequence-length"
    )


def test_an_error_that_values_in_place_of_missing_ones_make_is_not_told() -> None:
    # With one GPU a node in place of the unknown number, two tensor-parallel ranks do not fit.
    line = "torchrun --nnodes $NODES --nproc-per-node 1 pretrain_gpt.py"
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    text = f"{line} {sizes} --micro-batch-size 1 --tensor-model-parallel-size 2"
    assert imported_error(text) == (
        "--nnodes: line 1: $NODES is not set in the script: give --set NODES=VALUE, or --nodes N"
    )
    # An error about what the file says comes as it is, whatever else is missing.
    assert "zero_optimization.stage: 7" in imported_error(
        DEEPSPEED.replace("3", "7"), model=(catalog.model("llama3-8b"))
    )
