"""Finds the launch command in a script, with its options, processes and files, and resolves
references between settings.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import yaml

from mistlab.core.values import InputError, reject
from mistlab.export.found import Found
from mistlab.export.given import Given, ask_for_variable
from mistlab.export.megatron.launched_ranks import read_ranks
from mistlab.formats.content import content_of
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

# Launchers that may follow among the arguments of another program, such as a job submitter.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
# Files that a file names are searched in this many folders above it.
_HIGHEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A launch command: options by name, with ``_`` for ``-``, and the words that belong to no
    option.
    """

    launch: Launch
    options: Mapping[str, Word | None]
    others: tuple[Word, ...]
    started: Mapping[str, Word | None]

    def text(self, *names: str) -> str | None:
        """Return the value of the first of several options that the command has; refuses a value
        that is known only when the script runs.
        """
        for name in names:
            word = self.options.get(name)
            if word is not None:
                return known_text(word, name)
        return None


def command_of(source: LaunchFile) -> Command | None:
    """Return the launch command of a shell script, or None if the text is no script or starts
    nothing.
    """
    if content_of(source).kind != "shell":
        return None
    settings = tuple(sorted(source.settings.items()))
    key = (source.text, source.name, source.beside, settings, source.arguments, source.line)
    return _command(*key)


@lru_cache(maxsize=4)
def _command(
    text: str,
    name: str,
    beside: Callable[[str], str | None],
    settings: tuple[tuple[str, str], ...],
    arguments: tuple[str, ...] | None,
    line: int | None,
) -> Command | None:
    # A script is evaluated once and cached, since each known format asks for its commands again.
    source = LaunchFile(
        text=text, name=name, beside=beside, settings=dict(settings), arguments=arguments, line=line
    )
    try:
        launch = _with_launcher(_innermost(launch_of(source)))
    except InputError:
        return None
    options, others = _by_name(launch.arguments)
    started, _ = _by_name(launch.started)
    return Command(launch=launch, options=options, others=others, started=started)


def _innermost(launch: Launch) -> Launch:
    """Return the launch of the innermost program: in ``submit.py --nodes 2 -- torchrun train.py``
    that of ``train.py``.
    """
    names = [PurePath(word.text).name for word in launch.arguments]
    starts = [place for place, name in enumerate(names) if name in _LAUNCHERS]
    if not starts:
        return launch
    after = starts[-1] + 1
    ends = [
        number
        for number in range(after, len(names))
        if names[number].endswith(".py") or names[number - 1] in ("-m", "--module")
    ]
    if not ends:
        return launch
    started = launch.arguments[starts[-1] : ends[0]]
    return replace(
        launch,
        program=launch.arguments[ends[0]].text,
        launcher=names[starts[-1]],
        started=(*launch.started, *started),
        arguments=launch.arguments[ends[0] + 1 :],
    )


# Options of ``trl sft`` that its training script does not know, so that they go to ``accelerate
# launch``; some of the Trainer's arguments begin like them.
_OF_ACCELERATE = re.compile(
    r"accelerate_config|config_file|num_(processes|machines)|mixed_precision|multi_gpu|machine_rank"
    r"|use_(deepspeed|fsdp|megatron_lm)|zero_stage|offload_\w+_device|deepspeed_config_file|gpu_ids"
    r"|fsdp_(?!config$|min_num_params|transformer_layer)\w+|(parallelism_config|main_process)_\w+"
)


def _with_launcher(launch: Launch) -> Launch:
    """Return the launch of a program that starts its training by another launcher, as one by that
    launcher: ``trl sft`` is started by Accelerate, ``tune run`` and ``swift sft`` by torchrun.
    """
    if launch.launcher == "trl":
        return _of_trl(launch)
    if launch.launcher in ("swift", "megatron"):
        return _of_swift(launch)
    return _of_torchtune(launch) if launch.launcher == "tune" else launch


def _of_trl(launch: Launch) -> Launch:
    options, others, is_theirs = list[Word](), list[Word](), False
    for word in launch.arguments:
        if word.text.startswith("--"):
            name = word.text[2:].partition("=")[0]
            is_theirs = _OF_ACCELERATE.fullmatch(name.replace("-", "_")) is not None
            if is_theirs:
                text = re.sub("^--accelerate[-_]config", "--config_file", word.text)
                word = _part(word, text)  # noqa: PLW2901 (others stay as they are)
        (options if is_theirs else others).append(word)
    before, program = launch.started[:-1], launch.started[-1]
    if not any(PurePath(word.text).name == "accelerate" for word in before):
        options = [Word(text="accelerate"), Word(text="launch"), *options]
    return replace(
        launch,
        launcher="accelerate",
        started=(*before, *options, program),
        arguments=tuple(others),
    )


