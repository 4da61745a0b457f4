"""Programs of Megatron-LM by name: decoders and BERT are read, all others are refused by name."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from tests.mistlab.launched import imported, texts


@pytest.mark.parametrize(
    "program",
    [
        "pretrain_gpt.py",
        "/opt/Megatron-LM/pretrain_gpt.py",
        "examples/llama2/pretrain_llama.py",
        "pretrain_gpt_core.py",
        "pretrain_bert.py",
        "pretrain_mamba.py",
        "finetune.py",
        "finetune_llama.py",
        "pretrain_qwen.py",
        "pretrain_deepseek.py",
        "posttrain_gpt.py",
        "pretrain_megatron_bloom.py",
        "megatron.training.pretrain_gpt",
        "",
    ],
)
def test_decoders_are_read_without_a_word(program: str) -> None:
    shape = "--hybrid-layer-pattern *-" if "mamba" in program else ""
    assert "program" not in texts(imported(shape, program=program))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pretrain_t5.py", "trains an encoder beside a decoder"),
        ("pretrain_ict.py", "trains an encoder"),
        ("pretrain_biencoder.py", "trains an encoder"),
        ("pretrain_vlm.py", "trains an encoder of images"),
        ("examples/multimodal/train.py", "trains an encoder of images"),
        ("pretrain_vision_classify.py", "trains an encoder of images"),
        ("pretrain_vision_dino.py", "trains an encoder of images"),
        ("examples/qwen2_5_vl/pretrain_qwen.py", "trains an encoder of images"),
        ("pretrain_retro.py", "trains with retrieved text"),
        ("tasks/main.py", "evaluates, and trains nothing"),
        ("tools/run_text_generation_server.py", "trains nothing"),
        ("tools/checkpoint/convert.py", "prepares files, and trains nothing"),
        ("train_dpo.py", "trains by preferences"),
    ],
)
def test_other_programs_are_refused_by_name(program: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"^line 40: {program} {reason}.*: give a launch line"):
        imported(program=program)


def test_an_unknown_program_is_read_with_a_remark() -> None:
    said = texts(imported(program="my_training.py"), "assumed")
    assert said["program"].startswith("my_training.py is unknown: taken as a program that")


def test_a_program_of_another_framework_is_refused_as_such() -> None:
    with pytest.raises(InputError, match=r"my_training\.py has none of Megatron-LM's options"):
        imported(shape="--model_name_or_path x", run="--output_dir y", program="my_training.py")
    # With a model that is given, a line needs no shape.
    model = catalog.model("gpt3-1.3b")
    assert imported(shape="--seq-length 2048", model=model).job.workload.model == model


def test_a_file_of_all_options_is_named_before_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"--yaml-cfg: line 40: x\.yaml: takes all options from"):
        imported(shape="--yaml-cfg x.yaml", run="")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--img-h 224", "image encoder"),
        ("--vision-model-type clip", "image encoder"),
        ("--decoder-num-layers 12", "training an encoder"),
        ("--encoder-tensor-model-parallel-size 2", "training an encoder"),
        ("--retro-add-retriever", "retrieved text"),
        ("--lora-r 16", "adapters only"),
        ("--freeze-all-layers", "a part of the weights"),
        ("--stage dpo", "preferences or rewards"),
        ("--perform-rl-step", "preferences or rewards"),
        ("--export-kd-teacher-load x", "distillation from a teacher"),
        ("--yaml-cfg x.yaml", "import it in place of this one"),
        ("--noop-layers 1,2", "blocks that do nothing"),
        ("--heterogeneous-layers-config-path x", "give --model"),
    ],
)
def test_options_that_make_another_model_are_refused(more: str, reason: str) -> None:
    name = more.split(maxsplit=1)[0]
    with pytest.raises(InputError, match=f"^{name}: line 40.*{reason}"):
        imported(more)


@pytest.mark.parametrize(
    "more", ["--encoder-tensor-model-parallel-size 0", "--kd false", "--stage sft"]
)
def test_options_that_say_nothing_are_no_matter(more: str) -> None:
    assert [one.choice for one in imported(more).remarks] in ([], ["options"])
