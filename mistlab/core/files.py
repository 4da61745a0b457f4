"""Reads and writes YAML and JSON files, with limits on size and nesting; joins their paths."""

import json
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mistlab.core.units import MIB_BYTES
from mistlab.core.values import FieldError, InputError, refuse, reject, shown

# Refuses YAML that is nested too deeply, or grows without bound when its aliases are expanded,
# before it is built.


if yaml.__with_libyaml__:
    from yaml import CSafeLoader as EventLoader
else:
    from yaml import SafeLoader as EventLoader  # type: ignore[assignment]

# libyaml reads YAML ten times faster, but not every build of PyYAML has it.
if TYPE_CHECKING or not yaml.__with_libyaml__:
    from yaml import SafeLoader
else:
    from yaml import CSafeLoader as SafeLoader


MOST_LEVELS = 100
MOST_ENTRIES = 10**6

# YAML with fewer brackets than this, without long runs of "- - -", deep indentation and aliases,
# cannot be nested too deeply. Other YAML is checked before it is built, which takes a third of the
# time of building it.
_FEW_BRACKETS = 500
_STRANGE = re.compile(r"(?:[-?:][ \t]+){50}|^ {200}|[*<]", re.MULTILINE)


def check_nesting(text: str) -> None:
    """Refuse a YAML text that is too deeply nested, or too large once its aliases are expanded.

    libyaml builds nested mappings and lists by recursion in C: a text of 60 KB with 30,000 brackets
    crashes the process. An alias repeats its whole anchor: nine lines can expand to a billion
    entries. A real file of this package has five levels and no alias.
    """
    if text.count("[") + text.count("{") > _FEW_BRACKETS or _STRANGE.search(text):
        _Walk().over(text)


class _Walk:
    """A pass over the parsing events of a YAML text, which counts nested mappings and lists and the
    entries of each anchor.
    """

    def __init__(self) -> None:
        # The anchor of each mapping or list that is still open, and the number of its entries so
        # far.
        self._open: list[tuple[str | None, int]] = []
        self._entries: dict[str, int] = {}

    def over(self, text: str) -> None:
        """Refuse a YAML text that is nested too deeply or has too many entries.

        Malformed text ends the check without an error, since building it reports one.
        """
        try:
            for event in yaml.parse(text, Loader=EventLoader):
                self._take(event)
        except yaml.YAMLError:
            return

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, 1))
            if len(self._open) > MOST_LEVELS:
                _refuse(event, f"nested more than {MOST_LEVELS} levels deep: write fewer levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, entries = self._open.pop()
            self._add(event, anchor, entries)
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in self._open):
                _refuse(event, f"alias *{event.anchor} is inside the value it names: remove it")
            self._add(event, None, self._entries.get(event.anchor or "", 1))
        elif isinstance(event, yaml.ScalarEvent):
            self._add(event, event.anchor, 1)

    def _add(self, event: yaml.Event, anchor: str | None, entries: int) -> None:
        """Add the entries of a finished mapping or list to those of the mapping or list around
        it.
        """
        if anchor is not None:
            self._entries[anchor] = entries
        if self._open:
            name, before = self._open[-1]
            self._open[-1] = (name, before + entries)
            if before + entries > MOST_ENTRIES:
                _refuse(
                    event,
                    f"more than {MOST_ENTRIES:,} entries once aliases (*NAME) are expanded: write "
                    "fewer aliases",
                )


def _refuse(event: yaml.Event, problem: str) -> None:
    mark = event.start_mark
    reject(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem)


# Reads and writes YAML files, which people write, and JSON files, which programs write. A file that
# cannot be read raises an ``InputError`` that begins with the file's name.


