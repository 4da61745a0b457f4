"""Remarks on the options of a launch line: what costs and cannot be said comes first, options that
do not cost are a count."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mistlab.core.values import InputError
from mistlab.export.megatron_flags import KNOWN, Option, Options
from mistlab.export.megatron_tables.telling import TELLING
from mistlab.export.megatron_tables.unsaid import IDLE, REFUSED, UNSAID
from mistlab.export.remarks import Remark
from mistlab.shell.word import Word

# How far a misspelt name may be from the one that was meant, and from how long names on.
_FARTHEST, _SHORTEST = 2, 10
# Parts of names that tell of cost.
_COSTLY = re.compile(
    r"parallel|expert|moe|layer|head|hidden|zero|offload|swap|recompute|checkpoint-act|shard|seq"
    r"|batch|precision|quant|fp8|lora|freeze|stage|pipeline|chunk|attention|attn|window|vocab|mamba"
)
_ONE_UNKNOWN = "is unknown: no option that is"
_CALM = "without effect on a step's cost"


@dataclass(slots=True, kw_only=True)
class OptionRemarks:
    """Remarks on options: ``first`` those that may hide what costs, then what is not ``said`` in
    plans, then ``unknown`` names, and a ``count`` of the rest."""

    first: list[Remark] = field(default_factory=list)
    said: list[Remark] = field(default_factory=list)
    unknown: list[Remark] = field(default_factory=list)
    count: list[Remark] = field(default_factory=list)

    @classmethod
    def of(cls, options: Options) -> "OptionRemarks":
        """All remarks that options themselves call for."""
        return cls(
            first=[_of_stray(word) for word in options.strays],
            said=[*_of_spellings(options), *_unsaid(options), *_repeated(options)],
            unknown=[*_unknown(options)],
            count=[*_count(options)],
        )

    def around(self, remarks: Sequence[Remark]) -> tuple[Remark, ...]:
        """All remarks in order, with those that were made while options were read."""
        return (*self.first, *remarks, *self.said, *self.unknown, *self.count)


def check_refused(options: Options) -> None:
    """Refuse options that make another model or another task of a line."""
    for name, reason in REFUSED.items():
        option = options.given.get(name)
        if option is None or (option.words and option.words[0].lower() in IDLE):
            continue
        words = " ".join((options.where(name), *option.words))
        message = f"{words}: {reason}"
        raise InputError(message if ": " in reason else f"{message}: import a line without it")


def _of_stray(word: Word) -> Remark:
    assert word.unknown is not None
    unknown = word.unknown
    line = f"line {unknown.line}: " if unknown.line else ""
    text = f"{line}{unknown.reason}: taken as empty; {unknown.remedy}"
    return Remark(kind="assumed", choice=word.text, text=text)


def _of_spellings(options: Options) -> Iterator[Remark]:
    for short, name in options.shortened.items():
        if name in TELLING:
            yield Remark(kind="assumed", choice=short, text=f"read as {name}, which begins so")


def _unsaid(options: Options) -> Iterator[Remark]:
    for name, instead in UNSAID.items():
        option = options.given.get(name)
        if option is not None and not _is_off(option):
            words = " ".join((name, *option.words))
            yield Remark(kind="ignored", choice=words, text=f"{instead}{_line_of(option)}")


def _is_off(option: Option) -> bool:
    return bool(option.words) and option.words[0].lower() in ("false", "none", "null", "0")


def _line_of(option: Option) -> str:
    return f" (line {option.line})" if option.line else ""


def _repeated(options: Options) -> Iterator[Remark]:
    for name, before in options.repeated.items():
        last = " ".join(options.words[name]) or "on"
        if any(value != last for value in before) and name in TELLING:
            text = f"is given as {', '.join((*before, last))}: took the last"
            yield Remark(kind="contradicting", choice=name, text=text)


def _unknown(options: Options) -> Iterator[Remark]:
    """At most three lines: a misspelt name, names that sound as if they cost, and all others."""
    costly: list[str] = []
    others: list[str] = []
    near = None
    for name in options.unknown:
        words = " ".join((name, *options.words[name]))
        if near is None and (near := nearest_name(name)) is not None:
            text = f"is unknown: did you mean {near!r}?{_line_of(options.given[name])}"
            yield Remark(kind="ignored", choice=words, text=text)
        else:
            (costly if _COSTLY.search(name) else others).append(words)
    if costly:
        text = "unknown here, and by name they may cost: the prediction is without them"
        yield Remark(kind="ignored", choice=" ".join(costly), text=text)
    if others:
        several = "are unknown: no options that are" if len(others) > 1 else _ONE_UNKNOWN
        yield Remark(kind="ignored", choice=" ".join(others), text=f"{several} known here")


def _count(options: Options) -> Iterator[Remark]:
    if number := len(options.harmless):
        text = f"{number} option{'s' * (number > 1)} {_CALM}"
        yield Remark(kind="noted", choice="options", text=text)


def nearest_name(name: str) -> str | None:
    """The known option that a misspelt name is nearest to, if it is near.

    >>> nearest_name("--micro-bath-size")
    '--micro-batch-size'
    >>> nearest_name("--llm-ep") is None
    True
    """
    if len(name) < _SHORTEST:
        return None
    near = [
        (distance, known)
        for known in KNOWN
        if abs(len(known) - len(name)) <= _FARTHEST
        and (distance := _distance(name, known)) <= _FARTHEST
    ]
    return min(near)[1] if near else None


def _distance(one: str, other: str) -> int:
    """The number of letters to add, drop or change that makes one name of another."""
    row = list(range(len(other) + 1))
    for index, letter in enumerate(one, 1):
        before, row[0] = row[0], index
        for place, target in enumerate(other, 1):
            change = before + (letter != target)
            before = row[place]
            row[place] = min(change, row[place] + 1, row[place - 1] + 1)
    return row[-1]
