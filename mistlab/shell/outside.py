"""Computes the output of programs that only transform texts and numbers (``echo``, ``printf``,
``sed`` and others) without running them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal, DivisionByZero, InvalidOperation
from posixpath import normpath

from mistlab.shell.expansion import text_of_file
from mistlab.shell.lexer import escaped
from mistlab.shell.loops import Call
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, joined, plain

_FORMAT = re.compile(r"%(?:%|([-+ #0]*)(\d*)(?:\.(\d*))?([a-zA-Z]))|[^%]+|%")


def echoed(arguments: Sequence[Text]) -> Text:
    """Return what ``echo`` prints for these words."""
    rest, newline, escapes = list(arguments), True, False
    while rest and re.fullmatch(r"-[neE]+", rest[0].chars):
        options = rest.pop(0).chars
        newline &= "n" not in options
        escapes = "e" in options or (escapes and "E" not in options)
    text = joined(rest, " ")
    if escapes:
        text = text.with_chars(escaped(text.chars)) if text.is_known else text
    return joined((text, plain("\n"))) if newline else text


def printed(
    session: Session, arguments: Sequence[Text], line: int, number: Callable[[Text], int]
) -> Text:
    """Return what ``printf`` prints; it repeats its format while arguments remain."""
    if not arguments:
        return Text()
    template, rest = arguments[0], list(arguments[1:])
    if not template.is_known:
        unknown = session.first_unknown(template)
        assert unknown is not None
        return session.unknown_at(line, "$(printf ...)", unknown.reason, unknown.remedy)
    parts = list[Text]()
    pieces = list(_FORMAT.finditer(template.chars))
    takes = any(piece[4] for piece in pieces)
    while True:
        for piece in pieces:
            session.spend(line)
            parts.append(_printed(session, piece, rest, line, number))
        if not rest or not takes:
            return joined(parts)


def _printed(
    session: Session,
    piece: re.Match[str],
    rest: list[Text],
    line: int,
    number: Callable[[Text], int],
) -> Text:
    kind = piece[4]
    if not kind:
        return plain("%" if piece[0] == "%%" else escaped(piece[0]), line)
    argument = rest.pop(0) if rest else Text()
    if not argument.is_known:
        return argument
    width, precision = min(int(piece[2] or 0), 200), piece[3]
    if kind in "diuxXo":
        value = number(argument)
        shown = format(value, {"x": "x", "X": "X", "o": "o"}.get(kind, "d"))
    elif kind in "feEgG":
        shown = _decimal(argument.chars, int(precision or 6) if precision != "" else 0, kind)
    else:
        shown = escaped(argument.chars) if kind == "b" else argument.chars
        shown = _requoted(shown) if kind == "q" else shown
        shown = shown[: int(precision)] if precision else shown
    if "-" in piece[1]:
        shown = shown.ljust(width)
    else:
        shown = shown.zfill(width) if "0" in piece[1] and kind != "s" else shown.rjust(width)
    return argument.with_chars(shown) if argument.line else plain(shown, line)


def _decimal(text: str, precision: int, kind: str) -> str:
    try:
        return format(float(text or 0), f".{min(precision, 50)}{kind}")
    except ValueError:
        return format(0.0, f".{min(precision, 50)}{kind}")


def _requoted(text: str) -> str:
    """Quote a text as ``printf %q`` does."""
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", text, flags=re.ASCII) or "''"


# Computes the output of programs that only transform texts and numbers, without running them.


Program = Callable[[Sequence[str], str], str | None]
_MOST = 10_000


def output_of(program: str, arguments: Sequence[Text], given: Text | None) -> Text | None:
    """Return the output of a program, or None if only running it would tell."""
    run = PROGRAMS.get(program)
    texts = [*arguments, *([given] if given is not None else [])]
    if run is None:
        return None
    if not all(text.is_known for text in texts):
        return _last_part(program, arguments)
    out = run([text.chars for text in arguments], given.chars if given is not None else "")
    if out is None:
        return None
    line = next((text for text in reversed(texts) if text.line), Text())
    assumed = frozenset().union(*(text.assumed for text in texts))
    return line.with_chars(out).assuming(assumed)


def _last_part(program: str, arguments: Sequence[Text]) -> Text | None:
    """Compute ``basename``: the last part of a path, which may be known even if the folder is
    unknown.
    """
    if program != "basename" or len(arguments) != 1:
        return None
    text = arguments[0]
    last = text.part(text.chars.rfind("/") + 1)
    return last if "/" in text.chars and last and last.is_known else None


def _basename(arguments: Sequence[str], _: str) -> str | None:
    if not arguments or arguments[0].startswith("-"):
        return None
    name = arguments[0].rstrip("/").rpartition("/")[2] or "/"
    suffix = arguments[1] if len(arguments) > 1 else ""
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


def _dirname(arguments: Sequence[str], _: str) -> str | None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return None
    head, cut, _ = arguments[0].rstrip("/").rpartition("/")
    return (head.rstrip("/") or "/" if cut else ".") + "\n"


def _realpath(arguments: Sequence[str], _: str) -> str | None:
    """Compute ``realpath``: a path without ``..``; a relative path stays relative to the script's
    folder.
    """
    paths = [each for each in arguments if not each.startswith("-")]
    return f"{normpath(paths[0])}\n" if len(paths) == 1 and paths[0] else None


def _readlink(arguments: Sequence[str], given: str) -> str | None:
    """Compute ``readlink -f`` like ``realpath``, without following links."""
    follows = any(each in ("-f", "-e", "-m") for each in arguments)
    return _realpath(arguments, given) if follows else None


def _seq(arguments: Sequence[str], _: str) -> str | None:
    separator, rest = "\n", list(arguments)
    if len(rest) > 1 and rest[0] == "-s":
        separator, rest = rest[1], rest[2:]
    elif rest and rest[0].startswith("-s"):
        separator, rest = rest[0][2:], rest[1:]
    if not 1 <= len(rest) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", each) for each in rest):
        return None
    numbers = [int(each) for each in rest]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) > 2 else 1
    if step == 0 or abs(numbers[-1] - first) // abs(step) > _MOST:
        return None
    values = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    return separator.join(map(str, values)) + "\n" if values else ""


def _expr(arguments: Sequence[str], _: str) -> str | None:
    tokens = list(arguments)
    if not all(re.fullmatch(r"-?\d{1,18}|[-+*/%()]", token) for token in tokens):
        return None
    value = _sum(" ".join(tokens), integers=True, scale=0)
    return None if value is None else f"{value}\n"


def _bc(arguments: Sequence[str], given: str) -> str | None:
    """Compute ``bc`` for decimal numbers; ``scale`` is the number of digits of a quotient."""
    scale = 20 if "-l" in arguments else 0
    lines = list[str]()
    for statement in re.split(r"[;\n]", given):
        if match := re.fullmatch(r"\s*scale\s*=\s*(\d{1,2})\s*", statement):
            scale = int(match[1])
        elif statement.strip():
            value = _sum(statement, integers=False, scale=scale)
            if value is None:
                return None
            lines.append(_shown(value))
    return "\n".join(lines) + "\n"


def _shown(value: Decimal) -> str:
    text = f"{value:f}"
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("-")
    return sign + (digits[1:] if digits.startswith("0.") else digits)


def _sum(text: str, *, integers: bool, scale: int) -> Decimal | None:
    """Evaluate an expression of ``bc`` with ``+ - * /`` and parentheses."""
    tokens = re.findall(r"\d+\.?\d*|\.\d+|[-+*/%()]|\S", text)
    if len(text) > 400 or any(not re.fullmatch(r"[\d.]+|[-+*/%()]", each) for each in tokens):
        return None
    try:
        value, rest = _added(tokens, integers, scale)
    except (InvalidOperation, DivisionByZero, IndexError, RecursionError):
        return None
    return None if rest or len(str(value)) > 40 else value


def _added(tokens: list[str], integers: bool, scale: int) -> tuple[Decimal, list[str]]:
    value, tokens = _multiplied(tokens, integers, scale)
    while tokens and tokens[0] in "+-":
        operator = tokens[0]
        other, tokens = _multiplied(tokens[1:], integers, scale)
        value = value + other if operator == "+" else value - other
    return value, tokens


def _multiplied(tokens: list[str], integers: bool, scale: int) -> tuple[Decimal, list[str]]:
    value, tokens = _factor(tokens, integers, scale)
    while tokens and tokens[0] in "*/%":
        operator = tokens[0]
        other, tokens = _factor(tokens[1:], integers, scale)
        if operator == "*":
            value = _product(value, other, scale)
        else:
            digits = Decimal(1).scaleb(0 if integers else -scale)
            quotient = (value / other).quantize(digits, rounding=ROUND_DOWN)
            value = quotient if operator == "/" else value - quotient * other
    return value, tokens


def _product(first: Decimal, second: Decimal, scale: int) -> Decimal:
    """Multiply two decimal numbers, keeping as many digits as ``bc`` does."""
    digits = [-int(each.as_tuple().exponent) for each in (first, second)]
    kept = min(sum(digits), max(scale, *digits))
    return (first * second).quantize(Decimal(1).scaleb(-kept), rounding=ROUND_DOWN)


def _factor(tokens: list[str], integers: bool, scale: int) -> tuple[Decimal, list[str]]:
    if tokens[0] == "-":
        value, rest = _factor(tokens[1:], integers, scale)
        return -value, rest
    if tokens[0] == "(":
        value, rest = _added(tokens[1:], integers, scale)
        if rest[0] != ")":
            raise InvalidOperation
        return value, rest[1:]
    return Decimal(tokens[0]), tokens[1:]


def _wc(arguments: Sequence[str], given: str) -> str | None:
    counts = {"-w": len(given.split()), "-l": given.count("\n"), "-c": len(given)}
    if len(arguments) != 1 or arguments[0] not in counts:
        return None
    return f"{counts[arguments[0]]}\n"


def _tr(arguments: Sequence[str], given: str) -> str | None:
    """Compute ``tr``: replace or delete characters or ranges of characters."""
    if len(arguments) != 2 or any("[:" in each and each not in _SETS for each in arguments):
        return None
    if arguments[0] == "-d":
        removed = _letters(arguments[1])
        return "".join(letter for letter in given if letter not in removed)
    if arguments[0].startswith("-"):
        return None
    old, new = (_letters(each) for each in arguments)
    if not old or not new:
        return None
    new += new[-1] * (len(old) - len(new))
    return given.translate({ord(before): after for before, after in zip(old, new, strict=False)})


_SETS = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:space:]": r" \t\n", "[:digit:]": "0-9"}


def _letters(text: str) -> str:
    text = _SETS.get(text, text).replace("\\n", "\n").replace("\\t", "\t")
    return re.sub(
        r"(\w)-(\w)", lambda match: "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1))), text
    )


def _cut(arguments: Sequence[str], given: str) -> str | None:
    """Compute ``cut -d, -f2``: one field of each line."""
    match = re.fullmatch(r"-d ?(.) -f ?(\d{1,3})|-f ?(\d{1,3}) -d ?(.)", " ".join(arguments))
    if match is None:
        return None
    delimiter, number = match[1] or match[4], int(match[2] or match[3])
    lines = [line.split(delimiter) for line in given.splitlines()]
    fields = [line[number - 1 : number] if len(line) > 1 else line for line in lines]
    return "".join("".join(field) + "\n" for field in fields)


def _lines(arguments: Sequence[str], given: str) -> tuple[int, list[str]] | None:
    match = re.fullmatch(r"(?:-n ?|-)?(\d{1,6})?", " ".join(arguments))
    return (int(match[1] or 10), given.splitlines(keepends=True)) if match else None


def _head(arguments: Sequence[str], given: str) -> str | None:
    lines = _lines(arguments, given)
    return "".join(lines[1][: lines[0]]) if lines else None


def _tail(arguments: Sequence[str], given: str) -> str | None:
    lines = _lines(arguments, given)
    return "".join(lines[1][-lines[0] :]) if lines and lines[0] else None


def _xargs(arguments: Sequence[str], given: str) -> str | None:
    return " ".join(given.split()) + "\n" if not arguments else None


PROGRAMS: Mapping[str, Program] = {
    "basename": _basename,
    "dirname": _dirname,
    "realpath": _realpath,
    "readlink": _readlink,
    "seq": _seq,
    "expr": _expr,
    "bc": _bc,
    "wc": _wc,
    "tr": _tr,
    "cut": _cut,
    "head": _head,
    "tail": _tail,
    "xargs": _xargs,
}
# Programs whose output is known only if their standard input is.
READERS = frozenset(("bc", "wc", "tr", "cut", "head", "tail", "xargs"))


# Computes ``sed`` with literal replacements, by which scripts complete a template of a
# configuration.


# Matches characters with a special meaning in regular expressions; a pattern with one is not
# literal text.
_MEANS_MORE = re.compile(r"[\\.\[\]*^$]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """A ``sed`` command ``s/old/new/g`` whose old text is literal."""

    old: str
    new: str
    everywhere: bool

    def of(self, text: str) -> str:
        """Replace the old text in another text, once on each line or everywhere."""
        count = -1 if self.everywhere else 1
        lines = text.split("\n")
        return "\n".join(line.replace(self.old, self.new, count) for line in lines)


def run_sed(call: Call) -> bool:
    """Compute ``sed``: print the input or a file with texts replaced; returns whether the result is
    exact.
    """
    commands, paths = _taken_apart(call.arguments)
    replacements = [_replacement(text.chars) for text in commands]
    if not commands or len(paths) > 1 or any(each is None for each in replacements):
        return False
    state = call.state
    given = text_of_file(call.session, state, paths[0]) if paths else state.input
    if given is None:
        return False
    chars = given.chars
    for each in replacements:
        assert each is not None
        chars = each.of(chars)
    call.session.spend(call.line, len(chars))
    state.print(given.with_chars(chars))
    state.status = 0
    return True


def _taken_apart(arguments: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Divide the arguments of ``sed`` into its commands and files; returns no commands if an option
    is unknown.
    """
    commands: list[Text] = []
    others: list[Text] = []
    words = iter(arguments)
    for word in words:
        if word.chars in ("-e", "--expression"):
            commands += [each for each in (next(words, None),) if each is not None]
        elif word.chars.startswith("-") and word.chars not in ("-r", "-E"):
            return [], []
        elif not word.chars.startswith("-"):
            others.append(word)
    return (commands, others) if commands else (others[:1], others[1:])


def _replacement(command: str) -> _Replacement | None:
    """Parse a replacement of ``sed``, or return None unless it replaces literal text."""
    if len(command) < 4 or command[0] != "s":
        return None
    parts = command[2:].split(command[1])
    if len(parts) != 3 or parts[2] not in ("", "g") or not parts[0]:
        return None
    old, new, flags = parts
    if _MEANS_MORE.search(old) or "\\" in new or "&" in new:
        return None
    return _Replacement(old=old, new=new, everywhere=flags == "g")
