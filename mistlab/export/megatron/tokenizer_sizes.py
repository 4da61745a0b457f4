"""Lists the vocabulary sizes of well-known tokenizers, by the types that Megatron-LM and its
relatives have, and by words in the names of models and of vocabularies.

Words are matched in the last parts of a path, in small letters.
"""

import re
from collections.abc import Mapping
from pathlib import PurePath

from mistlab.export.megatron.launched_ranks import is_decoder, trains_bert

# The vocabulary size of each tokenizer type for which it is fixed.
BY_TYPE: Mapping[str, int] = {
    # GPT-2's vocab.json of OpenAI: 50,000 merges, 256 bytes and the end of a text.
    "GPT2BPETokenizer": 50257,
    # The released tokenizer.model of Llama and Llama 2 (SentencePiece).
    "Llama2Tokenizer": 32000,
    # The size to which Megatron-LM's TikTokenizer falls back, 2 ** 17.
    "TikTokenizer": 131072,
}
# The vocabulary size of each tokenizer type of Pai-Megatron-Patch (``--patch-tokenizer-type``).
# ``--extra-vocab-size`` is added to it, and the sum is not padded
# (``megatron_patch/tokenizer/__init__.py``).
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
# Patterns in the names of models and tokenizers, each with the vocabulary size of the released
# tokenizer.
_BY_NAME: Mapping[str, int] = {
    # Tokenizers released by Meta: SentencePiece for Llama 1 and 2 (CodeLlama's has 16 more tokens),
    # tiktoken for Llama 3 and 4.
    r"code-?llama": 32016,
    r"llama-?4(?!\d)": 202048,
    r"llama-?v?3(?!\d)|llama-?3[123]\b": 128256,
    r"llama-?v?[12](?![\db])|llama-(7b|13b|30b|33b|65b)|vicuna|tinyllama": 32000,
    # Tokenizers released by Mistral AI.
    r"mistral-?nemo": 131072,
    r"mistral-7b(-instruct)?-v0\.3|mixtral-8x22b-(instruct-)?v0\.3": 32768,
    r"mi[sx]tral-(7b|8x7b)": 32000,
    # Tokenizers released by Alibaba: 151,643 merges and bytes, and the special tokens of each
    # generation.
    r"qwen-?3": 151669,
    r"qwen-?2\.5|qwen25|qwq": 151665,
    r"qwen-?(1\.5|2)(-|\b)": 151646,
    # Tokenizers released by DeepSeek.
    r"deepseek-?(v3|r1)": 128815,
    r"deepseek-?(v2|coder-v2)": 100002,
    # The tokenizer of Google's Gemma and Gemma 2.
    r"gemma-?(2-|2b|7b)": 256000,
    # The tokenizer of EleutherAI's gpt-neox-20b, which Pythia shares.
    r"gpt-?neox|pythia": 50277,
    # OpenAI's GPT-2 tokenizer, which is the same for all sizes of the model.
    r"gpt-?2": 50257,
    # Tokenizers of BigScience's BLOOM, TII's Falcon, Baichuan, Shanghai AI Laboratory's InternLM 2,
    # and 01.AI's Yi.
    r"bloom": 250680,
    r"falcon-?(7b|40b|180b)": 65024,
    r"baichuan-?2": 125696,
    r"baichuan": 64000,
    r"internlm-?2": 92544,
    r"\byi-": 64000,
    # The tokenizers of BigCode's StarCoder and StarCoder 2.
    r"starcoder": 49152,
    # NVIDIA's tokenizer of Nemotron-4 (SentencePiece) has 256,000 tokens.
    r"nemotron.*256k": 256000,
    # Encodings of OpenAI's tiktoken, by their names.
    r"cl100k": 100277,
    r"o200k": 200019,
}


def size_by_name(name: str) -> int | None:
    """Return the vocabulary size of a well-known tokenizer or model, recognised by its name or
    path.
    """
    parts = [part for part in re.split(r"[/\\]", name.lower()) if part]
    for part in reversed(parts[-3:]):
        for pattern, size in _BY_NAME.items():
            if "$" not in part and re.search(pattern, part.replace("_", "-")):
                return size
    return None


# Tokenizers of word pieces, which BERT has.


# The tokenizer that pretrain_bert.py uses if a launch line names none.
WORD_PIECES = "BertWordPieceLowerCase"
# The vocabulary size of each tokenizer type of word pieces: those of bert-large-uncased and
# bert-large-cased.
_OF_WORD_PIECES: Mapping[str, int] = {WORD_PIECES: 30522, "BertWordPieceCase": 28996}
# Words in the path of a vocabulary, each with the size of the released vocabulary.
_BY_WORD: Mapping[str, int] = {
    "chinese": 21128,
    "multilingual": 119547,
    "multi_cased": 119547,
    "uncased": 30522,
    "cased": 28996,
}
_PLAIN_NAME = re.compile(r"(bert[-_]?)?vocab(\.txt)?", re.IGNORECASE)


def has_word_pieces(kind: str | None) -> bool:
    """Whether a tokenizer type stands for word pieces of BERT."""
    return kind is not None and kind.startswith("BertWordPiece")


def may_have_word_pieces(program: str) -> bool:
    """Whether a program trains the model that it is known to train with any tokenizer; other
    programs are taken to train an encoder if the tokenizer has word pieces.
    """
    return bool(program) and (is_decoder(program) or trains_bert(program))


def size_of_word_pieces(kind: str, path: str) -> int | None:
    """Return the vocabulary size of a tokenizer of word pieces, by the path of its vocabulary; None
    if neither tells it.
    """
    for word, size in _BY_WORD.items():
        if word in path.lower():
            return size
    is_open = not path or "$" in path or _PLAIN_NAME.fullmatch(PurePath(path).name)
    return _OF_WORD_PIECES.get(kind) if is_open else None
