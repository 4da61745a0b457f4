"""Tools for values: frozen dataclasses that check their fields and convert from and to mappings.

A value calls ``check_fields`` in its ``__post_init__``. Annotations say what a field may hold, and
``field(metadata=bounded(...))`` gives the range of its numbers. Supported annotations are int,
float, bool, str, ``Literal`` of texts, other values, ``tuple[X, ...]`` and ``X | None``. No
validation library does all of this: refuse a bool for an int, say a remedy, import quickly.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from mistlab.values.errors import FieldError, near_matches, refuse, within
from mistlab.values.field_checks import (
    Check,
    NameIn,
    NumberRange,
    check_of,
    optional_part,
    shown,
    wanted,
)
from mistlab.values.limits import LEAST_QUANTITY, MOST_QUANTITY

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", bound="DataclassInstance")
Metadata = Mapping[str, NumberRange]
_BOUNDS = "bounds"
_NAMES = "names"


def bounded(
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    most: float | None = None,
) -> Metadata:
    """Metadata for the range of a field's numbers: at least, above and at most these bounds. No
    real number comes near to ``most``, which only an error names."""
    return {_BOUNDS: NumberRange(minimum=minimum, above=above, maximum=maximum, most=most)}


def quantity(*, zero: bool = False, most: float = MOST_QUANTITY) -> Metadata:
    """Metadata for a measured quantity, in the unit of its field; a latency may be ``zero``."""
    if zero:
        return {_BOUNDS: NumberRange(minimum=0, most=most)}
    return {_BOUNDS: NumberRange(above=0, least=LEAST_QUANTITY, most=most)}


def ratio() -> Metadata:
    """Metadata for a field whose numbers are shares of a whole, from 0 to 1."""
    return {_BOUNDS: NumberRange(minimum=0, maximum=1, noun="a ratio")}


def name_in(names: Callable[[], Iterable[str]]) -> Mapping[str, NameIn]:
    """Metadata of a text field that holds a name out of a table to which rows may be added."""
    return {_NAMES: NameIn(names=names)}


def check_fields(value: "DataclassInstance") -> None:
    """Check every field of a value under construction, and store numbers in Python's types.

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


def check_field(kind: "type[DataclassInstance]", name: str, given: object) -> Any:
    """Check one field for a value of this type; return the content that it would store."""
    return _checked(name, dict(_checks(kind))[name], given)


def from_mapping(kind: type[Value], plain: object, where: str = "") -> Value:
    """Make a value from the mappings, lists, texts and numbers of a YAML or JSON file.

    ``where`` is the path of the mapping in its file, for messages. Entries that are values already
    are taken as they are.
    """
    with within(where):
        return _decoded_value(kind, plain)


def to_mapping(value: "DataclassInstance", *, omit_defaults: bool = False) -> dict[str, Any]:
    """A value as plain data, keys in the order of its fields; ``from_mapping`` inverts it."""
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


def _checked(name: str, check: Check, given: object) -> Any:
    try:
        return check(given)
    except FieldError as error:
        raise error.within(name) from None


def _decoded_value(kind: type[Value], plain: object) -> Value:
    types = _field_types(kind)
    if not isinstance(plain, Mapping):
        message = f"{shown(plain)} is not a mapping: give the keys {', '.join(types)}"
        refuse("", message)
    for key in plain:
        if key not in types:
            refuse(str(key), f"unknown key{near_matches(key, types)}")
    for name, entry in types.items():
        if entry.required and name not in plain:
            missing = f"missing: give {wanted(entry.annotation, entry.bounds)}"
            refuse(name, missing)
    return kind(
        **{name: _decoded(types[name].annotation, entry, name) for name, entry in plain.items()}
    )


def _decoded(annotation: Any, plain: Any, path: str) -> Any:
    """Plain data converted as the annotation asks; data of another shape stays, for checks."""
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
