"""Arguments of Hugging Face's Trainer: recipes, scripts, LLaMA-Factory and axolotl."""

from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Imported, MissingError
from mistlab.formats.checkpoints import model_named
from mistlab.formats.file_formats import format_of
from mistlab.schedule.context_ways import HEADS
from tests.mistlab.launch_files import imported, imported_from, source_of, texts

RECIPE = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
max_seq_length: 4096
packing: true
learning_rate: 1.0e-5
output_dir: out
"""


@pytest.mark.parametrize(
    ("name", "layers", "vocab"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 32, 128256),
        ("meta-llama/Llama-2-7b-hf", 32, 32000),
        ("mistralai/Mistral-7B-v0.1", 32, 32000),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 28, 151936),
        ("Qwen/Qwen3-30B-A3B", 48, 151936),
        ("allenai/OLMo-2-1124-13B", 40, 100352),
        ("gpt2-medium", 24, 50257),
        ("llama4_17B16E.yaml", 48, 202048),
    ],
)
def test_checkpoints_are_known_by_the_words_of_their_names(
    name: str, layers: int, vocab: int
) -> None:
    model = model_named(name)
    assert model is not None
    assert (model.layers, model.vocab) == (layers, vocab)


@pytest.mark.parametrize(
    "name", ["me/llama-8b-mine", "llama-3.1-8B-Vision", "Qwen2.5-VL-7B", "Llama-3.1-80B", ""]
)
def test_a_name_with_any_other_word_is_not_known(name: str) -> None:
    assert model_named(name) is None


def test_a_recipe_is_a_plan() -> None:
    found = imported(RECIPE, nodes=2, gpus_per_node=8)
    job, (stage,) = found.job, found.job.plan.stages
    assert job.workload.model == catalog.model("qwen2.5-7b")
    assert (job.workload.sequence_length, job.workload.global_batch) == (4096, 128)
    assert (stage.micro_batch, job.plan.micro_batches, stage.data_parallel) == (4, 2, 16)
    assert (stage.checkpointed_layers, job.workload.precision, stage.zero) == (28, "bf16", 0)
    assert "names no sharding" in texts(found, "assumed")["zero"]


def test_defaults_of_the_trainer_are_told() -> None:
    text = "model_name_or_path: gpt2\noutput_dir: x\ngradient_accumulation_steps: 1\n"
    found = imported(text, gpus_per_node=4, sequence_length=1024)
    (stage,) = found.job.plan.stages
    assert (stage.micro_batch, found.job.workload.precision) == (8, "fp32")
    assumed = texts(found, "assumed")
    assert assumed["micro_batch"] == "8, the Trainer's default"
    assert assumed["precision"].startswith("fp32, because the run of Hugging Face's Trainer")
    assert "all are predicted at full length" in assumed["sequences"]


@pytest.mark.parametrize(
    ("more", "loss", "is_assumed"),
    [
        ("", "whole", True),
        ("loss_type: nll\n", "whole", False),
        ("loss_type: chunked_nll\n", "chunked", False),
        ("use_liger_kernel: true\n", "chunked", False),
    ],
)
def test_a_loss_that_trl_chooses_is_told(more: str, loss: str, is_assumed: bool) -> None:
    found = imported(RECIPE + more, gpus_per_node=8)
    assert found.job.workload.loss == loss
    assert ("TRL 1.7 or later" in texts(found, "assumed").get("loss", "")) == is_assumed
    # The Trainer itself has no such setting.
    alone = RECIPE.replace("packing: true\n", "") + more
    assert "loss" not in texts(imported(alone, gpus_per_node=8), "assumed")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("rank: 16", "rank: .*, so this run .* trains adapters"),
        (
            "load_in_4bit: true",
            "load_in_4bit: freezes all weights .* no adapters are given",
        ),
        ("adapter: ia3", "adapter: ia3 is not supported: give lora, qlora or full"),
        ("beta: 0.1", "beta: .*, so this run .* trains by preferences"),
        ("num_generations: 8", "num_generations: .*, so this run .* by reinforcement learning"),
        ("vision_tower: clip", "vision_tower: .*, so this run .* a vision-language model"),
        ("per_device_train_batch_size: four", "per_device_train_batch_size: 'four' is not a whole"),
        (
            "model_name_or_path: me/mine",
            "model_name_or_path: 'me/mine' is not the name of a known model",
        ),
        ("max_seq_length: null", "sequence_length: is missing in the file"),
        (
            "deepspeed: ds.json",
            "ds.json: is DeepSpeed's configuration, but is not in the script's folder",
        ),
        ("fsdp: all_of_it", "fsdp: 'all_of_it' is unknown"),
    ],
)
def test_what_trains_something_else_is_refused_by_name(more: str, words: str) -> None:
    key = more.partition(":")[0]
    kept = [line for line in RECIPE.splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(InputError, match=words):
        imported("\n".join([*kept, more]), gpus_per_node=8)


@pytest.mark.parametrize(
    ("more", "level", "replicas", "offload"),
    [
        ('fsdp: "full_shard auto_wrap"', 3, 1, 0),
        ('fsdp: "shard_grad_op offload auto_wrap"', 2, 1, 1),
        ("fsdp: [hybrid_shard, auto_wrap]", 3, 2, 0),
        ("fsdp: true\nfsdp_config: {reshard_after_forward: false}", 2, 1, 0),
        ("fsdp: true\nfsdp_config: {fsdp_reshard_after_forward: true}", 3, 1, 0),
    ],
)
def test_the_argument_fsdp_is_read(more: str, level: int, replicas: int, offload: int) -> None:
    (stage,) = imported(f"{RECIPE}\n{more}\n", nodes=2, gpus_per_node=8).job.plan.stages
    assert (stage.zero, stage.state_replicas, stage.offload.optimizer) == (level, replicas, offload)


def test_an_empty_argument_is_none_and_batches_that_differ_are_told() -> None:
    text = f'{RECIPE}\nfsdp: ""\nfsdp_config: {{reshard_after_forward: true}}\n'
    assert imported(text, gpus_per_node=8).job.plan.stages[0].zero == 0
    content = '{"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}}'
    found = imported(f"{RECIPE}\ndeepspeed: ds.json", gpus_per_node=8, files={"ds__json": content})
    assert found.job.plan.stages[0].micro_batch == 4
    told = texts(found, "contradicting")["ds.json.train_micro_batch_size_per_gpu"]
    assert told == "16, but per_device_train_batch_size is 4: 4 is used"


DEEPSPEED = """
{"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
"""
SCRIPT = """
#!/bin/bash
GPUS=8
LENGTH=${LENGTH:-2048}
deepspeed --num_gpus $GPUS --num_nodes 2 train_sft.py \\
    --model_name_or_path meta-llama/Llama-2-13b-hf \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --model_max_length $LENGTH --bf16 True --gradient_checkpointing True \\
    --optim paged_adamw_8bit --sequence_parallel_size 2 --seed $RANDOM \\
    --deepspeed configs/ds_z3.json
"""


def started(text: str, files: dict[str, str], **given: Any) -> Imported:
    source = source_of(text.lstrip(), "scripts/run.sh")
    object.__setattr__(source, "beside", files.get)
    return imported_from(source, **given)


def test_a_script_s_arguments_and_its_json_make_a_plan() -> None:
    # The file lies above the script's folder, from where the script is started.
    found = started(SCRIPT, {"../configs/ds_z3.json": DEEPSPEED})
    job, (stage,) = found.job, found.job.plan.stages
    assert (job.workload.model.layers, job.workload.model.vocab) == (40, 32000)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 8)
    assert (stage.context_parallel, stage.degree("context_exchange")) == (2, HEADS)
    assert (stage.data_parallel, stage.micro_batch, job.plan.micro_batches) == (8, 2, 4)
    assert (stage.zero, stage.offload.optimizer, stage.checkpointed_layers) == (3, 1, 40)
    assert (job.workload.precision, job.workload.optimizer) == ("bf16", "adamw-8bit")
    with pytest.raises(InputError, match=r"configs/ds_z3.json: is DeepSpeed's configuration"):
        started(SCRIPT, {})


def test_an_unknown_argument_counts_only_where_it_costs() -> None:
    text = SCRIPT.replace("--model_max_length $LENGTH", "--model_max_length $UNSET")
    with pytest.raises(InputError, match=r"model_max_length: line 7: \$UNSET"):
        started(text, {"configs/ds_z3.json": DEEPSPEED})


ACCELERATED = """
accelerate launch --config_file fsdp.yaml --num_processes 16 --num_machines 2 \\
    scripts/run_sft.py recipes/sft.yaml --gradient_accumulation_steps=8
"""
FSDP = (
    "distributed_type: FSDP\nnum_processes: 8\n"
    "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
)


def test_accelerate_launch_has_a_configuration_a_recipe_and_options_that_win() -> None:
    found = started(ACCELERATED, {"fsdp.yaml": FSDP, "recipes/sft.yaml": RECIPE})
    job, (stage,) = found.job, found.job.plan.stages
    assert job.workload.model == catalog.model("qwen2.5-7b")
    assert (job.cluster.nodes, job.cluster.gpus_per_node, stage.data_parallel) == (2, 8, 16)
    assert (stage.zero, stage.micro_batch, job.plan.micro_batches) == (2, 4, 8)
    with pytest.raises(InputError, match=r"fsdp.yaml: is Accelerate's configuration"):
        started(ACCELERATED, {"recipes/sft.yaml": RECIPE})
    with pytest.raises(InputError, match=r"recipes/sft.yaml: is the run's recipe"):
        started(ACCELERATED, {"fsdp.yaml": FSDP})


def test_a_configuration_that_the_script_writes_is_read() -> None:
    text = f"#!/bin/bash\ncat > fsdp.yaml <<EOF\n{FSDP}EOF\n{ACCELERATED}"
    job = started(text, {"recipes/sft.yaml": RECIPE}).job
    assert job.plan.stages[0].zero == 2


def test_options_of_accelerate_make_a_configuration_by_themselves() -> None:
    options = "--use_deepspeed --zero_stage 3 --mixed_precision fp16 --num_processes 4"
    text = f"accelerate launch {options} run_clm.py --model_name_or_path gpt2 --block_size 512 \\\n"
    job = started(text + "  --per_device_train_batch_size 2\n", {}).job
    assert (job.plan.stages[0].zero, job.workload.precision) == (3, "fp16")
    assert (job.plan.engine, job.cluster.num_gpus) == ("deepspeed-trainer", 4)


def test_a_command_inside_a_submitting_program_is_the_one_that_counts() -> None:
    inner = ACCELERATED.strip().replace("\\\n", "")
    text = f"python submit.py --cluster a --num_nodes 9 -- {inner}\n"
    job = started(text, {"fsdp.yaml": FSDP, "recipes/sft.yaml": RECIPE}).job
    assert (job.cluster.nodes, job.plan.stages[0].zero) == (2, 2)


@pytest.mark.parametrize(
    "program", ["run_dpo.py", "train_qlora.py", "grpo.py", "run_mlm.py", "train_llava.py"]
)
def test_programs_that_train_something_else_are_refused(program: str) -> None:
    with pytest.raises(InputError, match=f"{program}: .*not supported"):
        started(SCRIPT.replace("train_sft.py", program), {"configs/ds_z3.json": DEEPSPEED})


def test_a_program_of_its_own_needs_the_rest_and_its_options_are_named() -> None:
    text = "accelerate launch --num_processes 8 mine.py --my_batch 4\n"
    with pytest.raises(InputError, match=r"mine.py: is an unknown program, .* give --model"):
        started(text, {})
    given = {"model": catalog.model("llama3-8b"), "sequence_length": 4096, "micro_batch": 1}
    found = started(text, {}, **given)
    assert "options of mine.py are unknown" in texts(found, "ignored")["--my_batch"]


FACTORY = """
stage: sft
finetuning_type: full
model_name_or_path: Qwen/Qwen3-8B
template: qwen3
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
bf16: true
deepspeed: examples/deepspeed/ds_z3.json
"""


def test_full_training_of_llama_factory_is_read_with_its_defaults() -> None:
    files = {"../../examples/deepspeed/ds_z3.json": DEEPSPEED}
    source = source_of(FACTORY, "examples/train_full/a.yaml")
    object.__setattr__(source, "beside", files.get)
    found = imported_from(source, gpus_per_node=8)
    job, (stage,) = found.job, found.job.plan.stages
    assert (job.workload.model.name, job.workload.sequence_length) == ("qwen3-8b", 2048)
    assert (stage.zero, stage.checkpointed_layers, stage.offload.optimizer) == (3, 36, 1)
    assert texts(found, "assumed")["sequence_length"] == "2048, LLaMA-Factory's default"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "finetuning_type: full",
            "finetuning_type: freeze",
            "finetuning_type: freeze is not supported",
        ),
        ("stage: sft", "stage: dpo", "dpo trains by preferences .* give a LLaMA-Factory file"),
    ],
)
def test_other_ways_of_llama_factory_are_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(FACTORY.replace(old, new), gpus_per_node=8)


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
sequence_len: 8192
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 8
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: true
fsdp: [full_shard, auto_wrap]
"""


def test_full_training_of_axolotl_is_read_and_errors_have_its_own_names() -> None:
    found = imported(AXOLOTL, gpus_per_node=8)
    job, (stage,) = found.job, found.job.plan.stages
    assert job.workload.model == catalog.model("llama3-8b")
    assert (job.workload.sequence_length, job.workload.precision) == (8192, "bf16")
    assert (stage.micro_batch, job.plan.micro_batches, stage.zero) == (2, 8, 3)
    assert "sequences" not in texts(found, "assumed")
    with pytest.raises(InputError, match="base_model: 'me/x' is not the name of a known model"):
        imported(AXOLOTL.replace("NousResearch/Meta-Llama-3.1-8B", "me/x"), gpus_per_node=8)
    newer = AXOLOTL.replace("fsdp: [full_shard, auto_wrap]", "fsdp_config: {fsdp_version: 2}")
    assert imported(newer, gpus_per_node=8).job.plan.stages[0].zero == 3
    with pytest.raises(InputError, match=r"rl: dpo trains by preferences or rewards"):
        imported(AXOLOTL + "rl: dpo\n")
    with pytest.raises(InputError, match=r"tensor_parallel_size: .* not supported"):
        imported(AXOLOTL + "tensor_parallel_size: 2\n")


def test_scripts_of_other_frameworks_start_their_files() -> None:
    launches = {
        "llamafactory-cli train a.yaml\n": "llama-factory",
        "composer train.py a.yaml\n": "llm-foundry",
        "torchrun --nproc_per_node 8 run_train.py --config-file a.yaml\n": "nanotron",
        "torchrun --nproc_per_node 8 torchtitan/train.py --job.config_file a.toml\n": "torchtitan",
        "python deepy.py train.py a.yml\n": "gpt-neox",
        "accelerate launch -m axolotl.cli.train a.yaml\n": "axolotl",
    }
    for text, name in launches.items():
        source = source_of(f"#!/bin/bash\n{text}", "run.sh")
        assert format_of(source).name == name
        with pytest.raises(InputError, match=r"a\.\w+: .* is not in the script's folder"):
            imported_from(source, gpus_per_node=8)


def test_a_recipe_without_a_batch_has_the_trainer_s_default() -> None:
    dropped = ("per_device_train_batch_size: 4\n", "gradient_accumulation_steps: 2\n")
    text = RECIPE
    for line in dropped:
        text = text.replace(line, "")
    assert format_of(source_of(text, "run.yaml")).name == "hf-trainer"
    found = imported(text, nodes=1, gpus_per_node=8)
    assert (found.job.plan.stages[0].micro_batch, found.job.plan.micro_batches) == (8, 1)
    assert texts(found, "assumed")["micro_batch"] == "8, the Trainer's default"


CHAT = """
deepspeed --num_gpus 8 main.py --model_name_or_path meta-llama/Llama-2-7b-hf \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_seq_len 512 --deepspeed {}
"""


def test_a_program_that_makes_deepspeed_s_configuration_itself_is_read_by_its_arguments() -> None:
    found = imported(CHAT.format("--zero_stage 3 --offload"), "run.sh", nodes=1)
    stage = found.job.plan.stages[0]
    assert (stage.zero, stage.offload.optimizer) == (3, 1)
    assert "the program makes DeepSpeed's configuration" in texts(found, "assumed")["deepspeed"]
    with pytest.raises(InputError, match="no --zero_stage from 0 to 3 is given"):
        imported(CHAT.format(""), "run.sh", nodes=1)


def test_a_recipe_s_key_that_stands_twice_counts_as_in_its_program() -> None:
    twice = RECIPE + "per_device_train_batch_size: 2\n"
    script = "accelerate launch --num_processes 8 sft.py --config recipe.yaml\n"
    found = imported(script, "run.sh", files={"recipe.yaml": twice}, nodes=1, gpus_per_node=8)
    assert found.job.plan.stages[0].micro_batch == 2


def trained(found: Imported) -> tuple[object, ...]:
    """What an import says of adapters: what is trained, rank, products, bits of the base."""
    work = found.job.workload
    return work.train, work.adapter_rank, work.adapter_targets, work.base


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (AXOLOTL, "adapter: lora\nlora_r: 32\nlora_target_linear: true", (32, "all", "16bit")),
        (AXOLOTL, "adapter: qlora\nload_in_4bit: true\nlora_r: 8", (8, "attention", "4bit")),
        (
            AXOLOTL,
            "adapter: lora\nload_in_8bit: true\nlora_target_modules: [q_proj, gate_proj]",
            (8, "all", "8bit"),
        ),
        (RECIPE, "use_peft: true\nlora_r: 64", (64, "attention", "16bit")),
        (RECIPE, "use_peft: true\nlora_target_modules: all-linear", (16, "all", "16bit")),
        (RECIPE, "use_peft: true\nload_in_4bit: true", (16, "attention", "4bit")),
    ],
)
def test_adapters_of_recipes_are_read(text: str, more: str, said: tuple[int, str, str]) -> None:
    assert trained(imported(f"{text.strip()}\n{more}\n", gpus_per_node=8)) == ("adapters", *said)


