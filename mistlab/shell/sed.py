"""``sed``: replacements of plain texts, by which scripts make a configuration from a template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mistlab.shell.call import Call
from mistlab.shell.redirects import text_of_file
from mistlab.shell.shell_text import Text

# A pattern with such a character means more than its letters.
_MEANS_MORE = re.compile(r"[\\.\[\]*^$]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """A command ``s/old/new/g`` whose old text stands for itself."""

    old: str
    new: str
    everywhere: bool

    def of(self, text: str) -> str:
        """A text with the first old text of each line replaced, or all of them."""
        count = -1 if self.everywhere else 1
        lines = text.split("\n")
        return "\n".join(line.replace(self.old, self.new, count) for line in lines)


def run_sed(call: Call) -> bool:
    """Print the input, or a file at hand, with texts replaced; whether that can be done exactly."""
    commands, paths = _taken_apart(call.arguments)
    replacements = [_replacement(text.chars) for text in commands]
    if not commands or len(paths) > 1 or any(each is None for each in replacements):
        return False
    state = call.state
    given = text_of_file(call.session, state, paths[0]) if paths else state.input
    if given is None:
        return False
    chars = given.chars
    for each in replacements:
        assert each is not None
        chars = each.of(chars)
    call.session.spend(call.line, len(chars))
    state.print(given.with_chars(chars))
    state.status = 0
    return True


def _taken_apart(arguments: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """The commands and the files of the arguments; no commands where an option is not known."""
    commands: list[Text] = []
    others: list[Text] = []
    words = iter(arguments)
    for word in words:
        if word.chars in ("-e", "--expression"):
            commands += [each for each in (next(words, None),) if each is not None]
        elif word.chars.startswith("-") and word.chars not in ("-r", "-E"):
            return [], []
        elif not word.chars.startswith("-"):
            others.append(word)
    return (commands, others) if commands else (others[:1], others[1:])


def _replacement(command: str) -> _Replacement | None:
    """A command's replacement; None for one that a plain replacement is not."""
    if len(command) < 4 or command[0] != "s":
        return None
    parts = command[2:].split(command[1])
    if len(parts) != 3 or parts[2] not in ("", "g") or not parts[0]:
        return None
    old, new, flags = parts
    if _MEANS_MORE.search(old) or "\\" in new or "&" in new:
        return None
    return _Replacement(old=old, new=new, everywhere=flags == "g")
