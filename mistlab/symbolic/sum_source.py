"""The source text of one NumPy function that computes many sums of products of sizes.

Products are computed once, under names, each from a product with one factor less. A sum that has
all terms of a sum before it, and few more, begins with that sum. Nothing is subtracted that the
sums do not subtract themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.symbolic.sums import Number, Powers, Sum, text_of_number

# How many sums before a sum are looked at for one that it can begin with.
_LOOKED_AT = 24


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest of several sums."""

    sums: tuple[Sum, ...]


Value = Sum | Largest


def source_of_sums(values: Sequence[Value], columns: Sequence[str]) -> str:
    """The source of a function of ``columns`` that returns the values."""
    every = [one for value in values for one in _sums_of(value)]
    unknown = {name for one in dict.fromkeys(every) for name in one.names} - {*columns}
    if unknown:
        message = f"symbols {', '.join(sorted(unknown))} are neither columns nor constants"
        raise ValueError(message)
    names = _Names(order=_order(every))
    texts = names.of_sums(every)
    results = ", ".join(_text(value, texts) for value in values)
    lines = [f"    {line}" for line in names.lines]
    return "\n".join([f"def compiled({', '.join(columns)}):", *lines, f"    return [{results}]"])


def _sums_of(value: Value) -> Iterator[Sum]:
    if isinstance(value, Largest):
        yield from value.sums
    else:
        yield value


def _text(value: Value, texts: Mapping[Sum, str]) -> str:
    if isinstance(value, Sum):
        return texts[value]
    first, *others = (texts[one] for one in value.sums)
    for other in others:
        first = f"numpy.maximum({first}, {other})"
    return first


def _order(sums: Sequence[Sum]) -> Mapping[str, int]:
    """The places of factors in products: those of the most products come first."""
    products = {powers for one in sums for powers in one.terms}
    counts = Counter(name for powers in products for name, _ in powers)
    return {name: place for place, (name, _) in enumerate(counts.most_common())}


@dataclass(slots=True)
class _Names:
    """Names of values, and the ``lines`` that compute them."""

    order: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    products: dict[Powers, str] = field(default_factory=dict)
    terms: dict[tuple[Powers, Number], str] = field(default_factory=dict)

    def of_sums(self, sums: Sequence[Sum]) -> dict[Sum, str]:
        """The name or number of each sum."""
        distinct = sorted(dict.fromkeys(sums), key=lambda one: len(one.terms))
        texts: dict[Sum, str] = {}
        for place, one in enumerate(distinct):
            texts[one] = self._sum(one, distinct[max(0, place - _LOOKED_AT) : place], texts)
        return texts

    def _sum(self, one: Sum, before: Sequence[Sum], texts: Mapping[Sum, str]) -> str:
        base = _base(one, before)
        left = one.terms if base is None else _left(one, base)
        parts = [self._term(powers, number) for powers, number in left.items()]
        if base is not None:
            parts.insert(0, texts[base])
        if len(parts) <= 1:
            return parts[0] if parts else "0"
        return self._line(" + ".join(parts))

    def _term(self, powers: Powers, number: Number) -> str:
        if not powers:
            return text_of_number(number)
        product = self._product(tuple(sorted(powers, key=lambda one: self.order[one[0]])))
        if number == 1:
            return product
        if (powers, number) not in self.terms:
            self.terms[powers, number] = self._line(f"{text_of_number(number)}*{product}")
        return self.terms[powers, number]

    def _product(self, powers: Powers) -> str:
        """The name of a product with its factors in order."""
        if powers not in self.products:
            *others, (name, power) = powers
            one = name if abs(power) == 1 else f"{name}**{abs(power)}"
            if others:
                sign = "*" if power > 0 else "/"
                text = self._line(f"{self._product(tuple(others))}{sign}{one}")
            else:
                text = (
                    name
                    if one.isidentifier() and power == 1
                    else self._line(one if power > 0 else f"1/{one}")
                )
            self.products[powers] = text
        return self.products[powers]

    def _line(self, text: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


def _base(one: Sum, before: Sequence[Sum]) -> Sum | None:
    """The longest sum with which a sum can begin, if it saves something."""
    parts = (other for other in before if len(other.terms) > 1 and _begins(one, other))
    return max(parts, key=lambda other: len(other.terms), default=None)


def _begins(one: Sum, other: Sum) -> bool:
    """Whether a sum has all terms of another one, and nothing negative in them."""
    own = one.terms
    return all(0 < number <= own.get(powers, 0) for powers, number in other.terms.items())


def _left(one: Sum, base: Sum) -> Mapping[Powers, Number]:
    """The terms of a sum beyond those of the sum with which it begins."""
    terms = {powers: number - base.terms.get(powers, 0) for powers, number in one.terms.items()}
    return {powers: number for powers, number in terms.items() if number}
