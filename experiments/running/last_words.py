"""Finds the message of a failed run: the line of its standard error that tells what was wrong."""

import re

ERROR = "error: "
# As torch has a rank's traceback: its number, then the error.
_RAISED = re.compile(r"\[rank\d+\]: ((?:\w+\.)*\w*(?:Error|Exception)\b.*)")


def last_words(errors: str, otherwise: str) -> str:
    """The line in which a command or a rank says what was wrong, else the last line; a launcher of
    several ranks has words of its own below theirs."""
    lines = [line for line in errors.splitlines() if line.strip()]
    complaints = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    raised = [found[1] for line in lines if (found := _RAISED.match(line))]
    return [*complaints[:1], *raised[-1:], *(line.strip() for line in lines[-1:]), otherwise][0]
