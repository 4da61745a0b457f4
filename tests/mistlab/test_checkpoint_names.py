"""Names of released checkpoints: which model they stand for, and never one of another size."""

import re

import pytest

from mistlab import catalog
from mistlab.economy.bill import model_parameters
from mistlab.formats.checkpoints import (
    _BY_WORDS,
    _SIZES,
    model_named,
    quantised,
    released,
    stored_bits,
)
from mistlab.huggingface.configurations import model_of_config
from mistlab.huggingface.type_keys import release_configs
from mistlab.plan.workload import ModelSpec, Workload

# Sizes in names are rounded: "1b" has 1.24 billion parameters. "llama 4 scout 17b 16e" names what a
# token uses.
ROUNDED = 0.25
# Names whose sizes leave parts out, with what their publishers count.
COUNTED = {
    "qwen 1 8b": 1.84e9,
    "gemma 2b": 2.51e9,
    "gemma 1.1 2b": 2.51e9,
    "falcon3 1b": 1.67e9,
    "granite 3.3 2b": 2.53e9,
    "olmo 2 1b": 1.48e9,
    "stablelm 2 1 6b": 1.64e9,
    "qwen 1.5 moe a2.7b": 14.3e9,
}


def parameters(model: ModelSpec) -> float:
    context = min(model.context or 4096, 512)
    return model_parameters(
        Workload(
            model=model,
            sequence_length=context,
            global_batch=1,
            attention="flash",
            precision="bf16",
        )
    )


@pytest.mark.parametrize("key", [*_BY_WORDS, *_SIZES, *release_configs()])
def test_a_name_stands_for_a_model_of_the_size_that_it_says(key: str) -> None:
    size = re.search(r"(?:^| )(\d+(?:\.\d+)?)([bm])(?= |$)", key)
    if size is None or "llama 4" in key:
        return
    model = model_named(key.replace(" ", "-"))
    assert model is not None
    stated = COUNTED.get(key, float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]])
    assert parameters(model) == pytest.approx(stated, rel=ROUNDED)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("llama3.1-8b", "llama3-8b of the catalogue, with a context of 131,072 tokens"),
        ("Meta-Llama-3.1-8B", "llama3-8b of the catalogue, with a context of 131,072 tokens"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b of the catalogue"),
        ("LLaMA3-8B", "llama3-8b of the catalogue"),
        ("qwen2.5-7b-instruct", "qwen2.5-7b of the catalogue"),
        ("olmo2-7b-instruct", "olmo2-7b of the catalogue"),
        ("GPT2-XL", "gpt2-xl of the catalogue"),
        ("mistral-7b-v0.3", "a model of its published sizes (hidden 4096, 32 layers, vocabulary 3"),
    ],
)
def test_users_are_told_which_model_was_taken(name: str, what: str) -> None:
    known = released(name)
    assert known is not None
    assert known[1].startswith(what)


@pytest.mark.parametrize("name", ["tiiuae/falcon-7b", "gemma-2-8b", "llama-3-9b", "me/gpt3-7b"])
def test_a_model_of_unknown_sizes_is_none(name: str) -> None:
    """Also where the catalogue has the owner's name for a model of other sizes."""
    assert released(name) is None


# The numbers of parameters that the models' publishers and Keras state.
@pytest.mark.parametrize(
    ("name", "count", "context"),
    [
        ("google/gemma-2-2b-it", 2_614_341_888, 8192),
        ("google/gemma-2-9b", 9_241_705_984, 8192),
        ("google/gemma-2-27b-it", 27_227_128_320, 8192),
        ("google/gemma-3-1b-it", 999_885_952, 32_768),
        ("google/gemma-3-4b-pt", 3_880_099_328, 131_072),
        ("google/gemma-3-12b-it", 11_765_788_416, 131_072),
        ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400, 128_000),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 4096),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 2048),
        ("microsoft/Phi-3.5-mini-instruct", 3_821_079_552, 131_072),
        ("NousResearch/Hermes-3-Llama-3.1-8B", 8_030_261_248, 131_072),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30_532_122_624, 262_144),
        ("allenai/Olmo-3-1025-7B", 7_298_011_136, 65_536),
        ("stabilityai/stablelm-3b-4e1t", 2_795_443_200, None),
        ("Qwen/Qwen-7B", 7_721_324_544, None),
        ("mosaicml/mpt-7b", 6_649_286_656, None),
        ("mosaicml/mpt-30b-instruct", 29_958_295_552, None),
        ("facebook/opt-6.7b", 6_658_473_984, 2048),
        ("EleutherAI/pythia-6.9b-deduped", 6_857_302_016, None),
        ("EleutherAI/gpt-j-6b", 6_050_882_784, 2048),
        ("bigscience/bloom-7b1", 7_069_016_064, None),
        ("google/gemma-7b-it", 8_537_680_896, None),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200, None),
        ("bigcode/starcoder2-15b", 15_957_889_024, None),
        ("ByteDance-Seed/Seed-OSS-36B-Base", 36_151_104_512, None),
    ],
)
def test_released_models_have_their_parameters(name: str, count: int, context: int | None) -> None:
    known = released(name)
    assert known is not None
    model, what = known
    assert parameters(model) == pytest.approx(count, rel=1e-3)
    assert model.context == context
    assert ("of the catalogue" in what) == (model.name in catalog.model_names())


def test_quantised_checkpoints_are_told_apart() -> None:
    assert quantised("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit") == (
        "unsloth/Qwen2.5-7B-Instruct"
    )
    assert quantised("TheBloke/Llama-2-7B-GPTQ") == "TheBloke/Llama-2-7B"
    assert quantised("me/mine-4bit") is None
    assert quantised("Qwen/Qwen3-8B-FP8") == "Qwen/Qwen3-8B"
    assert quantised("Qwen/Qwen2.5-7B") is None


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Qwen/Qwen3-8B-FP8", "8bit"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "8bit"),
        ("neuralmagic/Qwen2.5-7B-Instruct-quantized.w8a8", "8bit"),
        ("unsloth/llama-3-8b-bnb-4bit", "4bit"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4", "4bit"),
        ("TheBloke/Llama-2-7B-GPTQ", "4bit"),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "4bit"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "4bit"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "16bit"),
        ("Qwen/Qwen3-8B", "16bit"),
        ("me/fp8-notes", "16bit"),
    ],
)
def test_a_name_tells_the_bits_of_its_weights(name: str, bits: str) -> None:
    assert stored_bits(name) == bits
    assert bits == "16bit" or "quantized" in name or model_named(name) is not None


def test_the_first_qwen_counts_both_halves_of_its_network() -> None:
    config = {"model_type": "qwen", "hidden_size": 64, "num_hidden_layers": 2}
    model = model_of_config({**config, "num_attention_heads": 4, "intermediate_size": 96}, "")
    assert (model.ffn, model.family, model.tied_embeddings) == (48, "llama", False)
