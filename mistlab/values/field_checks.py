"""Checks of fields, built from the fields' type annotations and bounds.

A check takes a value and returns it, or raises ``FieldError``. Numbers become Python's own types: a
NumPy integer becomes an int, an int for a float field becomes a float. The annotation is read once,
when the check is built, so that checking is cheap.
"""

import math
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from reprlib import Repr
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from mistlab.values.errors import FieldError, near_matches, refuse

Check = Callable[[Any], Any]
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """The range of a number; ``minimum`` and ``maximum`` are inside it, ``above`` is outside.

    ``least`` and ``most`` are far outside of all that is meant: nobody hears of these two limits
    who stays inside of them.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    least: float | None = None
    most: float | None = None
    noun: str = ""

    @property
    def text(self) -> str:
        """The bounds in words that follow "a number"."""
        if self.minimum is not None and self.maximum is not None:
            return f" between {_words(self.minimum)} and {_words(self.maximum)}"
        parts = [
            f"{word} {_words(limit)}"
            for word, limit in (
                ("of at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
            )
            if limit is not None
        ]
        return f" {' and '.join(parts)}" if parts else ""

    def refusal(self, number: float) -> str:
        """The problem with a number, in words; empty if there is none."""
        if (self.minimum is not None and number < self.minimum) or (
            self.above is not None and number <= self.above
        ):
            return f"not {self.noun}" if self.noun else "too small"
        if self.maximum is not None and number > self.maximum:
            return f"not {self.noun}" if self.noun else "too large"
        return ""

    def far_outside(self, number: float) -> str:
        """The problem with a number that no real size comes near to; empty if there is none."""
        if self.least is not None and 0 < number < self.least:
            return f"too small: give at least {_words(self.least)}"
        if self.most is not None and number > self.most:
            return f"too large: give at most {_words(self.most)}"
        return ""


def _words(limit: float) -> str:
    """A limit in digits."""
    return f"{limit:,.0f}" if limit == int(limit) and limit < 1e16 else f"{limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameIn:
    """In an annotation's place: a name out of a table, as the table is when a name is checked."""

    names: Callable[[], Iterable[str]]


def check_of(annotation: Any, bounds: NumberRange) -> Check:
    """The check of a field with this annotation; ``bounds`` hold for its numbers."""
    if isinstance(annotation, NameIn):
        return _name_check(annotation.names)
    if annotation in _NUMBERS:
        return _number_check(annotation, bounds)
    if annotation in _PLAIN or (isinstance(annotation, type) and is_dataclass(annotation)):
        return _instance_check(annotation, wanted(annotation, bounds))
    origin = get_origin(annotation)
    if origin is Literal:
        return _name_check(lambda: get_args(annotation))
    if origin is tuple:
        return _tuple_check(annotation, bounds)
    assert origin in {types.UnionType, Union}, f"no check for fields of {annotation}"
    return _optional_check(check_of(optional_part(annotation), bounds))


def wanted(annotation: Any, bounds: NumberRange) -> str:
    """The values that a field accepts, in words that follow "give"."""
    if isinstance(annotation, NameIn):
        return f"one of {', '.join(annotation.names())}"
    if annotation in _NUMBERS or annotation in _PLAIN:
        return _PLAIN.get(annotation) or f"{_NUMBERS[annotation]}{bounds.text}"
    if is_dataclass(annotation):
        return f"the keys {', '.join(field.name for field in fields(annotation))}"
    origin = get_origin(annotation)
    if origin is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if origin is tuple:
        return f"a list, for each item {wanted(get_args(annotation)[0], bounds)}"
    return wanted(optional_part(annotation), bounds)


def optional_part(annotation: Any) -> Any:
    """The ``X`` of ``X | None``."""
    part, *others = (entry for entry in get_args(annotation) if entry is not types.NoneType)
    assert not others, f"{annotation} has more than one type beside None"
    return part


def shown(value: object) -> str:
    """A value as a message shows it, shortened to part of a line."""
    short = Repr()
    short.maxlevel = 2
    short.maxstring = short.maxlong = short.maxother = SHOWN_CHARACTERS
    return short.repr(value)


_NUMBERS = {int: "a whole number", float: "a number"}
_PLAIN = {bool: "true or false", str: "text"}


def _refuse_number(value: Any, noun: str, give: str) -> NoReturn:
    number = _number_in_text(value)
    if number is None:
        refuse("", f"{shown(value)} is not {noun}: give {give}")
    # YAML 1.1 reads a number with an exponent as text unless it has a point and a signed exponent.
    refuse("", f"{shown(value)} is text in YAML, not {noun}: write {number} without quotes")


def _number_check(kind: type[int] | type[float], bounds: NumberRange) -> Check:
    give = wanted(kind, bounds)
    number_of = _whole_number if kind is int else _finite_number
    low = -sys.float_info.max if bounds.minimum is None else bounds.minimum
    tops = [limit for limit in (bounds.maximum, bounds.most) if limit is not None]
    high = min(tops, default=sys.float_info.max)
    is_closed = bounds.above is None and bounds.least is None

    def check(value: Any) -> Any:
        # A quick way for nearly all numbers: there are very many, and few are wrong.
        if is_closed and type(value) is kind and low <= value <= high:
            return value
        number = number_of(value, give)
        if problem := bounds.refusal(number):
            refuse("", f"{shown(number)} is {problem}: give {give}")
        if problem := bounds.far_outside(number):
            refuse("", f"{shown(number)} is {problem}")
        return number

    return check


def _whole_number(value: Any, give: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        refuse("", f"{shown(value)} is not a whole number: write {int(value)}")
    _refuse_number(value, "a whole number", give)


def _finite_number(value: Any, give: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        _refuse_number(value, "a number", give)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        refuse("", f"{shown(value)} is not a finite number: give {give}")
    return number


def _number_in_text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    digits = repr(int(number) if number.is_integer() and abs(number) < 1e16 else number)
    return digits.replace("e", ".0e") if "." not in digits else digits


def _instance_check(kind: type, give: str) -> Check:
    noun = "a mapping" if is_dataclass(kind) else give

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            refuse("", f"{shown(value)} is not {noun}: give {give}")
        return value

    return check


def _name_check(names: Callable[[], Iterable[str]]) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str or value not in names():
            refuse("", f"{shown(value)} is unknown{near_matches(value, names())}")
        return value

    return check


def _tuple_check(annotation: Any, bounds: NumberRange) -> Check:
    item_check = check_of(get_args(annotation)[0], bounds)
    give = wanted(annotation, bounds)

    def check(value: Any) -> Any:
        if not isinstance(value, tuple):
            refuse("", f"{shown(value)} is not a list: give {give}")
        return tuple(_item(item_check, item, index) for index, item in enumerate(value))

    return check


def _item(check: Check, item: Any, index: int) -> Any:
    try:
        return check(item)
    except FieldError as error:
        holder = f"[{index}]"
        raise error.within(holder) from None


def _optional_check(check: Check) -> Check:
    def check_unless_none(value: Any) -> Any:
        return None if value is None else check(value)

    return check_unless_none
