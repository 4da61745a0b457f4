"""The exception for malformed input, ``InputError``, whose message says what to do.

A message names the field, the value and the remedy.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Self


class InputError(ValueError):
    """Malformed input; the message names the field, the value and the remedy."""


class UncalibratedError(InputError):
    """A prediction needs a number of the hardware that was never measured."""


class FieldError(InputError):
    """A field with a wrong value: the field's path (``plan.stages[1].zero``) and the problem.

    A value knows only its own fields. The code that holds the value adds the path to it, by
    ``within``.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem

    def within(self, holder: str) -> Self:
        """The same problem, with the path as seen from the value that holds this field."""
        joint = "." if holder and self.path and not self.path.startswith("[") else ""
        return type(self)(f"{holder}{joint}{self.path}", self.problem)


def refuse(path: str, problem: str) -> NoReturn:
    """Raise a ``FieldError`` about the field at ``path``; ``problem`` says what is wrong."""
    raise FieldError(path, problem)


@contextmanager
def within(holder: str) -> Iterator[None]:
    """Add ``holder`` to the path of a ``FieldError`` that the ``with`` block raises."""
    try:
        yield
    except FieldError as error:
        raise error.within(holder) from None


# Of more names than these a message lists a few.
MOST_LISTED, FEW = 30, 5


def near_matches(name: object, known: Iterable[str], listed_in: str = "") -> str:
    """The end of a message about an unknown name: similar known names, or all known names; of many
    a few, and where all of them are ``listed_in``.

    >>> near_matches("flsh", ["flash", "math"])
    ": did you mean 'flash'?"
    >>> near_matches("fast", ["fp16", "fp32"])
    ': give one of fp16, fp32'
    """
    from difflib import get_close_matches  # noqa: PLC0415 (only for an error)

    names, text = list(known), str(name)
    beginnings = [known_name for known_name in names if text and known_name.startswith(text)]
    near = get_close_matches(text, names, n=2) or beginnings[:2]
    if near:
        return f": did you mean {' or '.join(map(repr, near))}?"
    if len(names) <= MOST_LISTED:
        return f": give one of {', '.join(names)}"
    few = get_close_matches(text, names, n=FEW, cutoff=0.3) or names[:FEW]
    others = f"or another of the {len(names)}{listed_in and f' in {listed_in}'}"
    return f": give a name such as {', '.join(few)}, {others}"


def one_of(names: Sequence[str]) -> str:
    """Names as a choice between them: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
