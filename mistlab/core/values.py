"""Checked values: frozen dataclasses that check their fields and convert to and from mappings."""

import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from reprlib import Repr
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class InputError(ValueError):
    """An error about the user's input; the message names the field, the value and the remedy."""


class UncalibratedError(InputError):
    """The error that a prediction needs a figure of the hardware that was never measured."""


class FieldError(InputError):
    """The error that a field has an invalid value; it has the field's path and the problem.

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
        """The same error, with the name of the field's ``holder`` in front of the field's path."""
        joint = "." if holder and self.path and not self.path.startswith("[") else ""
        return type(self)(f"{holder}{joint}{self.path}", self.problem)


def reject(message: str) -> NoReturn:
    """Raise an ``InputError``; the message names the field, the value and the remedy."""
    raise InputError(message) from None


def refuse(path: str, problem: str) -> NoReturn:
    """Raise a ``FieldError`` about the field at ``path``; ``problem`` describes it."""
    raise FieldError(path, problem)


@contextmanager
def within(holder: str) -> Iterator[None]:
    """Put ``holder`` in front of the path of a ``FieldError`` raised in the ``with`` block."""
    try:
        yield
    except FieldError as error:
        raise error.within(holder) from None


# An error message lists up to 30 names; if there are more, it lists five.
MOST_LISTED, FEW = 30, 5
# The path of an error about a whole value; the code that holds the value adds the field's name.
THIS_VALUE = ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that suggests known names that are similar to ``name`` or begin with it; "" if
    there are none.
    """
    from difflib import get_close_matches  # noqa: PLC0415 (only for an error)

    names, lowered = {one.lower(): one for one in known}, name.lower()
    beginnings = [one for one in names if lowered and one.startswith(lowered)]
    near = get_close_matches(lowered, names, n=2) or beginnings[:2]
    return f"did you mean {' or '.join(repr(names[one]) for one in near)}?" if near else ""


def near_matches(name: object, known: Iterable[str], listed_in: str = "") -> str:
    """The end of an error message about an unknown name: similar names, or all known names.

    If there are many, it lists a few of them and says where to find the full list (``listed_in``).

    >>> near_matches("flsh", ["flash", "math"])
    ": did you mean 'flash'?"
    >>> near_matches("fast", ["fp16", "fp32"])
    ': give one of fp16, fp32'
    """
    from difflib import get_close_matches  # noqa: PLC0415 (only for an error)

    names, text = list(known), str(name)
    if question := did_you_mean(text, names):
        return f": {question}"
    if len(names) <= MOST_LISTED:
        return f": give one of {', '.join(names)}"
    few = get_close_matches(text, names, n=FEW, cutoff=0.3) or names[:FEW]
    others = f"or another of the {len(names)} names{listed_in and f' in {listed_in}'}"
    return f": give a name such as {', '.join(few)}, {others}"


