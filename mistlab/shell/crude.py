"""Reads a launch script: its assignments, its variables, and the one command that starts training.

It understands what launch scripts are made of: lines that go on after a backslash, comments,
assignments, arrays, variables with defaults, and sums of them. It runs nothing.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mistlab.values.errors import InputError

Words = list[str]

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_SUM = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?:\[[@*]\])?(?P<other>:?[-=](?P<default>[^{}]*))?\})"
)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_DEPTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command of a script that starts training: its launcher's options and its own arguments.

    ``started`` are words before the training script's name, ``arguments`` those after it.
    """

    started: tuple[str, ...]
    arguments: tuple[str, ...]


def launch_of(text: str) -> Launch:
    """The command with the most options of a launch line or a shell script."""
    variables: dict[str, Words] = {}
    best: Words = []
    for command in _commands(text):
        words = [word for raw in command for word in _expanded(raw, variables)]
        options = sum(word.startswith("--") for word in words)
        if options and options >= sum(word.startswith("--") for word in best):
            best = words
    if not best:
        message = "holds no command with options: give a file with the line that starts training"
        raise InputError(message)
    return _split(best)


def _split(words: Words) -> Launch:
    """A command before and after the name of its training script."""
    starts = [place for place, word in enumerate(words) if word.endswith(_LAUNCHERS)]
    after = starts[-1] + 1 if starts else 0
    for place in range(after, len(words)):
        is_module = words[place - 1] in ("-m", "--module") and place > after
        if words[place].endswith(".py") or is_module:
            return Launch(started=tuple(words[:place]), arguments=tuple(words[place + 1 :]))
    first = next((place for place, word in enumerate(words) if word.startswith("--")), 0)
    if starts:
        return Launch(started=tuple(words), arguments=tuple(words[first:]))
    return Launch(started=tuple(words[:first]), arguments=tuple(words[first:]))


def _commands(text: str) -> list[Words]:
    """The commands of a script as raw words with their quotes; an array is one word."""
    commands: list[Words] = [[]]
    word, quote, depth = "", "", 0
    for letter in _without_comments(text.replace("\\\r\n", " ").replace("\\\n", " ")) + "\n":
        if quote or letter in "'\"":
            quote = _quote_after(quote, letter)
            word += letter
        elif depth or letter == "(":
            depth += (letter == "(") - (letter == ")")
            word += letter
        elif letter not in " \t\r\n;&|":
            word += letter
        else:
            commands[-1] += [word] if word else []
            commands += [[]] if letter in "\n;&|" else []
            word = ""
    if quote or depth:
        message = f"is no shell script: close what {quote or '('} opens"
        raise InputError(message)
    return [command for command in commands if command]


def _without_comments(text: str) -> str:
    kept, quote, skips = [], "", False
    for place, letter in enumerate(text):
        if skips:
            skips = letter != "\n"
        elif quote or letter in "'\"":
            quote = _quote_after(quote, letter)
        elif letter == "#" and (place == 0 or text[place - 1] in " \t\n;("):
            skips = True
        if not skips:
            kept.append(letter)
    return "".join(kept)


def _quote_after(quote: str, letter: str) -> str:
    """The quote that is open after a letter, where ``quote`` was open before."""
    if not quote:
        return letter
    return "" if letter == quote else quote


def _expanded(raw: str, variables: dict[str, Words]) -> Words:
    """A raw word as words, with its variables replaced; an assignment is kept, and no word."""
    match = _ASSIGNMENT.fullmatch(raw)
    if match is None or raw.startswith("-"):
        return _words(raw, variables)
    value = match["value"]
    if value.startswith("(") and value.endswith(")"):
        value = value[1:-1]
    before = variables.get(match["name"], []) if match["more"] else []
    variables[match["name"]] = [*before, *_words(value, variables)]
    return []


def _words(raw: str, variables: Mapping[str, Words]) -> Words:
    # A quoted array is as many words as it holds.
    text = raw[1:-1] if raw[:1] == '"' and _VARIABLE.fullmatch(raw[1:-1]) else raw
    for _ in range(_DEPTH):
        replaced = _SUM.sub(lambda sum_: _sum(sum_[1], variables), text)
        replaced = _VARIABLE.sub(lambda name: _value(name, variables), replaced)
        if replaced == text:
            break
        text = replaced
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _value(match: re.Match[str], variables: Mapping[str, Words]) -> str:
    """A variable's words; its default if it has no words, its own name if nothing is known."""
    found = variables.get(match["plain"] or match["name"])
    if found:
        return " ".join(found)
    if match["other"]:
        return match["default"] or ""
    return "" if found is not None else match[0]


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _sum(text: str, variables: Mapping[str, Words]) -> str:
    """The value of an arithmetic expression of whole numbers and variables."""
    names = re.sub(
        r"\$?\{?([A-Za-z_]\w*)\}?",
        lambda name: " ".join(variables.get(name[1], ["unknown"])),
        text,
    )
    try:
        return str(_number(ast.parse(names.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return "unknown"


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
