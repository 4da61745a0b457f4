"""Hostile values: for fields of files, for options, and for the bytes of whole files."""

import codecs
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

LONG = "x" * 60_000
INVALID_BYTES = "\udcff\udcfe"


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# What a field of a YAML or JSON file may hold instead of what it should.
FIELD_VALUES: Sequence[Any] = (
    *(None, "", [], {}, [[]], [{}], {"a": {}}, _nested(60), [None], [1, "a"]),
    *(True, False, -1, 0, 1, 2, 3, 7, 61, 1000, 2**31, 2**63, 10**12, 10**30, -(10**30)),
    *(0.5, 1.5, -0.5, 1e-9, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("1", "1.5 s", "1e3", "nan", "inf", "0x10", "1_000", "yes", "٣", "é", "a\nb", "a\0b", LONG),
    *("../../etc/passwd", "/dev/zero", "/", "./loop.yaml", "none.yaml", INVALID_BYTES[:0] + "~"),
)
# What an option may be given as; empty and blank texts among them.
NUMBERS: Sequence[str] = (
    *("", " ", "-1", "0", "-0", "1", "+5", "2", "3", "7", "61", "1000", "1.5", "0.5", "nan", "inf"),
    *("-inf", "1e3", "1e308", "1e-308", "1e400", "2147483648", "9" * 30, "9" * 5000, "٣", "1_000"),
    *("0x10", "é", "1 s", "--", "-", LONG, INVALID_BYTES, "999999999", "1000000000"),
)
# Numbers that no option takes.
NO_NUMBERS: Sequence[str] = ("", " ", "1.5 s", "nan s", "é", "0x10", LONG, INVALID_BYTES, "--")
NAMES: Sequence[str] = (
    *(
        "",
        " ",
        "é",
        "GPT3-125M",
        "gpt3-125m ",
        "../gpt3-125m",
        "gpt3",
        "gpt3-125m,gpt3-125m",
        "none",
    ),
    *(
        "l4-24gb:0",
        "l4-24gb:-1",
        "l4-24gb:1,",
        ":",
        ",",
        ":1",
        "l4",
        "L40S",
        "H1000",
        "/",
        ".",
        "-",
    ),
    *(
        "None",
        "nan",
        "0",
        LONG,
        INVALID_BYTES,
        "a\nb",
        "x" * 300,
        "mist,",
        "{}",
        "*",
        "~",
        "./x.yaml",
    ),
    *("l4-24gb:1000000000", "l4-24gb:1,l4-24gb:1", "l4-24gb:99999999999999999999", "loop.yaml"),
    *("folder.yaml", "endless.yaml", "./none.json", "folder", "brackets.yaml", "binary.json"),
)
PATHS: Sequence[str] = (
    *("", ".", "/", "..", "none", "none/none", "folder", "loop", "/dev/null", "/dev/full"),
    *("/proc/self/mem", "endless.yaml", "x" * 300, "x/" * 3000, INVALID_BYTES, "~", "-", "binary"),
    *("brackets.yaml", "/proc/none/x", "é", "a\nb", "file/x", "file"),
)


def of_bytes(random: Random, content: bytes) -> tuple[str, bytes]:
    """A file's content made hostile as a whole, and what was done to it."""
    name, change = random.choice(_CHANGES)
    return name, change(random, content)


def _flipped(random: Random, content: bytes) -> bytes:
    changed = bytearray(content or b"x")
    for _ in range(random.randint(1, 8)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _doubled_line(random: Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b"\n"]
    place = random.randrange(len(lines))
    return b"".join([*lines[: place + 1], lines[place], *lines[place + 1 :]])


def _lost_line(random: Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b"\n"]
    del lines[random.randrange(len(lines))]
    return b"".join(lines)


def _cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _inserted(insert: bytes) -> Callable[[Random, bytes], bytes]:
    def inserted(random: Random, content: bytes) -> bytes:
        place = random.randrange(len(content) + 1)
        return content[:place] + insert + content[place:]

    return inserted


def _growing(_: Random, content: bytes) -> bytes:
    lines = [b"a0: &a0 [1, 1]"]
    lines += [b"a%d: &a%d [*a%d, *a%d]" % (n, n, n - 1, n - 1) for n in range(1, 40)]
    return content + b"\n" + b"\n".join(lines) + b"\n"


Change = Callable[[Random, bytes], bytes]
_CHANGES: Sequence[tuple[str, Change]] = (
    ("empty", lambda _, content: content[:0]),
    ("blank", lambda _, content: b" \n\n\t\n" + content[:0]),
    ("flipped bytes", _flipped),
    ("flipped bytes", _flipped),
    ("line twice", _doubled_line),
    ("line twice", _doubled_line),
    ("line lost", _lost_line),
    ("line lost", _lost_line),
    ("cut off", _cut),
    ("cut off", _cut),
    ("60 KB of brackets", lambda _, content: b"[" * 60_000 + content),
    ("60 KB of brackets", lambda _, content: content + b"\nx: " + b"[" * 60_000),
    ("60 KB of braces", lambda _, content: content + b"\nx: " + b"{a: " * 15_000),
    ("60 KB of indicators", lambda _, content: content + b"\nx:\n  " + b"- " * 30_000),
    ("60 KB of quotes", _inserted(b'"' * 60_000)),
    ("60 KB of dollars", _inserted(b"$(" * 30_000)),
    ("brackets inside", _inserted(b"[" * 60_000)),
    ("long line", _inserted(b"x" * 1_000_000)),
    ("zero bytes", _inserted(b"\0\0\0")),
    ("byte order mark", lambda _, content: codecs.BOM_UTF8 + content),
    ("byte order mark", lambda _, content: codecs.BOM_UTF8 + content),
    ("carriage returns", lambda _, content: content.replace(b"\n", b"\r\n")),
    ("carriage returns alone", lambda _, content: content.replace(b"\n", b"\r")),
    ("UTF-16", lambda _, content: content.decode("utf-8", "replace").encode("utf-16")),
    ("Latin-1", _inserted("é".encode("latin-1"))),
    ("growing aliases", _growing),
    ("random bytes", lambda random, content: random.randbytes(len(content) + 64)),
    ("surrogate", _inserted(b"\xed\xa0\x80")),
    ("control letters", _inserted(b"\x1b[31m\x07\x08")),
    ("twice whole", lambda _, content: content + b"\n" + content),
    ("two documents", lambda _, content: content + b"\n---\n" + content),
    ("tabs", lambda _, content: content.replace(b"  ", b"\t")),
)
