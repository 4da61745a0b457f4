"""Draws wrong options of a command, by what its parser says of them."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tests.hostile import values
from tests.hostile.case import Case
from tests.hostile.commands import LONG, OF_WORK, SMALL, options_of

_UNKNOWN = ("--modle", "--=", "--json=1", "-x", "--nodes=1=2", "--model", "--seed")


def option_case(random: Random, command: str) -> Case:
    """A command with one or two wrong options."""
    given, told = [], []
    for _ in range(random.choice((1, 1, 2))):
        words = _words(random, command)
        given += words
        told.append(" ".join(word[:40] for word in words))
    return Case(
        command=command,
        kind="options",
        about="; ".join(told),
        arguments=(*SMALL.get(command, ("--quick",) * _has(command, "--quick")), *given),
        must_refuse=command in LONG,
        echo=_echo_of_words(command, given),
    )


def _has(command: str, option: str) -> bool:
    return any(option in action.option_strings for action in options_of(command))


def _words(random: Random, command: str) -> list[str]:
    """An option with a wrong value; of a command whose work is long one that no value can be."""
    is_long = command in LONG
    actions = [action for action in options_of(command) if action.option_strings]
    if is_long:
        actions = [one for one in actions if _surely_wrong(one)]
    if not actions or random.random() < 0.08:
        return [random.choice(_UNKNOWN[:5])]
    action = random.choice(actions)
    name = action.option_strings[-1]
    if action.nargs == 0:
        return [name]
    texts = _surely_wrong(action) if is_long else _texts(action)
    value = random.choice(texts)
    return [f"{name}={value}"] if random.random() < 0.7 else [name, value]


def _texts(action: Any) -> Sequence[str]:
    kind = getattr(action.type, "__name__", action.type)
    if action.choices is not None:
        return (*values.NAMES[:20], *map(str, action.choices))
    if action.option_strings[-1] in OF_WORK:
        return (*values.NO_NUMBERS, "-1", "0", "1", "nan", "-inf", "1e-308")
    if kind in ("int", "float", "seed"):
        return values.NUMBERS
    return values.PATHS if kind == "Path" else values.NAMES


def _surely_wrong(action: Any) -> Sequence[str]:
    """Values that an option of a long command must refuse; none where it may take any."""
    kind = getattr(action.type, "__name__", action.type)
    if action.choices is not None or kind in ("int", "float", "seed"):
        return values.NO_NUMBERS
    names = ("--model", "--hardware", "--space", "--engine", "--view", "--searcher")
    return values.NAMES[:8] if action.option_strings[-1] in names else ()


_ECHOED = ("--nodes", "--gpus-per-node", "--sequence-length", "--global-batch")


def _echo_of_words(command: str, words: Sequence[str]) -> Mapping[str, Any]:
    """The sizes that an answer about a problem must have read."""
    honest = [*SMALL.get(command, ()), *words]
    if command not in ("tune", "compare_searchers") or any(w.startswith("--from") for w in words):
        return {}
    echo: dict[str, Any] = {}
    for place, word in enumerate(honest):
        name, equals, value = word.partition("=")
        if name in _ECHOED:
            value = value if equals else (honest[place + 1 : place + 2] or [""])[0]
            try:
                echo[name[2:].replace("-", "_")] = int(value)
            except ValueError:
                return {}
    return echo
