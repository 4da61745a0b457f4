"""Expands words of a script: variables, substitutions and arithmetic, then fields."""

from collections.abc import Iterable

from mistlab.shell.dollar_values import dollar_pieces, key_of, words_of_key
from mistlab.shell.flows import run_apart
from mistlab.shell.integers import Names, NotKnownError, number_of
from mistlab.shell.pieces import Piece, fields_of, one_pattern, one_text, separators
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, plain
from mistlab.shell.state import State, Status
from mistlab.shell.syntax import Arithmetic, Dollar, Literal, Pipe, RawWord, Substitution, WordPart
from mistlab.shell.variables import Absence, assign, unset_text, value_of
from mistlab.shell.word import Unknown


class Words:
    """Expands words in a state; ``assumed`` are the notes that all of them rest on.

    ``status`` is that of the last command that was substituted.
    """

    def __init__(self, session: Session, state: State) -> None:
        self.session = session
        self.state = state
        self.assumed: frozenset[str] = frozenset()
        self.status: Status | None = None

    def fields(self, words: Iterable[RawWord]) -> list[Text]:
        """Words as the arguments of a command."""
        ends = separators(self.state)
        return [
            field for word in words for field in fields_of(self.pieces(word, splits=True), ends)
        ]

    def text(self, word: RawWord) -> Text:
        """A word as one text, as assignments take it."""
        return one_text(self.pieces(word, splits=False))

    def pattern(self, word: RawWord) -> Text:
        """A word as a pattern, in which quoted characters stand for themselves."""
        return one_pattern(self.pieces(word, splits=False))

    def pieces(self, word: RawWord, *, splits: bool) -> list[Piece]:
        """A word's pieces in order."""
        self.session.spend(word.line)
        pieces = list[Piece]()
        for part in word.parts:
            if isinstance(part, Dollar):
                pieces += dollar_pieces(self, part, splits=splits)
            else:
                pieces.append(self._piece(part, splits))
        for piece in pieces:
            self.assumed |= piece.text.assumed
        return pieces

    def _piece(self, part: WordPart, splits: bool) -> Piece:
        if isinstance(part, Literal):
            blank = splits and not part.quoted and any(each in " \t\n" for each in part.text)
            return Piece(plain(part.text, part.line), part.quoted, blank)
        if isinstance(part, Arithmetic):
            return Piece(self._arithmetic(part), part.quoted, splits)
        if isinstance(part, Substitution):
            return Piece(self._substituted(part), part.quoted, splits)
        assert isinstance(part, Pipe)
        is_path = part.source[1:2] == "("
        reason = "is a path of a running shell" if is_path else "is left to be filled in"
        return Piece(self.session.unknown_at(part.line, part.source, reason), quoted=True)

    def _arithmetic(self, part: Arithmetic) -> Text:
        before = self.assumed
        self.assumed = frozenset()
        try:
            text = plain(str(self.number(part.expression)), part.line)
        except NotKnownError as error:
            unknown = error.unknown
            text = self.session.unknown_at(part.line, part.source, unknown.reason, unknown.remedy)
        text = text.assuming(self.assumed)
        self.assumed |= before
        return text

    def _substituted(self, part: Substitution) -> Text:
        session, child = self.session, self.state.copy()
        child.output = Text()
        session.captures += 1
        run_apart(session, part.script, child)
        session.captures -= 1
        self.status = child.status
        self.state.written.update(child.written)
        text = child.output or Text()
        text = text.part(0, len(text.chars.rstrip("\n")))
        unknown = session.first_unknown(text)
        if unknown is None or len(text) > 1 or unknown.remedy:
            return text
        return session.unknown_at(part.line, part.source, unknown.reason).assuming(text.assumed)

    def number(self, word: RawWord) -> int:
        """A word's value as an arithmetic expression."""
        text = self.text(word)
        return self.number_in(text.chars, word.line)

    def number_in(self, text: str, line: int) -> int:
        """A text's value as an arithmetic expression."""
        names = Names(
            read=lambda name, key: self._read(name, key, line),
            write=lambda name, key, value: self._write(name, key, value, line),
            unknown=self._unknown,
        )
        self.session.spend(line, len(text))
        return number_of(text, names, line)

    def _unknown(self, letter: str) -> Unknown:
        unknown = self.session.first_unknown(Text(letter))
        assert unknown is not None
        return unknown

    def _read(self, name: str, key: str | None, line: int) -> str:
        """A variable's text in arithmetic, where one that the script counts up starts at 0."""
        session, state = self.session, self.state
        if key is not None and name in state.variables:
            index = key_of(self, name, words_of_key(key, line))
            if isinstance(index, Text):
                return index.chars
            value: Text | Absence = state.variables[name].items.get(index, Absence.EMPTY)
        else:
            value = value_of(session, state, name, line)
        if value is Absence.EMPTY or (value is Absence.UNSET and name in session.assigned):
            return "0"
        if value is Absence.UNSET:
            value = unset_text(session, name, f"${name}", line)
        assert isinstance(value, Text)
        self.assumed |= value.assumed
        return value.chars

    def _write(self, name: str, key: str | None, value: int, line: int) -> None:
        index = None if key is None else key_of(self, name, words_of_key(key, line))
        if isinstance(index, Text):
            raise NotKnownError(self._unknown(index.chars[0]))
        text = plain(str(value), line).assuming(self.assumed)
        assign(self.session, self.state, name, text, index)
