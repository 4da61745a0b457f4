"""Names of models in recipes: torchtune's functions, and checkpoints with quantised weights."""

import pytest

from mistlab.core.values import InputError
from tests.mistlab.launch_files import imported, texts


@pytest.mark.parametrize(
    ("builder", "layers", "hidden"),
    [
        ("qwen2_0_5b", 24, 896),
        ("qwen2_1_5b", 28, 1536),
        ("qwen2_5_0_5b", 24, 896),
        ("lora_qwen2_5_14b_instruct", 48, 5120),
        ("qwen3_0_6b_instruct", 28, 1024),
        ("qlora_llama3_2_1b", 16, 2048),
        ("gemma2_27b", 46, 4608),
        ("gemma_2b", 18, 2048),
        ("phi4_14b", 40, 5120),
        ("phi3_mini", 32, 3072),
        ("code_llama2_7b", 32, 4096),
    ],
)
def test_torchtune_s_functions_are_known_models(builder: str, layers: int, hidden: int) -> None:
    recipe = f"""
        model: {{_component_: torchtune.models.x.{builder}, lora_rank: 8}}
        optimizer: {{_component_: torch.optim.AdamW}}
        tokenizer: {{max_seq_len: 1024}}
        batch_size: 1
    """
    model = imported(recipe, gpus_per_node=1).job.workload.model
    assert (model.layers, model.hidden) == (layers, hidden)


@pytest.mark.parametrize(
    ("name", "context"),
    [("meta-llama/Llama-3.1-8B-Instruct", 131_072), ("meta-llama/Meta-Llama-3-8B", 8192)],
)
def test_a_checkpoint_has_the_context_of_its_release(name: str, context: int) -> None:
    text = f"{{model_name_or_path: {name}, max_length: 512, per_device_train_batch_size: 1}}"
    model = imported(text, gpus_per_node=1, precision="bf16").job.workload.model
    assert (model.name, model.context) == ("llama3-8b", context)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3-8B-FP8", "8bit"),
        ("unsloth/Qwen3-8B-bnb-4bit", "4bit"),
        ("Qwen/Qwen3-8B-AWQ", "4bit"),
        ("Qwen/Qwen3-8B", "16bit"),
    ],
)
def test_a_checkpoint_s_name_tells_the_bits_of_frozen_weights(name: str, base: str) -> None:
    text = f"""
        model_name_or_path: {name}
        max_length: 1024
        per_device_train_batch_size: 1
        bf16: true
    """
    found = imported(f"{text}\n        use_peft: true\n", gpus_per_node=1)
    assert (found.job.workload.model.hidden, found.job.workload.base) == (4096, base)
    assert ("base" in texts(found, "assumed")) == (base != "16bit")
    if base == "4bit":
        with pytest.raises(InputError, match=r"has weights of 4 bits.*give LoRA adapters too"):
            imported(text, gpus_per_node=1)
    else:
        whole = imported(text, gpus_per_node=1)
        assert (whole.job.workload.train, whole.job.workload.base) == ("all", "16bit")
        assert ("base" in texts(whole, "assumed")) == (base == "8bit")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("[q_proj, v_proj, output_proj]", "on k_proj too"),
        ("[q_proj, k_proj, v_proj, output_proj]", ""),
    ],
)
def test_layers_without_adapters_in_torchtune_s_recipes_are_told(names: str, told: str) -> None:
    recipe = f"""
        model:
          _component_: torchtune.models.llama3_1.lora_llama3_1_8b
          lora_attn_modules: {names}
          lora_rank: 8
        optimizer: {{_component_: torch.optim.AdamW}}
        tokenizer: {{max_seq_len: 1024}}
        batch_size: 1
    """
    found = texts(imported(recipe, gpus_per_node=1), "assumed")
    assert told in found.get("model.lora_attn_modules", "")
    assert bool(told) == ("model.lora_attn_modules" in found)
