"""A command that is called: its words, after expansion, and where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.shell.expansion import Words
from mistlab.shell.loops import Runner
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text
from mistlab.shell.state import State
from mistlab.shell.syntax import Simple


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command with its words; ``fields`` are ``program`` and ``arguments``.

    ``environment`` are variables that are set for this command alone.
    """

    runner: Runner
    state: State
    words: Words
    command: Simple
    program: str
    arguments: tuple[Text, ...]
    fields: tuple[Text, ...]
    environment: Mapping[str, Text]

    @property
    def session(self) -> Session:
        """The evaluation that the command belongs to."""
        return self.runner.session

    @property
    def line(self) -> int:
        """The line that the command stands on."""
        return self.command.line

    @property
    def plain_arguments(self) -> list[str]:
        """The arguments' characters."""
        return [text.chars for text in self.arguments]