def _of_swift(launch: Launch) -> Launch:
    """Return the launch of ms-swift's program or Megatron-SWIFT's, which its environment has
    started by torchrun, or else as a single process.
    """
    started = [Word(text="torchrun")]
    for option, name in (("--nproc-per-node", "NPROC_PER_NODE"), ("--nnodes", "NNODES")):
        started += [Word(text=option), launch.environment.get(name, Word(text="1"))]
    return replace(launch, started=(*launch.started, *started))


def _of_torchtune(launch: Launch) -> Launch:
    """Return the launch of torchtune's recipe, which stands before ``--config``; torchrun's options
    stand before the recipe, and without any there is a single process.
    """
    names = [word.text.partition("=")[0] for word in launch.arguments]
    recipe = names.index("--config") - 1 if "--config" in names else -1
    if recipe < 0:
        return launch
    options = launch.arguments[:recipe] or (Word(text="--nproc-per-node"), Word(text="1"))
    return replace(
        launch,
        program=launch.arguments[recipe].text,
        started=(*launch.started, Word(text="torchrun"), *options),
        arguments=launch.arguments[recipe + 1 :],
    )


def parted(
    command: Command, pattern: re.Pattern[str], switches: Container[str]
) -> tuple[Command, tuple[Word, ...]]:
    """Return a command without those of its words that begin as a pattern says, and these words;
    options that are ``switches`` take no value.
    """
    words = command.launch.arguments
    apart = tuple(word for word in words if pattern.match(word.text))
    options, others = _by_name([word for word in words if word not in apart], switches)
    return replace(command, options=options, others=others), apart


def _by_name(
    words: Sequence[Word], switches: Container[str] = ()
) -> tuple[dict[str, Word | None], tuple[Word, ...]]:
    """Split the words of a command into options with their first values, and words that belong to
    no option.
    """
    options: dict[str, Word | None] = {}
    others: list[Word] = []
    name = ""
    for word in words:
        if word.text.startswith("-") and not word.text[1:2].isdigit():
            name, equals, value = word.text.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = _part(word, value) if equals else None
            name = "" if equals or name in switches else name
        elif name:
            options[name] = word
            name = ""
        else:
            others.append(word)
    return options, tuple(others)


def _part(word: Word, text: str) -> Word:
    return Word(text=text, line=word.line, unknown=word.unknown)


def known_text(word: Word, name: str) -> str:
    """Return the text of a word in the command; refuses a word that is known only when the script
    runs.
    """
    if word.unknown is not None:
        ask_for_variable(name, word.unknown)
    return word.text


def take_ranks(command: Command, source: LaunchFile, draft: Found, given: Given) -> None:
    """Read from the options of launchers how many nodes and processes a command starts."""

    def beside(path: str) -> str | None:
        return _at_hand(path, command, source)

    read_ranks(command.launch, source.text, draft, given, beside)
    word = command.launch.environment.get("CUDA_VISIBLE_DEVICES")
    if draft.gpus_per_node is None and word is not None and word.unknown is None:
        devices = [device for device in word.text.split(",") if device.strip().isdigit()]
        draft.gpus_per_node = len(devices) or None


def with_files(source: LaunchFile, command: Command | None) -> LaunchFile:
    """Return the launch file, which then also finds files that its script writes and files in
    folders above its own.
    """
    return replace(source, beside=lambda path: _at_hand(path, command, source))


def near_text(path: str, source: LaunchFile) -> str | None:
    """Return the text of a file that another file names, searched in the folder of that file and
    then in the folders above it.
    """
    for ups in range(_HIGHEST + 1):
        text = source.beside(str(PurePath(*[".."] * ups, path)))
        if text is not None:
            return text
    return None


def _at_hand(path: str, command: Command | None, source: LaunchFile) -> str | None:
    """Return the text of a file that the script writes, or else of one in nearby folders; None if
    there is none.
    """
    written = command.launch.written if command else {}
    text = next((body for name, body in written.items() if PurePath(name) == PurePath(path)), None)
    return near_text(path, source) if text is None else text


def named_text(path: str, command: Command | None, source: LaunchFile, role: str) -> str:
    """Return the text of a file that a script names, which the script itself writes or which is in
    the same folder.
    """
    text = _at_hand(path, command, source)
    if text is None:
        reject(
            f"{path}: {role}, but is not in the script's folder: put it there, or import {path} "
            "itself"
        )
    return text


def valued(text: str) -> Any:
    """Parse a command-line word as YAML: a number, a boolean, a list, or text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if value is None and text else value


def with_dotted(settings: Mapping[str, Any], pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with overrides applied; keys of overrides are paths such as
    ``training.seq_len``.
    """
    merged: dict[str, Any] = dict(settings)
    for path, value in pairs.items():
        inner = merged
        *parents, last = path.split(".")
        for parent in parents:
            below = inner.get(parent)
            inner[parent] = dict(below) if isinstance(below, Mapping) else {}
            inner = inner[parent]
        inner[last] = value
    return merged


