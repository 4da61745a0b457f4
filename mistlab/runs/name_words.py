"""The words of names that people give models, GPUs and software, so that names match whole words.

A word ends where letters turn into digits, and at every other sign. A number keeps its decimal,
and the letter of a size: ``Qwen3.6-35B-A3B`` is qwen, 3.6, 35b, a, 3b, and ``llama3_70b`` is llama,
3, 70b. So ``qwen-35b`` is no Qwen 3.5, and ``l40s`` no L4.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

Named = TypeVar("Named")

# A number with the letter of its size, as in 8b; any other number, of which one digit after _ is a
# decimal too, as in nemotron3_5; letters, but for a v before a number, as in deepseekv3.
_WORD = re.compile(
    r"[0-9]+(?:\.[0-9]+)?[bmt](?![a-z0-9])|[0-9]+(?:\.[0-9]+|_[0-9](?![a-z0-9]))?|[a-z]+?(?=v[0-9])|[a-z]+"
)


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name, in small letters."""
    return tuple(word.replace("_", ".") for word in _WORD.findall(name.casefold()))


def first_named(name: str, known: Mapping[str, Named]) -> Named | None:
    """The first entry whose words a name has, one after another; None if it has none's."""
    return next((known[key] for key in keys_in(name, known)), None)


def keys_in(name: str, known: Iterable[str]) -> list[str]:
    """The keys whose words a name has, one after another."""
    words = words_of(name)
    return [key for key in known if _has(words, words_of(key))]


def _has(words: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    places = range(len(words) - len(wanted) + 1)
    return any(words[place : place + len(wanted)] == wanted for place in places)
