"""Evaluates ``$name`` and ``${...}`` in the words of a shell script."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from mistlab.shell.patterns import matches, quoted, spans, without
from mistlab.shell.session import (
    Absence,
    Key,
    Session,
    State,
    Variable,
    absence_of,
    argument_of,
    assign,
    knows_arguments,
    taken_as,
    unset_argument,
    unset_text,
    value_of,
    without_arguments,
)
from mistlab.shell.shell_text import LineError, Text, joined, plain, remedy_of
from mistlab.shell.syntax import Dollar, Literal, RawWord

_WHITE = " \t\n"


class Piece(NamedTuple):
    """A part of an expanded shell word; if ``splits`` is set, it is divided at blanks into several
    arguments.

    One that ``ends`` only parts two fields, as between the values of ``"$@"``.
    """

    text: Text
    quoted: bool = False
    splits: bool = False
    ends: bool = False


BOUNDARY = Piece(Text(), ends=True)


class Expanding(Protocol):
    """What the expansion of ``$name`` and ``${...}`` requires of the class that expands whole
    words.
    """

    session: Session
    state: State

    def text(self, word: RawWord) -> Text:
        """Expand a shell word to a single text."""

    def pattern(self, word: RawWord) -> Text:
        """Expand a shell word to a pattern, in which quoted characters are literal."""

    def pieces(self, word: RawWord, *, splits: bool) -> list[Piece]:
        """Expand a shell word to its pieces, in order."""

    def number(self, word: RawWord) -> int:
        """Evaluate a shell word as an arithmetic expression."""

    def number_in(self, text: str, line: int) -> int:
        """Evaluate a text as an arithmetic expression."""


def separators(state: State) -> str:
    """Return the value of ``IFS``: the characters at which expanded values are split into
    arguments.
    """
    variable = state.variables.get("IFS")
    text = variable.text if variable else None
    return text.chars if text is not None and text.is_known else _WHITE


def one_text(pieces: Iterable[Piece]) -> Text:
    """Join the pieces of a word to one text, the values of ``$@`` with blanks between them."""
    return joined(Text(" ") if piece.ends else piece.text for piece in pieces)


def one_pattern(pieces: Iterable[Piece]) -> Text:
    """Join the pieces of a word to one pattern."""
    texts = list[Text]()
    for piece in pieces:
        chars = quoted(piece.text.chars) if piece.quoted else piece.text.chars
        texts.append(Text(chars, assumed=piece.text.assumed))
    return joined(texts)


def fields_of(pieces: Iterable[Piece], ends: str) -> list[Text]:
    """Divide the pieces of a word into arguments at the characters ``ends``, the value of
    ``IFS``.
    """
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
    """Split a text at delimiters; each part comes with the delimiter after it."""
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
    """Return the end of a delimiter in a text: blanks with at most one other character of ``IFS``
    among them.
    """
    others = 0
    while at < len(chars) and chars[at] in ends:
        others += chars[at] not in _WHITE
        if others > 1:
            break
        at += 1
    return at


# Evaluates ``$name`` and ``${...}`` with the operators between the braces.


Value = Text | Absence


def dollar_pieces(expander: Expanding, dollar: Dollar, *, splits: bool) -> list[Piece]:
    """Expand ``$name`` or ``${...}`` to the pieces of a word."""
    subscript = dollar.subscript.bare if dollar.subscript else None
    if dollar.prefix == "!" and dollar.operator != "names" and subscript not in ("@", "*"):
        return _indirect(expander, dollar, splits=splits)
    is_many = dollar.name in ("@", "*") or subscript in ("@", "*")
    if is_many:
        return _many(expander, dollar, subscript or dollar.name, splits=splits)
    if dollar.operator == "names":
        names = sorted(name for name in expander.state.variables if name.startswith(dollar.name))
        return _spread([plain(name, dollar.line) for name in names], dollar, "@", splits=splits)
    value = _value(expander, dollar)
    if dollar.prefix == "#":
        return [Piece(_length(expander, dollar, value), dollar.quoted, splits)]
    if dollar.operator.lstrip(":") in ("-", "=", "?", "+"):
        return _chosen(expander, dollar, value, splits=splits)
    text = _present(expander, dollar, value)
    return [Piece(_changed(expander, dollar, text), dollar.quoted, splits)]


def _value(expander: Expanding, dollar: Dollar) -> Value:
    session, state, name = expander.session, expander.state, dollar.name
    if name.isdigit() or name == "BASH_SOURCE":
        number = int(name) if name.isdigit() else 0
        return argument_of(session, state, number, dollar.line)
    if name in "#?$!-":
        return _special(expander, dollar)
    variable = state.variables.get(name)
    if dollar.subscript is None or variable is None:
        return value_of(session, state, name, dollar.line)
    return _element(expander, dollar, dollar.subscript, variable)


def _element(expander: Expanding, dollar: Dollar, subscript: RawWord, variable: Variable) -> Value:
    """Return the element of a shell array at an index or key."""
    name = dollar.name
    key = key_of(expander, name, subscript)
    if isinstance(key, Text):
        return key
    text = variable.items.get(key)
    if text is None and (missing := _unknown(expander, dollar, *variable.values)):
        return missing
    return Absence.EMPTY if text is None else text


def key_of(expander: Expanding, name: str, subscript: RawWord) -> Key | Text:
    """Return the index or key of an array element as text, which is unknown if it depends on more
    than the script.
    """
    variable = expander.state.variables.get(name)
    if variable is not None and variable.is_map:
        text = expander.text(subscript)
        return text.chars if text.is_known else text
    text = expander.text(subscript)
    if not text.is_known:
        return text
    index = expander.number_in(text.chars, subscript.line)
    if index < 0 and variable is not None and variable.items:
        index += max(int(key) for key in variable.items) + 1
    return index


def _special(expander: Expanding, dollar: Dollar) -> Value:
    session, state = expander.session, expander.state
    if dollar.name == "#":
        return _count(expander, dollar)
    if dollar.name == "?" and isinstance(state.status, int):
        return plain(str(state.status), dollar.line)
    reason = "is known only where the script runs"
    return session.unknown_at(dollar.line, dollar.source, reason)


def _count(expander: Expanding, dollar: Dollar) -> Text:
    state = expander.state
    text = plain(str(len(state.arguments)), dollar.line)
    if unknown := _unknown(expander, dollar, *state.arguments):
        return unknown
    if knows_arguments(expander.session, state):
        return text
    return text.assuming(without_arguments(expander.session, dollar.line, dollar.source))


def _unknown(expander: Expanding, dollar: Dollar, *texts: Text) -> Text | None:
    """Return an unknown text if one of the given texts is unknown, otherwise None."""
    unknown = expander.session.first_unknown(*texts)
    if unknown is None:
        return None
    return expander.session.unknown_at(dollar.line, dollar.source, unknown.reason, unknown.remedy)


def _present(expander: Expanding, dollar: Dollar, value: Value) -> Text:
    """Return the value of a variable, unless an operator such as ``:-`` supplies it for an unset
    variable.
    """
    if isinstance(value, Text):
        return value
    if value is Absence.EMPTY:
        return Text()
    if dollar.name.isdigit():
        return unset_argument(expander.session, int(dollar.name), dollar.source, dollar.line)
    if expander.session.assigned.get(dollar.name) == dollar.line:
        # A variable that its first assignment reads (``X=${X:-...}``) is assumed to be unset unless
        # the user sets it.
        return Text(assumed=taken_as(expander.session, dollar.name, dollar.line, "not set"))
    return unset_text(expander.session, dollar.name, dollar.source, dollar.line)


def _length(expander: Expanding, dollar: Dollar, value: Value) -> Text:
    text = _present(expander, dollar, value)
    unknown = _unknown(expander, dollar, text)
    return unknown or text.with_chars(str(len(text)))


def _chosen(expander: Expanding, dollar: Dollar, value: Value, *, splits: bool) -> list[Piece]:
    """Return a variable's value, or the word that an operator such as ``:-`` gives if the variable
    is unset.
    """
    operator, argument = dollar.operator.lstrip(":"), dollar.argument
    assert argument is not None
    is_empty = isinstance(value, Absence) or (dollar.operator[0] == ":" and not value)
    notes = _notes(expander, dollar) if value is Absence.UNSET and operator == "+" else frozenset()
    nothing = [Piece(Text(assumed=notes), dollar.quoted, splits=True)]
    if operator == "+":
        if isinstance(value, Text) and value.chars in expander.session.absent:
            is_empty = True
        return nothing if is_empty else _word(expander, dollar, splits)
    if not is_empty:
        assert isinstance(value, Text)
        return [Piece(value, dollar.quoted, splits)]
    if operator == "?":
        return [Piece(_demanded(expander, dollar, value), dollar.quoted, splits)]
    pieces = _word(expander, dollar, splits)
    taken = joined(piece.text for piece in pieces)
    if value is Absence.UNSET:
        notes = _notes(expander, dollar, taken)
        pieces = [piece._replace(text=piece.text.assuming(notes)) for piece in pieces]
        nothing = [piece._replace(text=Text(assumed=notes)) for piece in nothing]
    if operator == "=":
        assign(expander.session, expander.state, dollar.name, taken.assuming(notes))
    return pieces or nothing


def _word(expander: Expanding, dollar: Dollar, splits: bool) -> list[Piece]:
    assert dollar.argument is not None
    return expander.pieces(dollar.argument, splits=splits and not dollar.quoted)


def _notes(expander: Expanding, dollar: Dollar, taken: Text | None = None) -> frozenset[str]:
    """Make the notes that tell the user which value is assumed for a variable that is set
    nowhere.
    """
    if dollar.name.isdigit():
        return without_arguments(expander.session, dollar.line, dollar.source)
    if taken is None:
        return taken_as(expander.session, dollar.name, dollar.line, "not set")
    text = expander.session.rendered(taken) or "''"
    return taken_as(expander.session, dollar.name, dollar.line, f"{text}, its default")


def _demanded(expander: Expanding, dollar: Dollar, value: Value) -> Text:
    """Return an unknown text for ``${x:?message}`` if x is unset and the user can set it; otherwise
    refuse the script.
    """
    assert dollar.argument is not None
    message = expander.session.rendered(expander.text(dollar.argument)) or "must be given"
    if value is Absence.UNSET:
        remedy = remedy_of(dollar.name)
        if dollar.name.isdigit():
            remedy = "give its arguments after --: -- ARG1 ..."
        return expander.session.unknown_at(dollar.line, dollar.source, f"({message})", remedy)
    raise LineError(dollar.line, f"{dollar.source}: {message}: {remedy_of(dollar.name)}")


def _changed(expander: Expanding, dollar: Dollar, text: Text) -> Text:
    """Apply an operator, such as the removal of a suffix, to a variable's value."""
    operator = dollar.operator
    if not operator or operator == "@Q":
        return text
    if not text.is_known:
        kept = _known_end(expander, dollar, text)
        return kept or _unknown(expander, dollar, text) or text
    if operator == ":":
        return _slice(expander, dollar, text)
    pattern = expander.pattern(dollar.argument) if dollar.argument else Text()
    if unknown := _unknown(expander, dollar, pattern):
        return unknown
    # Matching takes time in proportion to the square of the text's length, so it counts as that
    # many steps.
    expander.session.spend(dollar.line, len(text) ** 2 * len(pattern) // 32)
    return _matched(expander, dollar, text, pattern)


def _matched(expander: Expanding, dollar: Dollar, text: Text, pattern: Text) -> Text:
    """Apply an operator with a pattern (``#``, ``%`` or ``/``) to a variable's value."""
    operator = dollar.operator
    if operator[0] in "#%":
        return without(text, pattern.chars, operator)
    if operator[0] == "/":
        return _replaced(expander, dollar, text, pattern.chars)
    if operator[0] == "@":
        changes = {"@U": ("?", "^^"), "@L": ("?", ",,"), "@u": ("?", "^")}
        return text.with_chars(_cased(text.chars, *changes.get(operator, ("[]", "^"))))
    return text.with_chars(_cased(text.chars, pattern.chars, operator))


def _known_end(words: Expanding, dollar: Dollar, text: Text) -> Text | None:
    """Return what is known of ``${x##*/}`` or ``${x%/*}`` for a path x whose folder is unknown."""
    argument = dollar.argument.bare if dollar.argument else None
    cut = text.chars.rfind("/")
    if cut < 0 or not text.part(cut).is_known:
        return None
    if (dollar.operator, argument) == ("##", "*/"):
        return text.part(cut + 1)
    return text.part(0, cut) if (dollar.operator, argument) == ("%", "/*") else None


def _slice(expander: Expanding, dollar: Dollar, text: Text) -> Text:
    start, stop = _bounds(expander, dollar, len(text))
    return text.part(start, stop) if start < stop else Text(assumed=text.assumed)


def _bounds(expander: Expanding, dollar: Dollar, length: int) -> tuple[int, int]:
    assert dollar.argument is not None
    start = expander.number(dollar.argument)
    if start < -length:
        return length, length
    start = start + length if start < 0 else min(start, length)
    if dollar.second is None:
        return start, length
    size = expander.number(dollar.second)
    return start, (length + size if size < 0 else min(start + size, length))


def _replaced(expander: Expanding, dollar: Dollar, text: Text, pattern: str) -> Text:
    operator, chars = dollar.operator, text.chars
    by = expander.text(dollar.second) if dollar.second else Text()
    if not text:
        return by if matches(pattern, "") else text
    if not pattern:
        return text if operator not in ("/#", "/%") else _ended(operator, by, text)
    if operator in ("/#", "/%"):
        rest = without(text, pattern, "##" if operator == "/#" else "%%")
        if len(rest) == len(text):
            return text
        return _ended(operator, by, rest)
    parts, at = list[Text](), 0
    for start, stop in spans(pattern, chars, every=operator == "//"):
        parts += [text.part(at, start), by]
        at = stop
    return joined([*parts, text.part(at)])


def _ended(operator: str, by: Text, rest: Text) -> Text:
    """Add a text before another one (``/#`` with an empty pattern) or after it (``/%``)."""
    return joined((by, rest) if operator == "/#" else (rest, by))


def _cased(chars: str, pattern: str, operator: str) -> str:
    change = str.upper if operator[0] == "^" else str.lower
    taken = {start for start, _ in spans(pattern or "?", chars, every=True)}
    last = len(chars) if len(operator) == 2 else 1
    return "".join(
        change(each) if at in taken and at < last else each for at, each in enumerate(chars)
    )


def _indirect(expander: Expanding, dollar: Dollar, *, splits: bool) -> list[Piece]:
    """Expand ``${!name}``: the value of the variable whose name is the value of ``name``."""
    target = _present(expander, dollar, _value(expander, dollar))
    if unknown := _unknown(expander, dollar, target):
        return [Piece(unknown, dollar.quoted, splits)]
    name, _, key = target.chars.partition("[")
    if not name.isidentifier() and not name.isdigit():
        problem = f"{dollar.source} names {target.chars!r}, not a variable: correct the name"
        raise LineError(dollar.line, problem)
    pointed = Dollar(
        name=name,
        line=dollar.line,
        source=dollar.source,
        quoted=dollar.quoted,
        operator=dollar.operator,
        argument=dollar.argument,
        second=dollar.second,
        subscript=words_of_key(key.rstrip("]"), dollar.line) if key else None,
    )
    return dollar_pieces(expander, pointed, splits=splits)


def words_of_key(key: str, line: int) -> RawWord:
    """Return a known key of a shell array as a word."""
    return RawWord(parts=(Literal(text=key, line=line),), line=line, source=key)


def _many(expander: Expanding, dollar: Dollar, sign: str, *, splits: bool) -> list[Piece]:
    """Expand all values of an array (``${a[@]}``) or all arguments (``$@``) to pieces of a word."""
    values, notes = _values(expander, dollar)
    if dollar.prefix == "#":
        text = _unknown(expander, dollar, *values) or plain(str(len(values)), dollar.line)
        return [Piece(text.assuming(notes), dollar.quoted, splits)]
    operator = dollar.operator.lstrip(":")
    if operator in ("-", "=", "?", "+") and dollar.argument is not None:
        is_there = bool(values) and (len(values) > 1 or bool(values[0]))
        if is_there == (operator == "+"):
            return _word(expander, dollar, splits)
        values = [] if operator == "+" else values
    elif dollar.operator == ":":
        values = _sliced(expander, dollar, values)
    elif dollar.operator:
        values = [_changed(expander, dollar, value) for value in values]
    first = [Piece(Text(assumed=notes), splits=True)] if notes else []
    return first + _spread(values, dollar, sign, splits=splits, ends=separators(expander.state))


def _spread(
    values: Sequence[Text], dollar: Dollar, sign: str, *, splits: bool, ends: str = " "
) -> list[Piece]:
    if dollar.quoted and sign == "*":
        return [Piece(joined(values, ends[:1]), quoted=True)]
    pieces = list[Piece]()
    for number, value in enumerate(values):
        pieces += [BOUNDARY] if number else []
        pieces.append(Piece(value, dollar.quoted, splits))
    return pieces


def _values(expander: Expanding, dollar: Dollar) -> tuple[list[Text], frozenset[str]]:
    session, state, name = expander.session, expander.state, dollar.name
    if name in ("@", "*"):
        known = knows_arguments(session, state)
        notes = frozenset() if known else without_arguments(session, dollar.line, dollar.source)
        return list(state.arguments), notes
    session.mentioned.add(name)
    variable = state.variables.get(name)
    if variable is not None:
        if dollar.prefix == "!":
            return [plain(str(key), dollar.line) for key in variable.keys], frozenset()
        return variable.values, frozenset()
    absence = absence_of(session, name, dollar.line)
    if isinstance(absence, Text):
        return [absence], frozenset()
    is_asked = dollar.prefix == "#" or dollar.operator
    if absence is Absence.EMPTY or is_asked:
        return [], frozenset()
    return [unset_text(session, name, dollar.source, dollar.line)], frozenset()


def _sliced(expander: Expanding, dollar: Dollar, values: list[Text]) -> list[Text]:
    """Expand a slice of an array or of the arguments, such as ``${a[@]:1:2}``; arguments are
    numbered from 1.
    """
    if dollar.name in ("@", "*"):
        name = argument_of(expander.session, expander.state, 0, dollar.line)
        values = [name if isinstance(name, Text) else Text(), *values]
    start, stop = _bounds(expander, dollar, len(values))
    if unknown := _unknown(expander, dollar, *values):
        return [unknown]
    return values[start:stop]
