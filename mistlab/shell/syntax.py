"""Defines the syntax tree of a shell script, and lists the names that a script assigns.

Lines count from 1; ``source`` is a part as it is written.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxNode:
    """A node of a script's syntax tree, with the line at which it begins."""

    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded(SyntaxNode):
    """A part of a word that expansion replaces by a value, such as ``$x``."""

    source: str
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(SyntaxNode):
    """Literal characters of a word; only unquoted ones can be split or have a meaning in
    patterns.
    """

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollar(Expanded):
    """An expansion ``$name`` or ``${...}``; ``prefix`` is ``#`` for a length, ``!`` for an indirect
    name.
    """

    name: str
    prefix: str = ""
    subscript: "RawWord | None" = None
    operator: str = ""
    argument: "RawWord | None" = None
    second: "RawWord | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution(Expanded):
    """A command substitution: ``$(...)`` or backquotes."""

    script: "Script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(Expanded):
    """An arithmetic expansion: ``$((...))``."""

    expression: "RawWord"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe(SyntaxNode):
    """A process substitution ``<(...)`` or ``>(...)``, which a shell replaces by a path; or a
    placeholder ``<path>``.
    """

    source: str
    quoted: bool = True


WordPart: TypeAlias = Literal | Dollar | Substitution | Arithmetic | Pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RawWord(SyntaxNode):
    """A word of the script as written, before expansion."""

    parts: tuple[WordPart, ...]
    source: str = ""

    @property
    def bare(self) -> str | None:
        """The word's text, or None if it has quotes or expansions."""
        if all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element of an array literal: a word, or a word with a key (``[key]=word``)."""

    value: RawWord
    key: RawWord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(SyntaxNode):
    """An assignment in a shell command: ``name=word``, ``name+=word``, ``name[key]=word`` or
    ``name=(...)``.
    """

    name: str
    value: "RawWord | tuple[Element, ...]"
    subscript: RawWord | None = None
    appends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect(SyntaxNode):
    """A redirection; ``body`` gets the text of a here-document once that is read."""

    operator: str
    target: RawWord
    descriptor: str = ""
    body: list[RawWord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple(SyntaxNode):
    """A simple command: assignments followed by words; a declaration such as ``export`` has
    assignments among its words.
    """

    assignments: tuple[Assignment, ...]
    words: tuple[RawWord | Assignment, ...]
    redirects: tuple[Redirect, ...]
    last_line: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(SyntaxNode):
    """Commands joined by ``|``, or a command after ``!``."""

    commands: tuple["Command", ...]
    negated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AndOr(SyntaxNode):
    """Commands joined by ``&&`` and ``||``; ``operators`` has one fewer than ``commands``."""

    commands: tuple["Command", ...]
    operators: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A sequence of shell commands."""

    commands: tuple["Command", ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class If(SyntaxNode):
    """An ``if`` command: conditions and bodies of ``if`` and each ``elif``, and the body of
    ``else``.
    """

    branches: tuple[tuple[Script, Script], ...]
    otherwise: Script | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A branch of ``case``: patterns, commands, and its end ``;;``, ``;&`` or ``;;&``."""

    patterns: tuple[RawWord, ...]
    body: Script
    ending: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(SyntaxNode):
    """A ``case`` command: ``case word in ... esac``."""

    subject: RawWord
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForIn(SyntaxNode):
    """A loop ``for name in words``; ``words`` is None for the script's arguments."""

    name: str
    words: tuple[RawWord, ...] | None
    body: Script


@dataclass(frozen=True, slots=True, kw_only=True)
class ForCount(SyntaxNode):
    """A loop ``for ((start; condition; step))``."""

    start: RawWord
    condition: RawWord
    step: RawWord
    body: Script


@dataclass(frozen=True, slots=True, kw_only=True)
class While(SyntaxNode):
    """A loop with ``while`` or ``until``."""

    condition: Script
    body: Script
    until: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(SyntaxNode):
    """A definition of a shell function."""

    name: str
    body: "Command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(SyntaxNode):
    """Commands in braces (``{ ...; }``), or in parentheses (with ``subshell``)."""

    script: Script
    subshell: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(SyntaxNode):
    """An arithmetic command: ``(( ... ))``."""

    expression: RawWord
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A test inside ``[[ ]]`` with two operands, or with one if ``left`` is None."""

    operator: str
    right: RawWord
    left: RawWord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Tests inside ``[[ ]]`` that ``&&`` or ``||`` joins, or that ``!`` negates."""

    operator: str
    tests: tuple["Comparison", ...]


Comparison: TypeAlias = Operand | Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracketed(SyntaxNode):
    """A test command: ``[[ ... ]]``."""

    condition: Comparison
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirected(SyntaxNode):
    """A compound command, such as a loop, with redirections."""

    command: "Command"
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Background(SyntaxNode):
    """A command in the background, followed by ``&``."""

    command: "Command"


Command: TypeAlias = (
    Simple
    | Pipeline
    | AndOr
    | If
    | Case
    | ForIn
    | ForCount
    | While
    | Function
    | Group
    | Count
    | Bracketed
    | Redirected
    | Background
)


# The names that a script assigns, with the first line that assigns each.


_SETTERS = frozenset(("read", "mapfile", "readarray", "getopts", "printf", "let", "local"))
_SETTERS_OF_NAMES = frozenset(("declare", "typeset"))
_COUNTED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?"
    r"(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def assigned_names(node: object) -> dict[str, int]:
    """Return the names that a part of a script assigns, each with the first line that assigns
    it.
    """
    names: dict[str, int] = {}
    for name, line in _assigned(node):
        names[name] = min(line, names.get(name, line))
    return names


def _assigned(node: object) -> Iterator[tuple[str, int]]:
    pending = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple | list):
            pending += item
        elif is_dataclass(item):
            yield from _of(item)
            pending += [getattr(item, each.name) for each in fields(item)]


def _of(item: object) -> Iterator[tuple[str, int]]:
    if isinstance(item, Assignment | ForIn) or (
        isinstance(item, Dollar) and item.operator.lstrip(":") == "="
    ):
        yield item.name, item.line
    elif isinstance(item, Arithmetic | Count):
        yield from _counted(item.expression)
    elif isinstance(item, ForCount):
        yield from _counted(item.start)
        yield from _counted(item.step)
    elif isinstance(item, Simple) and item.words:
        yield from _set_by_builtin(item)


def _counted(word: RawWord) -> Iterator[tuple[str, int]]:
    for match in _COUNTED.finditer(word.source):
        yield match[1] or match[2], word.line


def _set_by_builtin(item: Simple) -> Iterator[tuple[str, int]]:
    first, *rest = item.words
    program = first.bare if isinstance(first, RawWord) else None
    if program in _SETTERS or program in _SETTERS_OF_NAMES:
        for word in rest:
            text = word.bare if isinstance(word, RawWord) else None
            if text and _NAME.fullmatch(text):
                yield text, item.line
            elif program == "let" and isinstance(word, RawWord):
                yield from _counted(word)
