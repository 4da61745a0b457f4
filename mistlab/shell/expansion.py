"""Expands the words and redirections of a shell script: variables, substitutions and arithmetic,
then splitting into arguments.
"""

from collections.abc import Callable, Iterable, Sequence
from posixpath import dirname, normpath

from mistlab.shell.dollar_values import (
    Piece,
    dollar_pieces,
    fields_of,
    key_of,
    one_pattern,
    one_text,
    separators,
    words_of_key,
)
from mistlab.shell.flows import run_apart
from mistlab.shell.integers import Names, NotKnownError, number_of
from mistlab.shell.session import Absence, Session, State, Status, assign, unset_text, value_of
from mistlab.shell.shell_text import LAUNCH_LINE_ALONE, LineError, Text, Unknown, joined, plain
from mistlab.shell.syntax import (
    Arithmetic,
    Dollar,
    Literal,
    Pipe,
    RawWord,
    Redirect,
    Substitution,
    WordPart,
)

_MOST_FIELDS = 20_000


class WordExpander:
    """Expands words with the variables of a script; the notes ``assumed`` are attached to all
    results.

    ``status`` is that of the last command that was substituted.
    """

    def __init__(self, session: Session, state: State) -> None:
        self.session = session
        self.state = state
        self.assumed: frozenset[str] = frozenset()
        self.status: Status | None = None

    def fields(self, words: Iterable[RawWord]) -> list[Text]:
        """Expand the words of a command to its arguments."""
        ends, fields = separators(self.state), list[Text]()
        for word in words:
            fields += fields_of(self.pieces(word, splits=True), ends)
            if len(fields) > _MOST_FIELDS:
                message = f"more than {_MOST_FIELDS} words come from one: {LAUNCH_LINE_ALONE}"
                raise LineError(word.line, message)
        return fields

    def text(self, word: RawWord) -> Text:
        """Expand a word to a single text, as in assignments."""
        return one_text(self.pieces(word, splits=False))

    def pattern(self, word: RawWord) -> Text:
        """Expand a word to a pattern, in which quoted characters are literal."""
        return one_pattern(self.pieces(word, splits=False))

    def pieces(self, word: RawWord, *, splits: bool) -> list[Piece]:
        """Expand a word to its pieces, in order."""
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
        """Evaluate a word as an arithmetic expression."""
        text = self.text(word)
        return self.number_in(text.chars, word.line)

    def number_in(self, text: str, line: int) -> int:
        """Evaluate a text as an arithmetic expression."""
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
        """Return the text of a variable in an arithmetic expression; a variable that the script
        only increments starts at 0.
        """
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


# Applies the redirections of a script: here-documents, and files that it writes and reads.


_WRITES = (">", ">>", ">|", "&>", "&>>")


def redirected(
    session: Session, state: State, redirects: Sequence[Redirect], way: Callable[[State], None]
) -> None:
    """Run commands with their input and output redirected."""
    if not redirects:
        way(state)
        return
    expander = WordExpander(session, state)
    before_input, before_output = state.input, state.output
    path: str | None = None
    appends = False
    for redirect in redirects:
        if redirect.operator in ("<", "<<", "<<-", "<<<"):
            state.input = _input(session, state, expander, redirect)
        elif redirect.operator in _WRITES and redirect.descriptor in ("", "1"):
            path = session.rendered(expander.text(redirect.target))
            appends = redirect.operator in (">>", "&>>")
            state.output = Text()
        elif _is_to_errors(redirect):
            path, state.output = "/dev/stderr", Text()
    way(state)
    printed = state.output
    state.input = before_input
    if path is None:
        return
    state.output = before_output
    if printed is not None and not path.startswith("/dev/"):
        _write(session, state, path, printed, appends=appends)


def _is_to_errors(redirect: Redirect) -> bool:
    is_output = redirect.operator == ">&" and redirect.descriptor in ("", "1")
    return is_output and redirect.target.bare == "2"


def _write(session: Session, state: State, path: str, text: Text, *, appends: bool) -> None:
    """Record what the script writes to a file, unless a program that is not run writes it."""
    unknown = session.first_unknown(text)
    if unknown is not None and len(text) == 1:
        return
    path = normpath(path)
    before = state.written.get(path) if appends else None
    state.written[path] = joined((before, text)) if before else text


def _input(session: Session, state: State, expander: WordExpander, redirect: Redirect) -> Text:
    if redirect.operator == "<<<":
        return joined((expander.text(redirect.target), plain("\n", redirect.line)))
    if redirect.operator != "<":
        return expander.text(redirect.body[0]) if redirect.body else Text()
    target = expander.text(redirect.target)
    text = text_of_file(session, state, target)
    if text is not None:
        return text
    shown = session.rendered(target)
    return session.unknown_at(redirect.line, shown, "is a file that was not found")


def text_of_file(session: Session, state: State, path: Text) -> Text | None:
    """Return the text of a file that the script wrote, or that is in its folder."""
    shown = normpath(session.rendered(path))
    if shown in state.written:
        return state.written[shown]
    text = beside(session, path)
    return None if text is None else plain(text, path.line)


def beside(session: Session, path: Text) -> str | None:
    """Return the text of a file in the script's folder; an unknown folder is assumed to be that
    one.
    """
    known = known_path(path)
    if not known:
        return None
    known = normpath(known)
    text = session.source.beside(known)
    folder = f"{dirname(session.source.name)}/"
    if text is None and len(folder) > 1 and known.startswith(folder):
        return session.source.beside(known.removeprefix(folder))
    return text


def known_path(path: Text) -> str:
    """Return a path without unknown folders, which are assumed to be the script's folder."""
    known = path.chars
    while known and not plain(known).is_known:
        known = known.partition("/")[2]
    return known
