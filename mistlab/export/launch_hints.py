"""What to give, where a launch script is refused for what its evaluation took for granted."""

import re
from collections.abc import Iterator

from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.shell.launch import Launch
from mistlab.shell.source import Source

# A note on a variable that has its default, in the words of the evaluation of scripts.
_DEFAULT = re.compile(r"^(line \d+[^:]*): (\w+) is taken as (.+), its default: ")
_WITHOUT_ARGUMENTS = "the script is taken as started without arguments"
# Names of variables that count nodes or the processes on them, and how refusals speak of these.
_COUNTS_NODES = re.compile(r"NODE|HOST|WORKER", re.IGNORECASE)
_COUNTS_RANKS = re.compile(r"GPU|NPU|DEVICE|PROC|TASK|RANK|WORLD", re.IGNORECASE)
_OF_RANKS = re.compile(r"\bGPUs\b|\bnodes\b|\bdata_parallel\b")
_OF_NO_VALUE = re.compile(r": 0 is too small|: its value is missing")
_READS_ARGUMENTS = re.compile(r"^(?!\s*#).*(?:\bgetopts\s|\$#|\$\{#\}|\bshift\b)", re.MULTILINE)


def with_hints(error: InputError, launch: Launch, source: Source, given: Given) -> InputError:
    """A refusal of a script, with what was taken for granted of the numbers that it is about."""
    message = str(error)
    hints: list[str] = []
    if _OF_RANKS.search(message):
        hints += _of_ranks(launch, given)
    if _OF_NO_VALUE.search(message) and source.arguments is None:
        hints += _of_arguments(launch, source)
    return InputError("; ".join((message, *hints))) if hints else error


def _of_ranks(launch: Launch, given: Given) -> Iterator[str]:
    """Hints on counts of nodes and GPUs that are a variable's default and not given."""
    for note in launch.notes:
        if (match := _DEFAULT.match(note)) is None:
            continue
        line, name, value = match.groups()
        taken = f"{name} is taken as {value}, its default ({line}): give"
        if _COUNTS_NODES.search(name) and not re.search("PER_?NODE", name, re.IGNORECASE):
            if given.nodes is None:
                yield f"{taken} --nodes N or --set {name}=VALUE"
        elif _COUNTS_RANKS.search(name) and given.gpus_per_node is None:
            yield f"{taken} --gpus-per-node N or --set {name}=VALUE"


def _of_arguments(launch: Launch, source: Source) -> Iterator[str]:
    """A hint on arguments that a script reads and is not given."""
    match = _READS_ARGUMENTS.search(source.text)
    if match is not None:
        line = source.text.count("\n", 0, match.end()) + 1
        yield f"the script reads arguments (line {line}), and none are given: -- ARG ..."
        return
    yield from (note for note in launch.notes if _WITHOUT_ARGUMENTS in note)