def test_a_switch_that_is_off_is_read_also_behind_one_that_is_on() -> None:
    off = "adapter: qlora\nload_in_8bit: false\nload_in_4bit: true\nlora_r: 8"
    assert "load_in_8bit" not in texts(
        imported(f"{AXOLOTL.strip()}\n{off}\n", gpus_per_node=8), "ignored"
    )
    off = "use_peft: true\nlora_r: 8\nq_lora: false\nload_in_4bit: true\nload_in_8bit: false"
    ignored = texts(imported(f"{RECIPE.strip()}\n{off}\n", gpus_per_node=8), "ignored")
    assert not {"q_lora", "load_in_8bit"} & {*ignored}


@pytest.mark.parametrize(
    ("text", "more", "key", "tables"),
    [
        (AXOLOTL, "adapter: lora\nlora_r: 8", "lora_modules_to_save", 2),
        (RECIPE, "use_peft: true\nlora_r: 8", "lora_modules_to_save", 1),
        (FACTORY, "finetuning_type: lora", "additional_target", 2),
    ],
)
def test_modules_that_are_trained_in_full_beside_adapters_are_told_with_their_bytes(
    text: str, more: str, key: str, tables: int
) -> None:
    names = ["lm_head", "embed_tokens"][:tables]
    lines = [line for line in text.strip().splitlines() if line.split(":")[0] not in _LEFT_OUT]
    recipe = "\n".join([*lines, more, ""])
    found = imported(f"{recipe}{key}: [{', '.join(names)}]\n", gpus_per_node=8)
    (told,) = [
        str(remark) for remark in found.remarks if remark.choice == key and remark.kind == "ignored"
    ]
    model = found.job.workload.model
    gib = tables * model.vocab * model.hidden / 2**30
    assert f"{' '.join(names)}: the run trains these in full" in told
    assert f"{8 * gib:.1f} to {16 * gib:.1f} GiB more" in told
    # Norms are a few thousand weights; with full training nothing is frozen.
    small = texts(imported(f"{recipe}{key}: input_layernorm\n", gpus_per_node=8), "ignored")
    assert "GiB" not in small[key]
    whole = (
        recipe.replace("adapter: lora", "")
        .replace("use_peft: true", "")
        .replace("finetuning_type: lora", "finetuning_type: full")
        .replace("lora_r: 8", "")
    )
    assert key not in texts(imported(f"{whole}{key}: lm_head\n", gpus_per_node=8), "ignored")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", (8, "all", "16bit")),
        ("lora_rank: 32\nlora_target: q_proj,v_proj", (32, "attention", "16bit")),
        ("quantization_bit: 4\nlora_target: all", (8, "all", "4bit")),
    ],
)
def test_llama_factory_trains_adapters_unless_it_is_told(
    more: str, said: tuple[int, str, str]
) -> None:
    lines = [line for line in FACTORY.splitlines() if line.split(":")[0] not in _LEFT_OUT]
    found = imported("\n".join([*lines, more]), gpus_per_node=8)
    assert trained(found) == ("adapters", *said)


