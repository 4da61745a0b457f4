"""Sizes of vocabularies by the names of well-known tokenizers.

Megatron-LM takes a tokenizer's own number of tokens, special ones included, and pads it. A name is
matched in the last parts of a path, in small letters.
"""

import re
from collections.abc import Mapping

# Types of tokenizers that fix the vocabulary, with the source of the number.
BY_TYPE: Mapping[str, int] = {
    # OpenAI's gpt2 vocab.json: 50,000 merges, 256 bytes and the end of a text.
    "GPT2BPETokenizer": 50257,
    # The released tokenizer.model of Llama and Llama 2 (SentencePiece).
    "Llama2Tokenizer": 32000,
    # Megatron-LM's fallback of its TikTokenizer, 2 ** 17.
    "TikTokenizer": 131072,
}
# Types of Pai-Megatron-Patch (``--patch-tokenizer-type``): the vocabulary before
# ``--extra-vocab-size``, which is not padded (``megatron_patch/tokenizer/__init__.py``).
BY_PATCH_TYPE: Mapping[str, int] = {
    "LLamaTokenizer": 32000,
    "LLama2Tokenizer": 32000,
    "LLama3Tokenizer": 128000,
    "MistralTokenizer": 32000,
    "QwenTokenizer": 151851,
    "Qwen2Tokenizer": 151643,
    "Qwen3Tokenizer": 151643,
    "DeepSeekV2Tokenizer": 100000,
    "FalconTokenizer": 65024,
    "YiTokenizer": 64000,
    "StarcoderTokenizerFromHF": 49152,
    "BloomTokenizerFromHF": 250880,
}
# Patterns of names of models and tokenizers, with the number of tokens of the released tokenizer.
_BY_NAME: Mapping[str, int] = {
    # Meta's releases: SentencePiece models, CodeLlama's with 16 more; tiktoken of Llama 3 and 4.
    r"code-?llama": 32016,
    r"llama-?4(?!\d)": 202048,
    r"llama-?v?3(?!\d)|llama-?3[123]\b": 128256,
    r"llama-?v?[12](?![\db])|llama-(7b|13b|30b|33b|65b)|vicuna|tinyllama": 32000,
    # Mistral AI's releases.
    r"mistral-?nemo": 131072,
    r"mistral-7b(-instruct)?-v0\.3|mixtral-8x22b-(instruct-)?v0\.3": 32768,
    r"mi[sx]tral-(7b|8x7b)": 32000,
    # Alibaba's releases: 151,643 merges and bytes, and the special tokens of each generation.
    r"qwen-?3": 151669,
    r"qwen-?2\.5|qwen25|qwq": 151665,
    r"qwen-?(1\.5|2)(-|\b)": 151646,
    # DeepSeek's releases.
    r"deepseek-?(v3|r1)": 128815,
    r"deepseek-?(v2|coder-v2)": 100002,
    # Google's Gemma and Gemma 2.
    r"gemma-?(2-|2b|7b)": 256000,
    # EleutherAI's gpt-neox-20b, which Pythia shares.
    r"gpt-?neox|pythia": 50277,
    # OpenAI's gpt2, whatever its size.
    r"gpt-?2": 50257,
    # BigScience's BLOOM, TII's Falcon, Baichuan, Shanghai AI Laboratory's InternLM 2, 01.AI's Yi.
    r"bloom": 250680,
    r"falcon-?(7b|40b|180b)": 65024,
    r"baichuan-?2": 125696,
    r"baichuan": 64000,
    r"internlm-?2": 92544,
    r"\byi-": 64000,
    # BigCode's StarCoder and StarCoder 2.
    r"starcoder": 49152,
    # NVIDIA's tokenizer of Nemotron-4 (SentencePiece).
    r"nemotron.*256k": 256000,
    # OpenAI's encodings by name.
    r"cl100k": 100277,
    r"o200k": 200019,
}


def size_by_name(name: str) -> int | None:
    """The number of tokens of a tokenizer, by the name of its folder, file or model."""
    parts = [part for part in re.split(r"[/\\]", name.lower()) if part]
    for part in reversed(parts[-3:]):
        for pattern, size in _BY_NAME.items():
            if "$" not in part and re.search(pattern, part.replace("_", "-")):
                return size
    return None
