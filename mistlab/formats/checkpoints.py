"""Finds the model that a checkpoint's name, such as ``meta-llama/Llama-3.1-8B``, stands for.

Names are compared word by word: ``meta-llama/Llama-3.1-8B-Instruct`` is the words llama, 3.1 and 8b
after those are left out that change no shape. A name with any other word is unknown. Sizes that the
catalogue has not are those of the checkpoints' published ``config.json``.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from mistlab import catalog
from mistlab.core.files import parse_settings
from mistlab.core.values import word_set
from mistlab.engines.adapters import Base
from mistlab.export.given import ask_for
from mistlab.huggingface.configurations import KIND, model_of_config
from mistlab.huggingface.type_keys import release_configs
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile

# Words in a checkpoint's name that describe training, tuning or storage, not the model's sizes.
_SHAPELESS = word_set(
    """
    meta base instruct hf chat it pt sft dpo bf16 fp16 pretrain pretrained config model v0.1 v0.2
    v1.0 2024 1124 0724 2407 2507 0425 1125 thinking preview deduped
    """
)
_BY_WORDS: Mapping[str, str] = {
    "bert uncased": "bert-base",
    "bert large uncased": "bert-large",
    "roberta": "roberta-base",
    "roberta large": "roberta-large",
    "llama 3 8b": "llama3-8b",
    "llama 3.1 8b": "llama3-8b",
    "hermes 3 llama 3.1 8b": "llama3-8b",
    "llama 3 70b": "llama3-70b",
    "llama 3.1 70b": "llama3-70b",
    "llama 3.3 70b": "llama3-70b",
    "llama 3 405b": "llama3-405b",
    "llama 3.1 405b": "llama3-405b",
    "llama 3.2 1b": "llama3.2-1b",
    "llama 3.2 3b": "llama3.2-3b",
    "llama 4 scout 17b 16e": "llama4-scout",
    "llama 4 17b16e": "llama4-scout",
    "llama 4 maverick 17b 128e": "llama4-maverick",
    "llama 4 17b128e": "llama4-maverick",
    "qwen 2.5 7b": "qwen2.5-7b",
    "qwen 2.5 coder 7b": "qwen2.5-7b",
    "qwen 2.5 math 7b": "qwen2.5-7b",
    "deepseek r1 distill qwen 7b": "qwen2.5-7b",
    "openr1 qwen 7b": "qwen2.5-7b",
    "qwen 2.5 14b": "qwen2.5-14b",
    "qwen 2.5 coder 14b": "qwen2.5-14b",
    "deepseek r1 distill qwen 14b": "qwen2.5-14b",
    "qwen 2.5 32b": "qwen2.5-32b",
    "qwq 32b": "qwen2.5-32b",
    "qwen 2.5 coder 32b": "qwen2.5-32b",
    "deepseek r1 distill qwen 32b": "qwen2.5-32b",
    "qwen 2.5 72b": "qwen2.5-72b",
    "deepseek r1 0528 qwen3 8b": "qwen3-8b",
    "deepseek r1 distill llama 8b": "llama3-8b",
    "deepseek r1 distill llama 70b": "llama3-70b",
    "qwen 3 0.6b": "qwen3-0.6b",
    "qwen 3 1.7b": "qwen3-1.7b",
    "qwen 3 4b": "qwen3-4b",
    "qwen 3 8b": "qwen3-8b",
    "qwen 3 14b": "qwen3-14b",
    "qwen 3 32b": "qwen3-32b",
    "qwen 3 30b a3b": "qwen3-30b-a3b",
    "qwen 3 coder 30b a3b": "qwen3-30b-a3b",
    "qwen 3 235b a22b": "qwen3-235b-a22b",
    "qwen 3 next 80b a3b": "qwen3-next-80b-a3b",
    "mixtral 8x7b": "mixtral-8x7b",
    "mixtral 8x22b": "mixtral-8x22b",
    "deepseek v2 lite": "deepseek-v2-lite",
    "deepseek v2": "deepseek-v2",
    "deepseek v3": "deepseek-v3",
    "deepseek v3 0324": "deepseek-v3",
    "deepseek v3.1": "deepseek-v3",
    "deepseek r1": "deepseek-v3",
    "moonlight 16b a3b": "moonlight-16b-a3b",
    "kimi k2": "kimi-k2",
    "gpt oss 20b": "gpt-oss-20b",
    "gpt oss 120b": "gpt-oss-120b",
    "glm 4.5": "glm-4.5",
    "glm 4.5 air": "glm-4.5-air",
    "olmo 2 7b": "olmo2-7b",
    "olmo 2 13b": "olmo2-13b",
    "olmo 2 32b": "olmo2-32b",
    "phi 4": "phi-4",
    "gpt j 6b": "gpt-j-6b",
    "codellama 34b": "codellama-34b",
    "qwen 3.5 397b a17b": "qwen3.5-397b-a17b",
    "qwen 3.5 35b a3b": "qwen3.6-35b-a3b",
    "qwen 3.6 35b a3b": "qwen3.6-35b-a3b",
    "llama 3.1 nemotron nano 8b v1": "llama3-8b",
    "nvidia nemotron 3 nano 30b a3b": "nemotron-3-nano",
    "nvidia nemotron 3 super 120b a12b": "nemotron-3-super",
    "nemotron h 8b 8k": "nemotron-h-8b",
    "nemotron h 56b 8k": "nemotron-h-56b",
    "nvidia nemotron 3 ultra 550b a55b": "nemotron-3-ultra",
    "nemotron 3 nano": "nemotron-3-nano",
    "nemotron 3 super": "nemotron-3-super",
    "nemotron 3 ultra": "nemotron-3-ultra",
    "minimax m2": "minimax-m2",
    "minimax m2.5": "minimax-m2",
    "phi 4 14b": "phi-4",
    "glm 5": "glm-5",
}
# The contexts of releases that share the sizes of a model with another context.
_CONTEXTS: Mapping[str, int] = {
    "llama 3.1": 131_072,
    "llama 3.3": 131_072,
    "deepseek r1 distill llama": 131_072,
    "llama 2": 4096,
    "hermes 3 llama 3.1": 131_072,
    "mistral 7b": 32_768,
    "mistral nemo": 128_000,
    "qwen 3 coder": 262_144,
    "gemma 2": 8192,
    "gemma 3 1b": 32_768,
    "gemma 3": 131_072,
    "phi 3 mini 4k": 4096,
    "phi 3 mini 128k": 131_072,
    "phi 3.5 mini": 131_072,
    "tinyllama": 2048,
}
# Words at the end of a checkpoint's name that say how its weights are quantised, and those of them
# that tell the bits.
_QUANTISED = re.compile(
    r"([-_.](unsloth|bnb|gptq|awq|gguf|hqq|fp8|(nv|mx)?fp4|nf4([-_]bf16)?|int[48]|[48]-?bit"
    r"|w[48]a(8|16)|dynamic))+$",
    re.IGNORECASE,
)
_BITS: Mapping[str, Base] = {
    r"fp8|int8|8-?bit|w8a": "8bit",
    r"n?fp?4|int4|4-?bit|w4a|gptq|awq": "4bit",
}
_LLAMA_2 = {"vocab": 32000}
_NEMO = {"vocab": 131072, "head_dim": 128, "rotary_base": 1e6}
# The sizes of a model: hidden size, blocks, heads, key and value heads, feed-forward width, and
# further fields.
_Sizes = tuple[int, int, int, int, int, Mapping[str, object]]
_SIZES: Mapping[str, _Sizes] = {
    "llama 7b": (4096, 32, 32, 32, 11008, _LLAMA_2),
    "llama 13b": (5120, 40, 40, 40, 13824, _LLAMA_2),
    "llama 30b": (6656, 60, 52, 52, 17920, _LLAMA_2),
    "llama 65b": (8192, 80, 64, 64, 22016, _LLAMA_2),
    "llama 2 7b": (4096, 32, 32, 32, 11008, _LLAMA_2),
    "llama 2 13b": (5120, 40, 40, 40, 13824, _LLAMA_2),
    "llama 2 70b": (8192, 80, 64, 8, 28672, _LLAMA_2),
    "mistral 7b": (4096, 32, 32, 8, 14336, {"vocab": 32000}),
    "mistral 7b v0.3": (4096, 32, 32, 8, 14336, {"vocab": 32768, "rotary_base": 1e6}),
    "mistral nemo": (5120, 40, 32, 8, 14336, _NEMO),
    "phi 3 mini": (3072, 32, 32, 32, 8192, {"vocab": 32064}),
    "phi 3 mini 4k": (3072, 32, 32, 32, 8192, {"vocab": 32064}),
    "phi 3 mini 128k": (3072, 32, 32, 32, 8192, {"vocab": 32064}),
    "phi 3.5 mini": (3072, 32, 32, 32, 8192, {"vocab": 32064}),
    "zephyr 7b beta": (4096, 32, 32, 8, 14336, {"vocab": 32000}),
    "tinyllama v1.1": (2048, 22, 32, 4, 5632, {"vocab": 32000}),
    "tinyllama 1.1b": (2048, 22, 32, 4, 5632, {"vocab": 32000}),
    "qwen 2.5 0.5b": (896, 24, 14, 2, 4864, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2.5 1.5b": (1536, 28, 12, 2, 8960, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2.5 math 1.5b": (1536, 28, 12, 2, 8960, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2.5 coder 1.5b": (1536, 28, 12, 2, 8960, {"vocab": 151936, "tied_embeddings": True}),
    "deepseek r1 distill qwen 1.5b": (1536, 28, 12, 2, 8960, {"vocab": 151936}),
    "qwen 2.5 3b": (2048, 36, 16, 2, 11008, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2 0.5b": (896, 24, 14, 2, 4864, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2 1.5b": (1536, 28, 12, 2, 8960, {"vocab": 151936, "tied_embeddings": True}),
    "qwen 2 7b": (3584, 28, 28, 4, 18944, {"vocab": 152064, "rotary_base": 1e6}),
    "smollm 135m": (576, 30, 9, 3, 1536, {"vocab": 49152, "tied_embeddings": True}),
    "smollm2 135m": (576, 30, 9, 3, 1536, {"vocab": 49152, "tied_embeddings": True}),
    "smollm 360m": (960, 32, 15, 5, 2560, {"vocab": 49152, "tied_embeddings": True}),
    "smollm2 360m": (960, 32, 15, 5, 2560, {"vocab": 49152, "tied_embeddings": True}),
    "smollm 1.7b": (2048, 24, 32, 32, 8192, {"vocab": 49152, "tied_embeddings": True}),
    "smollm2 1.7b": (2048, 24, 32, 32, 8192, {"vocab": 49152, "tied_embeddings": True}),
}
# Gemma's sizes: hidden size, blocks, heads, key and value heads, channels of a head, feed-forward
# width, and tokens of the sliding window. Repositories of Gemma 3 from 4 billion parameters also
# hold a model of images, which training on text leaves alone.
_GEMMA: Mapping[str, tuple[int, int, int, int, int, int, int]] = {
    "gemma 2 2b": (2304, 26, 8, 4, 256, 9216, 4096),
    "gemma 2 9b": (3584, 42, 16, 8, 256, 14336, 4096),
    "gemma 2 27b": (4608, 46, 32, 16, 128, 36864, 4096),
    "gemma 3 1b": (1152, 26, 4, 1, 256, 6912, 512),
    "gemma 3 4b": (2560, 34, 8, 4, 256, 10240, 1024),
    "gemma 3 12b": (3840, 48, 16, 8, 256, 15360, 1024),
    "gemma 3 27b": (5376, 62, 32, 16, 128, 21504, 1024),
}
_GPT2: Mapping[str, tuple[int, int, int]] = {
    "gpt2": (768, 12, 12),
    "gpt2 small": (768, 12, 12),
    "gpt2 medium": (1024, 24, 16),
    "gpt2 large": (1280, 36, 20),
    "gpt2 xl": (1600, 48, 25),
}


def model_named(path: str) -> ModelSpec | None:
    """Return the model that the name or path of a checkpoint stands for, or None if the name is
    unknown.
    """
    key = _name_of_shape(path)
    if key in ("bert cased", "bert large cased"):
        uncased = catalog.model(_BY_WORDS[f"{key.removesuffix('cased')}uncased"])
        return replace(uncased, name="", vocab=28996)
    if name := _BY_WORDS.get(key):
        return catalog.model(name)
    if sizes := _SIZES.get(key):
        hidden, layers, heads, groups, ffn, more = sizes
        return ModelSpec.of(
            family="llama",
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=groups,
            ffn=ffn,
            **more,
        )
    if key in _GEMMA:
        return _gemma(key)
    if small := _GPT2.get(key):
        hidden, layers, heads = small
        more = {"tied_embeddings": True, "biases": True, "dropout": 0.1, "vocab": 50257}
        return ModelSpec.of(family="gpt", hidden=hidden, layers=layers, heads=heads, **more)
    config = release_configs().get(key)
    return None if config is None else model_of_config(config, "")


def _gemma(key: str) -> ModelSpec:
    """Return the Gemma of this key, described as its configuration describes it."""
    hidden, layers, heads, groups, channels, ffn, window = _GEMMA[key]
    config = {
        KIND: "gemma2" if key.startswith("gemma 2") else "gemma3_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": channels,
        "intermediate_size": ffn,
        "sliding_window": window,
        "vocab_size": 256_000 if key.startswith("gemma 2") else 262_144,
    }
    return model_of_config(config, "")


def released(name: str) -> tuple[ModelSpec, str] | None:
    """Return the model that the name of a released checkpoint stands for, with the context of its
    release, and words that say what was taken; None if its sizes are not known.

    >>> released("meta-llama/Llama-3.1-8B-Instruct")[1]
    'llama3-8b of the catalogue, with a context of 131,072 tokens'
    """
    model = catalog.model(name.lower()) if name.lower() in catalog.model_names() else None
    model = model or model_named(name)
    if model is None:
        return None
    key, context = _name_of_shape(name), _context_of(name)
    if model.name:
        what = f"{model.name} of the catalogue"
    else:
        sizes = f"hidden {model.hidden}, {model.layers} layers, vocabulary {model.vocab:,}"
        what = f"a model of its published sizes ({sizes})"
    if context is not None and context != model.context:
        what += f", with a context of {context:,} tokens"
    checkpoint = "" if name == model.name else name
    model = replace(model, context=context or model.context, checkpoint=checkpoint)
    return replace(model, name=model.name or key.replace(" ", "-")), what


def _context_of(name: str) -> int | None:
    """Return the context of a release that shares the sizes of a model with another context."""
    key = _name_of_shape(name)
    return next((most for start, most in _CONTEXTS.items() if key.startswith(start)), None)


def quantised(name: str) -> str | None:
    """Return the name of a released checkpoint without the words that say how its weights are
    quantised; None if there are no such words, or if the rest is unknown.

    >>> quantised("unsloth/llama-3-8b-bnb-4bit")
    'unsloth/llama-3-8b'
    """
    rest = _QUANTISED.sub("", name)
    return rest if rest != name and released(rest) is not None else None


def stored_bits(path: str) -> Base:
    """Return the bits of a checkpoint's weights, by its name.

    >>> stored_bits("Qwen/Qwen3-8B-FP8"), stored_bits("Qwen/Qwen3-8B")
    ('8bit', '16bit')
    """
    ending = _QUANTISED.search(path.rstrip("/"))
    words = "" if ending is None else ending[0].lower()
    bits = (bits for pattern, bits in _BITS.items() if re.search(pattern, words))
    return next(bits, "16bit")


def _name_of_shape(path: str) -> str:
    """Return the words of a checkpoint's name that tell the model's family and size.

    >>> _name_of_shape("meta-llama/Meta-Llama-3.1-8B-Instruct")
    'llama 3.1 8b'
    """
    name = PurePath(path.strip().rstrip("/")).name.lower()
    name = _QUANTISED.sub("", re.sub(r"\.(ya?ml|json)$", "", name))
    name = re.sub(r"^(llama|qwen|deepseek|mistral|olmo|phi)(?=v?\d)", r"\1 ", name)
    # Words are separated by hyphens, underscores and spaces.
    words = [word for word in re.split(r"[-_ ]+", name) if word]
    words = [word for word in words if word not in _SHAPELESS]
    return " ".join(words)


# The repository on Hugging Face that publishes a catalogue model's weights.
_REPOSITORIES: Mapping[str, str] = {
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-405b": "meta-llama/Llama-3.1-405B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "olmo2-7b": "allenai/OLMo-2-1124-7B",
    "olmo2-13b": "allenai/OLMo-2-1124-13B",
    "phi-4": "microsoft/phi-4",
}


# The repositories of releases that share the sizes of a catalogue model.
_OF_RELEASES: Mapping[str, str] = {
    "llama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "llama 3.1 70b": "meta-llama/Llama-3.1-70B",
    "llama 3.3 70b": "meta-llama/Llama-3.3-70B-Instruct",
}
# Words in a checkpoint's name that say that its weights are not those of the base model.
_TUNED = word_set("instruct chat it sft dpo thinking math coder r1 distill")


def repository_of(model: ModelSpec) -> str | None:
    """Return where a model's weights are: the repository or path that its plan names, else the
    Hugging Face repository of a catalogue model; None if none is known.

    >>> repository_of(catalog.model("qwen3-8b"))
    'Qwen/Qwen3-8B'
    """
    if "/" in model.checkpoint:
        return model.checkpoint
    usual = _REPOSITORIES.get(model.name)
    if not model.checkpoint:
        return usual if usual is not None and model_named(usual) == model else None
    # A name without an owner, such as that of a function of torchtune.
    if set(re.split(r"[-_ ]+", model.checkpoint.lower())) & _TUNED:
        return None
    key = _name_of_shape(model.checkpoint)
    is_usual = usual is not None and _name_of_shape(usual) == key
    return usual if is_usual else _OF_RELEASES.get(key)


def release_of(model: ModelSpec) -> str:
    """Return the words that tell which release of a model its plan names, such as ``llama 3.1
    8b``; an empty text if it names none.
    """
    return _name_of_shape(model.checkpoint)


def needed_model(path: str, where: str, source: LaunchFile) -> ModelSpec:
    """Return the model of a checkpoint, which it names: as its config.json describes it if that
    file is present, else by the checkpoint's name.
    """
    text = source.beside(f"{path.rstrip('/')}/config.json") if path else None
    if text is not None:
        config = parse_settings(text, f"{path}/config.json")
        if KIND in config:
            return replace(model_of_config(config, PurePath(path).name), checkpoint=path)
    model = model_named(path) if path else None
    if model is None:
        problem = f"{path!r} is not the name of a known model" if path else "names no model"
        text = f"{where}: {problem}: give --model (a name of the catalogue, or a config.json)"
        ask_for("model", text)
    return replace(model, checkpoint=path, context=_context_of(path) or model.context)
