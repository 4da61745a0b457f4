"""The vocabulary that a launch line of Megatron-LM or a relative trains with, by its tokenizer."""

from pathlib import PurePath

from mistlab.core.values import InputError
from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options
from mistlab.export.megatron_tables.tokenizers import BY_PATCH_TYPE, BY_TYPE, size_by_name
from mistlab.plan.workload import VOCAB_MULTIPLE

_NULL = ("NullTokenizer", "NullMultimodalTokenizer")
_GPT2 = "GPT2BPETokenizer"
_OF_ENCODERS = "BertWordPiece"
_LLAMA2 = "Llama2Tokenizer"
# Names of files, and of folders that say nothing of the tokenizer in them.
_GPT2_FILES, _LLAMA_FILES = ("vocab.json", "encoder.json"), ("tokenizer.model",)
_PLAIN_FOLDERS = frozenset(
    ("", "data", "dataset", "datasets", "tokenizer", "tokenizers", "vocab", "models", "assets")
)
_NAMES = ("--tokenizer-model", "--tokenizer-name-or-path")


def vocab_of(options: Options, found: Found, given: int | None = None) -> int:
    """The vocabulary in training, padded as Megatron-LM does unless plans would pad it so
    themselves; ``given`` is what a user says beside the file."""
    if given is not None:
        return _padded(options, given)
    if (whole := options.whole("--padded-vocab-size", minimum=0)) is not None and whole > 0:
        return whole
    if (patched := _patched(options)) is not None:
        return patched
    return _padded(options, _tokens(options, found))


def _patched(options: Options) -> int | None:
    """The vocabulary of Pai-Megatron-Patch's tokenizers; None for any other line."""
    kind = options.text("--patch-tokenizer-type")
    extra = options.whole("--extra-vocab-size", minimum=0)
    if kind is not None and kind in BY_PATCH_TYPE:
        return BY_PATCH_TYPE[kind] + (extra or 0)
    if extra is not None and extra > 0 and (vocab := options.whole("--vocab-size")) is not None:
        return vocab + extra
    if kind is not None and kind != _GPT2:
        raise _unknown(options, kind)
    return None


def _tokens(options: Options, found: Found) -> int:
    """The tokens of a line's tokenizer, special ones included."""
    said, kind = options.whole("--vocab-size"), options.text("--tokenizer-type")
    if kind is not None and kind.startswith(_OF_ENCODERS):
        where = options.where("--tokenizer-type")
        message = f"{where}: {kind} is of encoders: give a launch line that trains a decoder"
        raise InputError(message)
    if kind in _NULL and said is not None:
        text = f"{said + 1} tokens: {kind} adds one to --vocab-size {said}, up to core 0.18"
        found.remark("assumed", "model.vocab", text)
        return said + 1
    known = _known(options, kind)
    if said is not None:
        if known is not None and _padded(options, known) != _padded(options, said):
            text = (
                f"--vocab-size {said}, but the tokenizer has {known} tokens: took the tokenizer's"
            )
            found.remark("contradicting", "model.vocab", text)
            return known
        return said
    if known is None:
        raise _unknown(options, kind)
    text = f"{known} tokens, as {_words(options, kind)} has: --vocab-size is not given"
    found.remark("assumed", "model.vocab", text)
    return known


def _known(options: Options, kind: str | None) -> int | None:
    """The size of a well-known tokenizer; None if a type or a name is said and not known."""
    names = [name for name in _NAMES if name in options]
    if kind is None and not names and "--vocab-size" in options:
        return None
    if kind in (None, _GPT2) and not (kind is None and names):
        # pretrain_gpt.py's default.
        return _by_file(options, "--vocab-file", BY_TYPE[_GPT2], _GPT2_FILES)
    sizes = [size_by_name(_name_of(options, name)) for name in (*names, "--model-name")]
    if size := next((size for size in sizes if size is not None), None):
        return size
    if kind == _LLAMA2:
        return _by_file(options, "--tokenizer-model", BY_TYPE[_LLAMA2], _LLAMA_FILES)
    return BY_TYPE.get(kind or "") or _by_file(options, "--vocab-file", None, _LLAMA_FILES)


def _by_file(
    options: Options, option: str, usual: int | None, files: tuple[str, ...]
) -> int | None:
    """The size of a tokenizer by the file that holds it: a well-known one, or the ``usual`` one if
    the file's name is unknown or says nothing else."""
    name = _name_of(options, option)
    if (size := size_by_name(name)) is not None:
        return size
    path = PurePath(name)
    folders = [part for part in path.parts[:-1] if part.lower().strip("./") not in _PLAIN_FOLDERS]
    is_plain = path.name in files and (option != "--vocab-file" or not folders)
    is_open = not name or "$" in name or "<" in name
    return usual if is_open or is_plain else None


def _name_of(options: Options, option: str) -> str:
    """A tokenizer's name or path as far as it is known, unknown parts as the script writes them."""
    options.taken.add(option)
    words = options.words.get(option, ())
    return words[0] if words else ""


def _padded(options: Options, vocab: int) -> int:
    tensor = options.whole("--tensor-model-parallel-size") or 1
    divisor = options.whole("--make-vocab-size-divisible-by") or VOCAB_MULTIPLE
    padded = -(-vocab // (divisor * tensor)) * divisor * tensor
    by_plans = vocab
    if vocab % tensor:
        multiple = VOCAB_MULTIPLE * tensor
        by_plans = -(-vocab // multiple) * multiple
    return vocab if padded == by_plans else padded


def _words(options: Options, kind: str | None) -> str:
    """A line's tokenizer in words."""
    given = [f"--tokenizer-type {kind}"] if kind else []
    for name in (*_NAMES, "--vocab-file"):
        given += [f"{name} {word}" for word in options.words.get(name, ())[:1]]
    return " ".join(given) or _GPT2


def _unknown(options: Options, kind: str | None) -> InputError:
    line = options.given["--tokenizer-type"].line if "--tokenizer-type" in options else 0
    where = f" (line {line})" if line else ""
    return InputError(
        f"--vocab-size: is not said, and the vocabulary of {_words(options, kind)}{where} is not "
        "known here: give --vocab-size N, or add --vocab-size or --padded-vocab-size to the line"
    )