_LEFT_OUT = ("finetuning_type", "deepspeed")


def test_programs_that_are_named_after_adapters_train_them() -> None:
    script = SCRIPT.replace("train_sft.py", "train_lora.py")
    found = started(script, {"configs/ds_z3.json": DEEPSPEED})
    assert trained(found)[:2] == ("adapters", 16)


TUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 16
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
gradient_accumulation_steps: 8
enable_activation_checkpointing: true
enable_activation_offloading: true
dtype: bf16
compile: false
"""


def test_torchtune_s_recipes_are_read_by_their_components() -> None:
    found = imported(TUNE, gpus_per_node=2)
    work, plan = found.job.workload, found.job.plan
    assert work.model == catalog.model("llama3-8b")
    assert trained(found) == ("adapters", 16, "all", "4bit")
    assert (work.sequence_length, work.loss, work.states) == (4096, "chunked", "16bit")
    assert (work.optimizer, plan.micro_batches) == ("adamw-8bit", 8)
    (stage,) = plan.stages
    assert (stage.micro_batch, stage.checkpointed_layers, stage.zero) == (2, 32, 3)
    assert stage.offload.activations == 1
    whole = TUNE.replace("qlora_llama3_1_8b", "llama3_1_8b").replace(
        "compile: false", "compile: true"
    )
    assert imported(whole, gpus_per_node=2).job.workload.train == "all"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("LinearCrossEntropyLoss", "dpo.DPOLoss", "DPOLoss is for preferences"),
        ("\nmodel:", "\npolicy_model:", "policy_model: belongs to reinforcement learning"),
        ("dtype: bf16", "dtype: int4", "dtype: 'int4' is not supported"),
        (", max_seq_len: 4096", "", "sequence_length: is missing in the file"),
        ("qlora_llama3_1_8b", "lora_mine_3b", "'mine-3b' is not the name of a known model"),
    ],
)
def test_what_a_torchtune_recipe_lacks_is_told(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(TUNE.replace(old, new), gpus_per_node=2)


AUTOMODEL = """
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1, sequence_parallel: true}
loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.Adam}
"""


def test_automodel_s_recipes_are_read_by_their_targets() -> None:
    found = imported(AUTOMODEL, gpus_per_node=8)
    work, plan = found.job.workload, found.job.plan
    assert work.model == catalog.model("llama3.2-1b")
    assert trained(found) == ("adapters", 8, "all", "16bit")
    assert (work.sequence_length, work.global_batch, work.loss) == (4096, 64, "chunked")
    (stage,) = plan.stages
    assert (stage.tensor_parallel, stage.data_parallel, stage.zero) == (2, 4, 3)
    assert (stage.micro_batch, plan.micro_batches, stage.sequence_parallel) == (2, 8, 1)
    with pytest.raises(InputError, match=r"distributed.strategy: 'mine' is not supported"):
        imported(AUTOMODEL.replace("strategy: fsdp2", "strategy: mine"), gpus_per_node=8)


def test_a_missing_fact_names_the_misspelt_key_that_may_give_it() -> None:
    recipe = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\noutput_dir: x\n"
    with pytest.raises(
        MissingError, match=r"sequence_length: .* max_lenght .*mean max_length\?\)$"
    ):
        imported(f"{recipe}max_lenght: 2048\n", gpus_per_node=1)


@pytest.mark.parametrize("alone", [True, False])
def test_adapters_of_deepspeed_chat_are_on_all_layers_of_blocks(alone: bool) -> None:
    text = (
        "deepspeed --num_gpus 8 main.py --model_name_or_path facebook/opt-1.3b --max_seq_len 512 "
        "--per_device_train_batch_size 2 --deepspeed --zero_stage 2 --lora_dim 64 "
        f"--lora_module_name decoder.layers. {'--only_optimize_lora' * alone}\n"
    )
    found = imported(text, "a.sh")
    work = found.job.workload
    assert (work.train, work.adapter_rank, work.adapter_targets) == ("adapters", 64, "all")
    assert work.model.hidden == 2048
    assert ("lora_module_name" in texts(found, "ignored")) == (not alone)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("adamw_torch_4bit", "adamw-8bit", "moments of 8 bits"),
        ("adamw_torch_8bit", "adamw-8bit", ""),
        ("paged_adamw_32bit", "adamw", ""),
    ],
)
def test_optimizers_of_few_bits_are_read(name: str, kind: str, told: str) -> None:
    text = f"base_model: Qwen/Qwen3-8B\nsequence_len: 1024\noptimizer: {name}\ndatasets: []\n"
    found = imported(text, gpus_per_node=1)
    assert found.job.workload.optimizer == kind
    assert told in texts(found, "ignored").get("optim", "")
    assert bool(told) == ("optim" in texts(found, "ignored"))


def test_axolotl_s_settings_of_adapters_mean_nothing_without_one() -> None:
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nlora_r: 16\nbf16: true\n"
    for more, train in (("adapter:", "all"), ("adapter: lora", "adapters"), ("", "all")):
        found = imported(f"{text}datasets: []\n{more}\n", gpus_per_node=1)
        assert found.job.workload.train == train


def test_degrees_of_a_torchtune_recipe_are_read() -> None:
    more = "tensor_parallel_dim: 4\ndata_parallel_shard_dim: -1\n"
    plan = "tensor_parallel_plan: {_component_: torchtune.models.llama3.base_llama_tp_plan}\n"
    found = imported(f"{TUNE}{more}{plan}", gpus_per_node=8)
    (stage,) = found.job.plan.stages
    assert (stage.tensor_parallel, stage.sequence_parallel, stage.data_parallel) == (4, 1, 2)
    assert not any("parallel" in key for key in texts(found, "ignored"))
