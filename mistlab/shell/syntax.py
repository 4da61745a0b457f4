"""The syntax tree of a shell script. Lines count from 1; ``source`` is a part as it is written."""

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """Characters that stand for themselves; patterns and splitting look at unquoted ones alone."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollar:
    """``$name`` or ``${...}``: ``prefix`` is ``#`` for a length, ``!`` for an indirect name."""

    name: str
    line: int
    source: str
    quoted: bool = False
    prefix: str = ""
    subscript: "RawWord | None" = None
    operator: str = ""
    argument: "RawWord | None" = None
    second: "RawWord | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """``$(...)`` or backquotes."""

    script: "Script"
    line: int
    source: str
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """``$((...))``."""

    expression: "RawWord"
    line: int
    source: str
    quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """``<(...)`` or ``>(...)``, a path of a running shell; or ``<path>``, to be filled in."""

    line: int
    source: str
    quoted: bool = True


WordPart: TypeAlias = Literal | Dollar | Substitution | Arithmetic | Pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RawWord:
    """A word before expansion."""

    parts: tuple[WordPart, ...]
    line: int
    source: str = ""

    @property
    def bare(self) -> str | None:
        """The word's text where it has no quotes and nothing to expand."""
        if all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A word of an array's list, or a keyed one: ``[key]=word``."""

    value: RawWord
    key: RawWord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``name=word``, ``name+=word``, ``name[key]=word`` or ``name=(...)``."""

    name: str
    value: "RawWord | tuple[Element, ...]"
    line: int
    subscript: RawWord | None = None
    appends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """A redirection; ``body`` is filled with the text of a here-document once it is read."""

    operator: str
    target: RawWord
    line: int
    descriptor: str = ""
    body: list[RawWord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple:
    """Assignments, then a command's words; declarations have assignments among their words."""

    assignments: tuple[Assignment, ...]
    words: tuple[RawWord | Assignment, ...]
    redirects: tuple[Redirect, ...]
    line: int
    last_line: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Commands joined by ``|``, or one after ``!``."""

    commands: tuple["Command", ...]
    line: int
    negated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AndOr:
    """Commands joined by ``&&`` and ``||``; ``operators`` has one fewer than ``commands``."""

    commands: tuple["Command", ...]
    operators: tuple[str, ...]
    sources: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Commands one after another."""

    commands: tuple["Command", ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class If:
    """``if`` with its ``elif``s as pairs of condition and body, and ``else``."""

    branches: tuple[tuple[Script, Script], ...]
    otherwise: Script | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A case's patterns and body; ``ending`` is ``;;``, ``;&`` or ``;;&``."""

    patterns: tuple[RawWord, ...]
    body: Script
    ending: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``case word in ... esac``."""

    subject: RawWord
    arms: tuple[Arm, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForIn:
    """``for name in words``; ``words`` is None for the script's arguments."""

    name: str
    words: tuple[RawWord, ...] | None
    body: Script
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForCount:
    """``for ((start; condition; step))``."""

    start: RawWord
    condition: RawWord
    step: RawWord
    body: Script
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class While:
    """``while`` or ``until``."""

    condition: Script
    body: Script
    line: int
    until: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function's definition."""

    name: str
    body: "Command"
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """``{ ...; }``, or ``( ... )`` with ``subshell``."""

    script: Script
    line: int
    subshell: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """``(( ... ))``."""

    expression: RawWord
    line: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A test of one or two words inside ``[[ ]]``; ``left`` is None for unary operators."""

    operator: str
    right: RawWord
    left: RawWord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Tests joined by ``&&``, ``||`` or negated by ``!`` inside ``[[ ]]``."""

    operator: str
    tests: tuple["Condition", ...]


Condition: TypeAlias = Operand | Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracketed:
    """``[[ ... ]]``."""

    condition: Condition
    line: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirected:
    """A compound command with redirections."""

    command: "Command"
    redirects: tuple[Redirect, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A command after which stands ``&``."""

    command: "Command"
    line: int


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