# The largest text that is parsed; the package's largest files have 40 KB in YAML and 35 KB in JSON.
MOST_TEXT_BYTES = 8 * MIB_BYTES
MOST_JSON_BYTES = 64 * MIB_BYTES


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping that a YAML file holds."""
    return parse_yaml(_read_text(path), str(path))


def parse_yaml(text: str, name: str, repeated: list[str] | None = None) -> dict[str, Any]:
    """The mapping that a YAML text holds; error messages call the text by ``name``.

    A key that stands twice in a mapping is refused. A caller that gives a list gets such keys in
    it, each with its line, and the last value counts, as in most programs that read YAML.
    """
    return _parsed(lambda text: _load_yaml(text, repeated), text, name)


def parse_settings(text: str, name: str) -> dict[str, Any]:
    """The mapping that a JSON or YAML text holds.

    JSON may be indented by tabs, which YAML refuses.
    """
    if text.lstrip().startswith("{"):
        try:
            return _parsed(_load_json, text, name)
        except InputError:
            # Mappings in braces may be YAML, too; for a text that is neither JSON nor YAML, YAML's
            # error message gives line and column.
            return parse_yaml(text, name)
    return parse_yaml(text, name)


def format_yaml(mapping: Mapping[str, Any]) -> str:
    """A mapping as YAML text, with its keys in order."""
    text: str = yaml.dump(
        dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


def write_yaml(mapping: Mapping[str, Any], path: Path) -> None:
    """Write a mapping to a YAML file."""
    with naming(path):
        path.write_text(format_yaml(mapping), encoding="utf-8")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to a file-system error that lacks it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def about(what: object) -> Iterator[None]:
    """Add to an ``InputError`` raised in the ``with`` block what it is about, such as a file."""
    try:
        yield
    except InputError as error:
        reject(f"{what}: {error}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the mapping that a JSON file holds."""
    return _parsed(_load_json, _read_text(path, MOST_JSON_BYTES), str(path))


def text_in(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Read the text of a file; refuses a file that cannot be read, and says what to do."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) <= most_bytes:
            return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        problem = f"has more than {most_bytes // MIB_BYTES} MiB: give a smaller file"
    except FileNotFoundError:
        problem = "there is no such file: check the path"
    except IsADirectoryError:
        problem = "is a folder: give a file in it"
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (byte {error.start}): give a text file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): check the path and its permissions"
    except ValueError as error:
        problem = f"is not a path ({error}): give the path of a file"
    raise InputError(problem)


def read_csv(path: Path, wanted: str = "the path of a CSV file") -> list[dict[str, str]]:
    """Read the rows of a CSV file, each a mapping from column to text.

    An error asks the user for the ``wanted`` file.
    """
    import csv  # noqa: PLC0415 (few commands read tables)

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        reject(f"{path}: {error.strerror}: give {wanted}")
    except UnicodeDecodeError:
        reject(f"{path}: is not text in UTF-8: give {wanted} in UTF-8")
    except csv.Error as error:
        reject(f"{path}: {error}: give {wanted}")


def _read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    with about(path):
        return text_in(path, most_bytes)


def _parsed(load: Callable[[str], Any], text: str, name: str) -> dict[str, Any]:
    try:
        content = load(text) if text.strip() else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = f"{position}{_yaml_problem(error, text)}"
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}: correct the JSON there"
    except yaml.reader.ReaderError as error:
        problem = f"character {error.position} is not printable: give a text file"
    except RecursionError:
        problem = "is nested too deeply: write at most a few levels"
    except InputError as error:
        problem = str(error)
    except ValueError:
        # Python reads no integer with so many digits.
        problem = "a number has thousands of digits: write a shorter number"
    else:
        if isinstance(content, dict):
            return content
        problem = _not_a_mapping(content)
    message = f"{name}: {problem}"
    raise InputError(message)


# What parts of PyYAML's and libyaml's messages mean, and what to do.
_YAML_PROBLEMS = {
    "mapping values are not allowed": (
        "a key with a colon cannot stand here: quote a text that contains ': ', or indent the line "
        "as the lines around it"
    ),
    "end of stream": "a text in quotes is not closed: write the closing quote",
    "expected ','": "a list in [ ] or a mapping in { } has no comma or closing bracket: write it",
    "another document": "a second document begins: keep only one",
    "unhashable key": "a key is a list or a mapping: write a text as the key",
    "escape character": (
        "a text in double quotes has an unknown escape: write \\\\ for a backslash, or use single "
        "quotes"
    ),
    "block end": "the line does not fit the lines above it: indent it as they are",
    "'-' indicator": "the line does not fit the list above it: write - before it, or indent it",
    "expected ':'": "a line has no ': ' after its key: write KEY: VALUE",
    "expected key": "the line is no key of the mapping above it: write KEY: VALUE, or indent it",
}


