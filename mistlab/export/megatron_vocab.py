"""The vocabulary that a launch line of Megatron-LM or a relative trains with, by its tokenizer."""

from pathlib import PurePath

from mistlab.export.found import Found
from mistlab.export.megatron_flags import Options
from mistlab.export.megatron_tables.tokenizers import BY_PATCH_TYPE, BY_TYPE, size_by_name
from mistlab.values.errors import InputError
from mistlab.values.model import VOCAB_MULTIPLE

_NULL = ("NullTokenizer", "NullMultimodalTokenizer")
_GPT2 = "GPT2BPETokenizer"
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
        raise _unknown(options, f"--patch-tokenizer-type {kind}")
    return None


def _tokens(options: Options, found: Found) -> int:
    """The tokens of a line's tokenizer, special ones included."""
    said, kind = options.whole("--vocab-size"), options.text("--tokenizer-type")
    if kind in _NULL and said is not None:
        # The tokenizer adds the end of a text (up to core 0.18).
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
        raise _unknown(options, f"--tokenizer-type {kind}")
    text = f"{known} tokens, those of {_words(options, kind)}: --vocab-size is not given"
    found.remark("assumed", "model.vocab", text)
    return known


def _known(options: Options, kind: str | None) -> int | None:
    """The size of a well-known tokenizer; None if a type or a name is said and not known."""
    for name in _NAMES:
        if name in options and (size := size_by_name(_name_of(options, name))) is not None:
            return size
    if kind is not None and kind in BY_TYPE:
        return BY_TYPE[kind]
    names = [name for name in (*_NAMES, "--vocab-file") if name in options]
    if kind is None and (not names or names == ["--vocab-file"]) and "--vocab-size" not in options:
        # pretrain_gpt.py's default.
        return BY_TYPE[_GPT2]
    return None


def _name_of(options: Options, option: str) -> str:
    """A tokenizer's name or path as far as it is known, unknown parts as the script writes them."""
    options.taken.add(option)
    words = options.words[option]
    name = words[0] if words else ""
    # A model's file says less than the folder that it lies in.
    return str(PurePath(name).parent / PurePath(name).stem) if "." in PurePath(name).name else name


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
    names = [f"{name} {options.words[name][0]}" for name in _NAMES if options.words.get(name)]
    return ", ".join(names) or f"--tokenizer-type {kind or _GPT2}"


def _unknown(options: Options, kind: str) -> InputError:
    names = [f"{name} {' '.join(options.words[name])}" for name in _NAMES if name in options]
    line = options.given["--tokenizer-type"].line if "--tokenizer-type" in options else 0
    where = f" (line {line})" if line else ""
    tokenizer = ", ".join([*([] if kind.endswith("None") else [kind]), *names])
    return InputError(
        f"--vocab-size: is not said, and the vocabulary of {tokenizer}{where} is not known here: "
        "give --vocab-size N, or add --vocab-size or --padded-vocab-size to the line"
    )
