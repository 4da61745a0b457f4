"""What ``echo`` and ``printf`` print."""

import re
from collections.abc import Callable, Sequence

from mistlab.shell.dollar import escaped
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, joined, plain

_FORMAT = re.compile(r"%(?:%|([-+ #0]*)(\d*)(?:\.(\d*))?([a-zA-Z]))|[^%]+|%")


def echoed(arguments: Sequence[Text]) -> Text:
    """What ``echo`` prints."""
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
    session: Session,
    arguments: Sequence[Text],
    line: int,
    number: Callable[[Text], int],
) -> Text:
    """What ``printf`` prints; a format is used again while arguments are left."""
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
    """A text as ``%q`` quotes it."""
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", text, flags=re.ASCII) or "''"