def _yaml_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    """What is wrong with a YAML text, in words for people who do not know YAML's grammar."""
    problem, mark = error.problem or "", error.problem_mark
    line = text.splitlines()[mark.line :][:1] if mark else []
    start = line[0][mark.column :] if line and mark else ""
    if tag := re.search(r"constructor for the tag '(?:tag:yaml.org,2002:)?(.*)'", problem):
        return f"tag {start.split(' ')[0] or tag[1]} is not supported: remove it"
    if "cannot start any token" in problem and start:
        if start[0] == "\t":
            return "the line is indented by a tab: indent it by spaces"
        return f"a value cannot begin with {start[0]}: write the value in quotes"
    if "undefined alias" in problem:
        name = start.split(" ")[0]
        return f"alias {name} names no value above it: write the value itself"
    meant = (text for part, text in _YAML_PROBLEMS.items() if part in problem)
    return next(meant, f"{problem}: correct the YAML there")


def _not_a_mapping(content: object) -> str:
    if content is None:
        return "is empty: write at least one key"
    return f"holds {shown(content)}, not a mapping: write 'key: value' lines"


_KINDS_OF_TAGS = {"timestamp": "a date", "int": "a whole number", "float": "a number"}


class _Loader(SafeLoader):
    """Loads YAML, but refuses a key that occurs twice in one mapping.

    It may collect such keys in ``repeated`` instead; PyYAML's own loader would silently use the
    last occurrence.
    """

    repeated: list[str] | None = None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except InputError:
            raise
        except ValueError:
            kind = _KINDS_OF_TAGS.get(node.tag.rpartition(":")[2], "a value")
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
            problem = f"{shown(node.value)} cannot be read as {kind}: correct it, or quote it"
            refuse(f"line {line}, column {column}", problem)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line, column = key.start_mark.line + 1, key.start_mark.column + 1
                if self.repeated is None:
                    refuse(
                        f"line {line}, column {column}",
                        f"key {key.value!r} stands twice in one mapping: remove one of them",
                    )
                self.repeated.append(f"{key.value} (line {line})")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Writes YAML, with a list of plain values on one line.

    It does not use libyaml, whose line breaks differ: texts must be equal on every machine.
    """

    def represent_sequence(
        self, tag: str, sequence: Iterable[Any], flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        items = list(sequence)
        is_plain = all(isinstance(item, str | int | float) for item in items)
        return super().represent_sequence(tag, items, flow_style=is_plain or flow_style)


# YAML 1.1 would read 1e-05, as JSON and Python write numbers, as text, since its exponents need a
# dot and a sign.
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
        [*"+-0123456789"],
    )


def _load_yaml(text: str, repeated: list[str] | None = None) -> Any:
    check_nesting(text)
    loader = _Loader(text)
    loader.repeated = repeated
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _load_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of the pairs of keys and values in a JSON object.

    Refuses a key that occurs twice with different values.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        unlike = [key for key, value in pairs if content[key] != value]
        if unlike:
            reject(f"key {unlike[0]!r} stands twice in one object: remove one of them")
    return content


# Paths in plan files: told from names, and joined to the folder of the plan file.


@contextmanager
def in_file(holder: str, path: str) -> Iterator[None]:
    """Put the key of a plan file that names another file in front of an error in that file."""
    try:
        yield
    except FieldError as error:
        raise FieldError(holder, f"{path}: {error}") from None
    except InputError as error:
        raise FieldError(holder, str(error)) from None


def is_path(text: str, endings: tuple[str, ...]) -> bool:
    """Whether a model or a hardware is given by the path of its file, and not by its name: the text
    has a slash, or ends like a file's name, by one of the ``endings``.
    """
    return "/" in text or text.endswith(endings)


def joined(folder: Path, path: str) -> str:
    """Join the folder of a plan file and a path that is written in the file."""
    return os.path.normpath(folder / path)


def relative(path: str, folder: Path) -> str:
    """A path relative to a folder; an absolute path stays absolute."""
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)