def one_of(names: Sequence[str]) -> str:
    """Names as alternatives in a sentence: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


# No real model has more layers than this; a larger number is in a wrong unit or column
# (docs/decisions/0052). Other limits follow.
MOST_LAYERS = 10_000
MOST_HEADS = 2**16
MOST_HIDDEN = 2**20
# The largest inner width of a feed-forward network.
MOST_WIDTH = 2**24
MOST_VOCAB = 2**27
MOST_EXPERTS = 2**16
# The most tokens of a sequence, and the most sequences of an optimizer step.
MOST_TOKENS = 10**9
MOST_NODES = 10**6
MOST_GPUS_OF_NODE = 10_000
# The smallest measured quantity in the unit of its field, such as GiB, GB/s or microseconds.
LEAST_QUANTITY = 1e-9
MOST_QUANTITY = 1e9
# A fitted rate may be very large: an operator that memory alone limits has no finite rate.
MOST_RATE = 1e30


# Makes the checks of fields from type annotations and bounds: a check returns the value as Python's
# own type, or raises ``FieldError``.

Check = Callable[[Any], Any]
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """The range of a number; ``minimum`` and ``maximum`` are included, ``above`` is excluded.

    Numbers below ``least`` and above ``most`` are implausible. ``usual`` is the unit of a number.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    least: float | None = None
    most: float | None = None
    noun: str = ""
    usual: str = ""

    @property
    def text(self) -> str:
        """The range and the unit of a number, to follow "a number" in an error message."""
        if self.minimum is not None and self.maximum is not None:
            return f" between {_digits(self.minimum)} and {_digits(self.maximum)}"
        parts = [
            f"{word} {_digits(limit)}"
            for word, limit in (
                ("of at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
            )
            if limit is not None
        ]
        unit = f", {self.usual}" if self.usual else ""
        return f" {' and '.join(parts)}{unit}" if parts else ""

    def refusal(self, number: float) -> str:
        """What is wrong with a number that is outside the range, as text; empty if it is inside."""
        if (self.minimum is not None and number < self.minimum) or (
            self.above is not None and number <= self.above
        ):
            return f"not {self.noun}" if self.noun else "too small"
        if self.maximum is not None and number > self.maximum:
            return f"not {self.noun}" if self.noun else "too large"
        return ""

    def far_outside(self, number: float) -> str:
        """The error message for an implausibly large or small number; empty if it is plausible."""
        unit = f", {self.usual}" if self.usual else ""
        if self.least is not None and 0 < number < self.least:
            return f"too small: give at least {_digits(self.least)}{unit}"
        if self.most is not None and number > self.most:
            return f"too large: give at most {_digits(self.most)}{unit}"
        return ""


def _digits(limit: float) -> str:
    """A limit of a number's range, as text."""
    return f"{limit:,.0f}" if limit == int(limit) and limit < 1e16 else f"{limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameIn:
    """Stands for a type annotation: the value must be a name in a table that may still grow."""

    names: Callable[[], Iterable[str]]


def check_of(annotation: Any, bounds: NumberRange) -> Check:
    """Make the check of a field with this annotation; ``bounds`` limit its numbers."""
    if isinstance(annotation, NameIn):
        return _name_check(annotation.names)
    if annotation in _NUMBERS:
        return _number_check(annotation, bounds)
    if annotation in _PLAIN or (isinstance(annotation, type) and is_dataclass(annotation)):
        return _instance_check(annotation, wanted(annotation, bounds))
    origin = get_origin(annotation)
    if origin is Literal:
        return _name_check(cache(lambda: get_args(annotation)))
    if origin is tuple:
        return _tuple_check(annotation, bounds)
    assert origin in {types.UnionType, Union}, f"no check for fields of {annotation}"
    return _optional_check(check_of(optional_part(annotation), bounds))


def wanted(annotation: Any, bounds: NumberRange) -> str:
    """The values that a field accepts, in words that follow "give" in an error message."""
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
    """The type ``X`` of an annotation ``X | None``."""
    part, *others = (entry for entry in get_args(annotation) if entry is not types.NoneType)
    assert not others, f"{annotation} has more than one type beside None"
    return part


def shown(value: object) -> str:
    """A value as an error message shows it: as in YAML or JSON, cut to part of a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    short = Repr()
    short.maxlevel = 2
    short.maxstring = short.maxlong = short.maxother = SHOWN_CHARACTERS
    return short.repr(value)


_NUMBERS = {int: "a whole number", float: "a number"}
_PLAIN = {bool: "true or false", str: "text"}


def _refuse_number(value: Any, noun: str, allowed: str) -> NoReturn:
    number = _number_in_text(value)
    if number is None:
        refuse(THIS_VALUE, f"{shown(value)} is not {noun}: give {allowed}")
    refuse(THIS_VALUE, f"{shown(value)} is text in YAML, not {noun}: write {number} without quotes")


def _number_check(kind: type[int] | type[float], bounds: NumberRange) -> Check:
    allowed = wanted(kind, bounds)
    number_of = _whole_number if kind is int else _finite_number
    low = -sys.float_info.max if bounds.minimum is None else bounds.minimum
    tops = [limit for limit in (bounds.maximum, bounds.most) if limit is not None]
    high = min(tops, default=sys.float_info.max)
    is_closed = bounds.above is None and bounds.least is None

    def check(value: Any) -> Any:
        # Nearly all numbers are valid, so this path for them is fast.
        if is_closed and type(value) is kind and low <= value <= high:
            return value
        number = number_of(value, allowed)
        if problem := bounds.refusal(number):
            refuse(THIS_VALUE, f"{shown(number)} is {problem}: give {allowed}")
        if problem := bounds.far_outside(number):
            refuse(THIS_VALUE, f"{shown(number)} is {problem}")
        return number

    return check


def _whole_number(value: Any, allowed: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        refuse(THIS_VALUE, f"{shown(value)} is not a whole number: write {int(value)}")
    _refuse_number(value, "a whole number", allowed)


def _finite_number(value: Any, allowed: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        _refuse_number(value, "a number", allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        refuse(THIS_VALUE, f"{shown(value)} is not a finite number: give {allowed}")
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


def _instance_check(kind: type, allowed: str) -> Check:
    noun = "a mapping" if is_dataclass(kind) else allowed

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            refuse(THIS_VALUE, f"{shown(value)} is not {noun}: give {allowed}")
        return value

    return check


def _name_check(names: Callable[[], Iterable[str]]) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str or value not in names():
            refuse(THIS_VALUE, f"{shown(value)} is unknown{near_matches(value, names())}")
        return value

    return check


def _tuple_check(annotation: Any, bounds: NumberRange) -> Check:
    item_check = check_of(get_args(annotation)[0], bounds)
    allowed = wanted(annotation, bounds)

    def check(value: Any) -> Any:
        if not isinstance(value, tuple):
            refuse(THIS_VALUE, f"{shown(value)} is not a list: give {allowed}")
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


# Defines frozen dataclasses that check their fields, by annotations (types) and
# ``field(metadata=bounded(...))`` (ranges), and convert from and to mappings.

Value = TypeVar("Value", bound="DataclassInstance")
Metadata = Mapping[str, NumberRange]
_BOUNDS = "bounds"
_NAMES = "names"


def bounded(
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    **far: Any,
) -> Metadata:
    """Field metadata for the range of a number: at least, above and at most these bounds.

    ``far`` has the plausible range (``least``, ``most``) and its unit (``usual``).
    """
    return {_BOUNDS: NumberRange(minimum=minimum, above=above, maximum=maximum, **far)}


def quantity(*, or_zero: bool = False, most: float = MOST_QUANTITY, usual: str = "") -> Metadata:
    """Field metadata for a quantity with a unit, of any plausible size; ``or_zero`` allows 0."""
    if or_zero:
        return {_BOUNDS: NumberRange(minimum=0, most=most, usual=usual)}
    return {_BOUNDS: NumberRange(above=0, least=LEAST_QUANTITY, most=most, usual=usual)}


def ratio() -> Metadata:
    """Field metadata for a share from 0 to 1."""
    return {_BOUNDS: NumberRange(minimum=0, maximum=1, noun="a ratio")}


def name_in(names: Callable[[], Iterable[str]]) -> Mapping[str, NameIn]:
    """Field metadata for a name in a table to which entries may be added later."""
    return {_NAMES: NameIn(names=names)}


def check_fields(value: "DataclassInstance") -> None:
    """Check every field of a new dataclass, and convert its numbers to Python's own types.

    Raises a ``FieldError`` for the first field whose content its annotation or bounds refuse.
    """
    name = ""
    try:
        for name, check in _checks(type(value)):
            given = getattr(value, name)
            checked = check(given)
            if checked is not given:
                object.__setattr__(value, name, checked)
    except FieldError as error:
        raise error.within(name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A dataclass that checks its fields when it is made, by their annotations and bounds.

    Annotations may be int, float, bool, str, ``Literal`` of texts, other values, ``tuple[X, ...]``
    and ``X | None``. No validation library does all of this: refuse a bool for an int, name a
    remedy, import quickly.
    """

    def __post_init__(self) -> None:
        check_fields(self)


def check_field(kind: "type[DataclassInstance]", name: str, given: object) -> Any:
    """Check the content of a field of a dataclass ``kind``; returns the converted content."""
    with within(name):
        return dict(_checks(kind))[name](given)


def from_mapping(kind: type[Value], plain: object, where: str = "") -> Value:
    """Make a dataclass from the mappings, lists, texts and numbers of a YAML or JSON file.

    ``where`` is the path of the mapping in its file, for messages. Entries that are values already
    are taken as they are.
    """
    with within(where):
        return _decoded_value(kind, plain)


def to_mapping(value: "DataclassInstance", *, omit_defaults: bool = False) -> dict[str, Any]:
    """A dataclass as a mapping, keys in the order of its fields; ``from_mapping`` inverts it."""
    plain: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if not (omit_defaults and _has_default(field) and content == _default(field)):
            plain[field.name] = _plain(content, omit_defaults)
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _FieldType:
    annotation: Any
    bounds: NumberRange
    required: bool


@cache
def _field_types(kind: "type[DataclassInstance]") -> Mapping[str, _FieldType]:
    hints = get_type_hints(kind)
    return {
        field.name: _FieldType(
            annotation=field.metadata.get(_NAMES, hints[field.name]),
            bounds=field.metadata.get(_BOUNDS, NumberRange()),
            required=not _has_default(field),
        )
        for field in fields(kind)
    }


@cache
def _checks(kind: "type[DataclassInstance]") -> tuple[tuple[str, Check], ...]:
    types = _field_types(kind)
    return tuple((name, check_of(entry.annotation, entry.bounds)) for name, entry in types.items())


def _decoded_value(kind: type[Value], plain: object) -> Value:
    types = _field_types(kind)
    if not isinstance(plain, Mapping):
        refuse(THIS_VALUE, f"{shown(plain)} is not a mapping: give the keys {', '.join(types)}")
    for key in plain:
        if key not in types:
            refuse(str(key), f"unknown key{near_matches(key, types)}")
    for name, entry in types.items():
        if entry.required and name not in plain:
            refuse(name, f"missing: give {wanted(entry.annotation, entry.bounds)}")
    return kind(
        **{name: _decoded(types[name].annotation, entry, name) for name, entry in plain.items()}
    )


def _decoded(annotation: Any, plain: Any, path: str) -> Any:
    """Convert plain data to the annotation's type; the field's check refuses other data."""
    if isinstance(annotation, type) and is_dataclass(annotation) and isinstance(plain, Mapping):
        return from_mapping(annotation, plain, path)
    origin = get_origin(annotation)
    if origin is tuple and isinstance(plain, list | tuple):
        item = get_args(annotation)[0]
        return tuple(_decoded(item, entry, f"{path}[{i}]") for i, entry in enumerate(plain))
    if plain is not None and type(None) in get_args(annotation):
        return _decoded(optional_part(annotation), plain, path)
    return plain


def _plain(content: Any, omit_defaults: bool) -> Any:
    if is_dataclass(content) and not isinstance(content, type):
        return to_mapping(content, omit_defaults=omit_defaults)
    if isinstance(content, tuple):
        return [_plain(item, omit_defaults) for item in content]
    return content


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# Imports an entry of a table only when it is used, so that listing the names is fast.


Entry = TypeVar("Entry")


def imported(path: str) -> Callable[[], Any]:
    """Make a function that imports the object at a path, such as ``pathlib:Path``."""
    module, _, name = path.partition(":")
    return lambda: getattr(import_module(module), name)


def called(path: str, *arguments: str) -> Callable[[], Any]:
    """Make a function that imports the function at a path, calls it, and returns its result."""
    return lambda: imported(path)()(*arguments)


class OnUse(MutableMapping[str, Entry]):
    """A table of entries by name; a function makes each entry when it is first used."""

    def __init__(self, makers: Mapping[str, Callable[[], Entry]]) -> None:
        self._makers = dict(makers)
        self._made: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._makers[name] = lambda: entry
        self._made[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._makers[name]
        self._made.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def word_set(text: str) -> frozenset[str]:
    """The set of the words of a text, which are separated by blanks.

    >>> sorted(word_set("one two"))
    ['one', 'two']
    """
    return frozenset(text.split())