def dotted_options(command: Command, calm: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command whose names are paths such as ``training.seq_len``, with their
    values. An option without a value is true; one in ``calm``, without effect on cost, may be
    unknown and is then left out.
    """
    for name, word in command.options.items():
        parts = name.split(".")
        if len(parts) > 1 and not (word and word.unknown and {parts[0], parts[-1]} & set(calm)):
            yield name, True if word is None else valued(known_text(word, name))


def assignments(command: Command) -> Iterator[tuple[str, Any]]:
    """Yield the settings in words such as ``model.d_model=64``, as Hydra and OmegaConf parse
    them.
    """
    for word in command.others:
        name, equals, value = word.text.partition("=")
        if equals and name.lstrip("+").replace(".", "").replace("_", "").isalnum():
            known_text(word, name)
            yield name.lstrip("+"), valued(value)


# Resolves settings that refer to other settings or to environment variables.
#
# OmegaConf writes ``${model.d_model}``, or ``${.hidden_size}`` for a setting of the same section,
# and NeMo ``${multiply:4, ${.hidden_size}}`` for a computed value. Primus writes ``${PRIMUS_TP:1}``
# for a variable with a default. A reference that cannot be resolved stays as it is, and is refused
# if its value is needed.


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20
# A file is refused if it has more references than this, since references that double at each step
# would take hours.
_MOST = 10_000
_OPERATIONS: Mapping[str, Callable[[list[float]], float]] = {
    "multiply": lambda numbers: numbers[0] * numbers[1],
    "divide": lambda numbers: numbers[0] / numbers[1],
    "sum": sum,
    "add": sum,
}
_Path = tuple[str, ...]


def resolved(settings: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with all references resolved that can be; ``variables`` are environment
    variables, which are looked up first.
    """
    try:
        result = _Resolver(settings, variables).value(settings, (), 0)
    except RecursionError:
        reject("references ${KEY} are nested too deeply: write values in their place")
    assert isinstance(result, dict)
    return result


@dataclass(slots=True)
class _Resolver:
    """Resolves references between settings, and counts them."""

    root: Mapping[str, Any]
    variables: Mapping[str, str]
    followed: int = 0

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        """Return a value of any type with its references resolved as far as possible."""
        if depth > _DEEPEST:
            reject(
                f"{'.'.join(path)}: its value refers to itself by ${{KEY}}: write a value instead"
            )
        if isinstance(value, Mapping):
            return {
                key: self.value(below, (*path, str(key)), depth) for key, below in value.items()
            }
        if isinstance(value, list):
            return [self.value(below, path, depth) for below in value]
        if isinstance(value, str) and "${" in value:
            return self._text(value, path, depth)
        return value

    def _text(self, text: str, path: _Path, depth: int) -> Any:
        """Return a text with its references resolved, inner ones first; if a number results, return
        the number.
        """
        for _ in range(_DEEPEST):
            match = _INNERMOST.search(text)
            if match is None:
                return valued(text)
            self.followed += 1
            if self.followed > _MOST:
                reject(
                    f"{'.'.join(path)}: has more than {_MOST} references ${{KEY}}: write values "
                    "instead"
                )
            known, meant = self._meant(match[1], path)
            if not known:
                return text
            if match[0] == text:
                return self.value(meant, path, depth + 1)
            if isinstance(meant, Mapping | list):
                return text
            text = text.replace(match[0], str(meant))
        return text

    def _meant(self, reference: str, path: _Path) -> tuple[bool, Any]:
        """Return whether a reference can be resolved, and its value."""
        name, colon, rest = reference.partition(":")
        if name == "oc.env":
            name, colon, rest = rest.partition(",")
        if name.strip() in self.variables:
            return True, valued(self.variables[name.strip()])
        if name in _OPERATIONS:
            return _computed(name, rest)
        if colon or reference.startswith("oc.env"):
            return bool(colon), valued(rest.strip().removeprefix("-"))
        return self._looked_up(name, path)

    def _looked_up(self, name: str, path: _Path) -> tuple[bool, Any]:
        """Return the setting at a reference's path; each leading dot after the first means one
        section further up.
        """
        inner = name.lstrip(".")
        ups = len(name) - len(inner)
        content: Any = self.root
        for part in (*(path[: len(path) - ups] if ups else ()), *inner.split(".")):
            if not isinstance(content, Mapping) or part not in content:
                return False, None
            content = content[part]
        return True, content


def _computed(name: str, rest: str) -> tuple[bool, Any]:
    try:
        result = _OPERATIONS[name]([float(part) for part in rest.split(",")])
    except (ValueError, ZeroDivisionError, IndexError):
        return False, None
    return True, int(result) if result == int(result) else result
