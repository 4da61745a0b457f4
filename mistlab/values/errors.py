"""Malformed input: one exception for users to catch, whose text says what to do.

A message names the field, the value and the remedy.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn, Self


class InputError(ValueError):
    """Malformed input: the message names field, value and remedy."""


class UncalibratedError(InputError):
    """Hardware of which something was never measured that a prediction needs."""


class FieldError(InputError):
    """A field that cannot hold its value: where it is (``plan.stages[1].zero``) and what is wrong.

    A value knows its own fields only; whoever holds it adds the way there, by ``within``.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem

    def within(self, holder: str) -> Self:
        """The same problem seen from the value that holds this field's value."""
        joint = "." if holder and self.path and not self.path.startswith("[") else ""
        return type(self)(f"{holder}{joint}{self.path}", self.problem)


def refuse(path: str, problem: str) -> NoReturn:
    """Raise ``FieldError``: the field at ``path`` is wrong, ``problem`` says why and what helps."""
    raise FieldError(path, problem)


@contextmanager
def within(holder: str) -> Iterator[None]:
    """Let a ``FieldError`` of the block say that its field is in ``holder``."""
    try:
        yield
    except FieldError as error:
        raise error.within(holder) from None


def near_matches(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: near ones if there are any, else all of them.

    >>> near_matches("flsh", ["flash", "math"])
    ": did you mean 'flash'?"
    >>> near_matches("fast", ["fp16", "fp32"])
    ': give one of fp16, fp32'
    """
    names, text = list(known), str(name)
    beginnings = [known_name for known_name in names if text and known_name.startswith(text)]
    near = get_close_matches(text, names, n=2) or beginnings[:2]
    if near:
        return f": did you mean {' or '.join(map(repr, near))}?"
    return f": give one of {', '.join(names)}"
