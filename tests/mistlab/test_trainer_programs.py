"""Lines with the Trainer's arguments whose programs train nothing, or by another library, or say
otherwise how large a micro-batch is.
"""

import pytest

from mistlab.core.values import InputError
from tests.mistlab.launch_files import imported, texts

LINE = """
torchrun --nproc_per_node 2 train.py --model_name_or_path Qwen/Qwen3-8B --bf16 \\
  --per_device_train_batch_size 4 --max_seq_length 512 --gradient_checkpointing
"""


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("train.py", "examples/chatbot.py", "trains nothing: it answers"),
        ("train.py", "olmo_core_finetune.py", "trains by OLMo-core.*mistlab tune --space fsdp"),
        (
            "train.py",
            "submit.py --gpus 0 -- python olmo_core_finetune.py",
            "trains by OLMo-core.*mistlab tune",
        ),
        ("train.py", "train_controlnet.py", "trains a model of images"),
        ("--bf16", "--bf16 --vit_gradient_checkpointing true", "trains a vision-language model"),
        ("torchrun", "colossalai run", "trains by ColossalAI.*mistlab tune --space fsdp"),
        ("--bf16", "--bf16 --do_train False --do_predict", "do_train: false trains nothing"),
    ],
)
def test_what_trains_nothing_or_by_another_library_is_refused(was: str, now: str, why: str) -> None:
    assert imported(LINE, "a.sh").job.plan.stages[0].micro_batch == 4
    with pytest.raises(InputError, match=why):
        imported(LINE.replace(was, now), "a.sh")


def test_a_batch_of_nobody_knows_whom_is_asked_for() -> None:
    """A program's own ``batch_size`` is of a process or of a step."""
    line = LINE.replace("per_device_train_batch_size", "batch_size")
    with pytest.raises(InputError, match=r"batch_size: 4 may be .*give --micro-batch"):
        imported(line, "a.sh")
    found = imported(line, "a.sh", micro_batch=2)
    assert found.job.plan.stages[0].micro_batch == 2
    assert found.job.workload.global_batch == 4
    assert "micro_batch" not in texts(found, "assumed")


@pytest.mark.parametrize("name", ["use_flash_attn True", "use_flash_attention 1"])
def test_flash_attention_has_many_names(name: str) -> None:
    assert "attention" in texts(imported(LINE, "a.sh"), "assumed")
    found = imported(LINE.replace("--bf16", f"--bf16 --{name}"), "a.sh")
    assert "attention" not in texts(found, "assumed")
    assert not texts(found, "ignored")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("--use_peft --use_dora True", "adapters are predicted without DoRA's norms"),
        ("--use_lisa 1", "all weights are predicted as trained"),
        ("--spectrum_config_path a.yaml", "all weights are predicted as trained"),
    ],
)
def test_what_plans_cannot_say_is_told(more: str, what: str) -> None:
    found = imported(LINE.replace("--bf16", f"--bf16 {more}"), "a.sh")
    assert what in " ".join(texts(found, "ignored").values())


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed --num_gpus 8 run_glue_classifier.py --deepspeed_config $1/glue.json",
        "accelerate launch --config_file $1/a.yaml run_glue_classifier.py",
    ],
)
def test_nothing_is_asked_for_that_would_not_help(line: str) -> None:
    """A classifier is refused whatever its configuration says."""
    with pytest.raises(InputError, match=r"run_glue_classifier.py: trains a classifier"):
        imported(line, "a.sh")


def test_a_precision_that_the_file_leaves_to_its_launcher_contradicts_nothing() -> None:
    recipe = "model_name_or_path: Qwen/Qwen3-8B\nlearning_rate: 1\nmax_seq_length: 512\n"
    recipe += "per_device_train_batch_size: 1\n"
    assumed = texts(imported(recipe, gpus_per_node=8), "assumed")
    assert assumed["precision"].endswith("if its launcher does, give --precision")
    given = imported(recipe, gpus_per_node=8, precision="bf16")
    assert given.job.workload.precision == "bf16"
    assert "precision" not in {**texts(given, "assumed"), **texts(given, "contradicting")}
