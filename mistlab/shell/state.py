"""The state of a script between two commands: variables, arguments, files and output."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mistlab.shell.shell_text import Text, joined
from mistlab.shell.syntax import Command
from mistlab.shell.word import Unknown

Key = int | str
# How a command leaves the commands around it.
NORMAL, BREAK, CONTINUE, RETURN, EXIT = "", "break", "continue", "return", "exit"
Status = int | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable's values by index or key; a plain variable has index 0 alone."""

    items: Mapping[Key, Text]
    is_list: bool = False
    is_map: bool = False
    is_integer: bool = False
    exported: bool = False

    @property
    def text(self) -> Text | None:
        """The value that ``$name`` has: of index 0."""
        return self.items.get("0" if self.is_map else 0)

    @property
    def values(self) -> list[Text]:
        """All values, in the order of indices."""
        if self.is_map:
            return list(self.items.values())
        return [self.items[key] for key in sorted(self.items, key=int)]

    @property
    def line(self) -> int:
        """The line that wrote the first value; 0 for none."""
        return next((text.line for text in self.items.values()), 0)

    def is_same(self, other: "Variable | None") -> bool:
        """Whether another variable has the same values, whichever lines wrote them."""
        if other is None or self.items.keys() != other.items.keys():
            return False
        return all(text.chars == other.items[key].chars for key, text in self.items.items())

    def assuming(self, notes: frozenset[str]) -> "Variable":
        """The variable, its values resting on further notes."""
        return replace(self, items={key: each.assuming(notes) for key, each in self.items.items()})

    @property
    def keys(self) -> list[Key]:
        """All indices or keys, in order."""
        return list(self.items) if self.is_map else sorted(self.items, key=int)


def scalar(text: Text, *, exported: bool = False) -> Variable:
    """A plain variable."""
    return Variable(items={0: text}, exported=exported)


@dataclass(slots=True, kw_only=True)
class State:
    """All that a command can read and change.

    ``name`` is the script's own (``$0``). ``folder`` is the one that the script has entered by a
    path that is known, None where it is in the folder that it was started from. ``frames`` hold,
    for each running function, the variables that its local ones hide. ``output`` is what was
    printed so far where it is captured, None where nobody reads it.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Command] = field(default_factory=dict)
    name: Text | None = None
    arguments: tuple[Text, ...] = ()
    frames: tuple[dict[str, Variable | None], ...] = ()
    options: frozenset[str] = frozenset()
    written: dict[str, Text] = field(default_factory=dict)
    output: Text | None = None
    input: Text | None = None
    folder: Text | None = None
    status: Status = 0
    flow: str = NORMAL
    levels: int = 0

    def copy(self) -> "State":
        """A state that changes apart from this one."""
        made = replace(self)
        made.variables = dict(self.variables)
        made.functions = dict(self.functions)
        made.frames = tuple(dict(frame) for frame in self.frames)
        made.written = dict(self.written)
        return made

    def take(self, other: "State") -> None:
        """Become another state."""
        for name in State.__slots__:
            setattr(self, name, getattr(other, name))

    def print(self, text: Text) -> None:
        """Append to the output, where it is read."""
        if self.output is not None:
            self.output = joined((self.output, text))

    def hide(self, name: str) -> None:
        """Make a variable local to the running function."""
        if self.frames and name not in self.frames[-1]:
            self.frames[-1][name] = self.variables.get(name)
