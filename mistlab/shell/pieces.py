"""Pieces of expanded words, and how they are split into fields or joined to one text."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from mistlab.shell.patterns import quoted
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, joined
from mistlab.shell.state import State
from mistlab.shell.syntax import RawWord

_WHITE = " \t\n"


class Piece(NamedTuple):
    """A part of an expanded word; one that ``splits`` is divided into fields at blanks.

    One that ``ends`` only parts two fields, as between the values of ``"$@"``.
    """

    text: Text
    quoted: bool = False
    splits: bool = False
    ends: bool = False


BOUNDARY = Piece(Text(), ends=True)


class Expanding(Protocol):
    """What expansions of variables ask of the expansion of words."""

    session: Session
    state: State

    def text(self, word: RawWord) -> Text:
        """A word as one text."""

    def pattern(self, word: RawWord) -> Text:
        """A word as a pattern, in which quoted characters stand for themselves."""

    def pieces(self, word: RawWord, *, splits: bool) -> list[Piece]:
        """A word's pieces."""

    def number(self, word: RawWord) -> int:
        """A word's value as an arithmetic expression."""

    def number_in(self, text: str, line: int) -> int:
        """A text's value as an arithmetic expression."""


def separators(state: State) -> str:
    """The characters at which fields end: ``IFS``."""
    variable = state.variables.get("IFS")
    text = variable.text if variable else None
    return text.chars if text is not None and text.is_known else _WHITE


def one_text(pieces: Iterable[Piece]) -> Text:
    """Pieces as one text, with a blank between the values of ``$@``."""
    return joined(Text(" ") if piece.ends else piece.text for piece in pieces)


def one_pattern(pieces: Iterable[Piece]) -> Text:
    """Pieces as a pattern."""
    texts = list[Text]()
    for piece in pieces:
        chars = quoted(piece.text.chars) if piece.quoted else piece.text.chars
        texts.append(Text(chars, assumed=piece.text.assumed))
    return joined(texts)


def fields_of(pieces: Iterable[Piece], ends: str) -> list[Text]:
    """The fields that a word's pieces give; ``ends`` are the characters of ``IFS``."""
    fields, current = list[Text](), list[Text]()
    has_field = False

    def close(*, always: bool = False) -> None:
        nonlocal has_field
        if has_field or always:
            fields.append(joined(current))
        current.clear()
        has_field = False

    for piece in pieces:
        if piece.ends:
            close()
        elif piece.quoted or not piece.splits:
            current.append(piece.text)
            has_field = True
        else:
            for part, delimiter in _split(piece.text, ends):
                if part:
                    current.append(part)
                    has_field = True
                if delimiter:
                    close(always=delimiter.strip(_WHITE) != "")
    close()
    return fields


def _split(text: Text, ends: str) -> list[tuple[Text, str]]:
    """The parts of a text with the delimiter behind each."""
    parts, start, at, chars = list[tuple[Text, str]](), 0, 0, text.chars
    while at < len(chars):
        if chars[at] not in ends:
            at += 1
            continue
        stop = _delimiter(chars, at, ends)
        parts.append((text.part(start, at), chars[at:stop]))
        start = at = stop
    if start < len(chars):
        parts.append((text.part(start), ""))
    return parts


def _delimiter(chars: str, at: int, ends: str) -> int:
    """The end of a delimiter: blanks with at most one other character among them."""
    others = 0
    while at < len(chars) and chars[at] in ends:
        others += chars[at] not in _WHITE
        if others > 1:
            break
        at += 1
    return at
