"""Words of an evaluated command: a text, the line that it stands on, and why a part is unknown."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A part of a script whose value cannot be known without running the script.

    ``expression`` is the part as the script writes it (``$(hostname)``, ``$1``), ``line`` the line
    that it stands on, ``reason`` why its value is not known, ``remedy`` how the user can give it.
    ``file`` is the script's name where the line is not one of the script that was given. ``either``
    are texts of which the part is one, where these are all known: a branch's and another's.
    """

    expression: str
    line: int
    reason: str
    remedy: str
    file: str = ""
    either: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"line {self.line} of {self.file}" if self.file else f"line {self.line}"
        remedy = self.remedy or "write its value into the script"
        return f"{line}: {self.expression} {self.reason}: {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command after expansion.

    Unknown parts stand in ``text`` as the script writes them; ``unknown`` explains the first of
    them. ``line`` is 0 for words that do not come from a script, and the line that wrote the word's
    last part for others: where a variable was assigned. ``file`` is as for ``Unknown``.
    """

    text: str
    line: int = 0
    unknown: Unknown | None = None
    file: str = ""

    def __str__(self) -> str:
        return self.text
