"""Tells from a file's text whether it holds settings, a shell script or Python, before any key is
read.

Settings are YAML, JSON or TOML. The ending of a file's name is a hint for messages alone where the
content says otherwise: a launch script may be called ``run.txt``, and a YAML ``config.template``.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Literal

from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError
from mistlab.export.found import parse_json, parse_toml
from mistlab.shell.session import LaunchFile

Kind = Literal["settings", "shell", "python", "strange"]

_SHEBANG = re.compile(r"#![ \t]*(?P<path>\S+)(?:[ \t]+(?:-S[ \t]+)?(?P<name>[^\s-]\S*))?")
_REMEDY = "give a shell script, or the configuration file of the run"
_SHELLS = ("sh", "bash", "zsh", "dash", "ksh", "slurm", "env")
# Matches lines of a training log: times, ranks, and training metrics.
_LOG = re.compile(
    r"^(\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\[rank\s?\d+\]|\s*\d+: |I\d{4} \d\d:)"
    r"|\biteration\s+\d+/\s*\d+ \||\bstep: +\d+ +loss:",
    re.MULTILINE,
)
_TABLE = re.compile(r"^\s*\[{1,2}[\w.\-\"]+\]{1,2}\s*(#.*)?$", re.MULTILINE)
_KEY = re.compile(r"^\s*[\"']?[A-Za-z_][\w.\-/ ]*[\"']?\s*:(\s|$)", re.MULTILINE)
# Matches a placeholder to be filled in: an unquoted name in capitals where a value is expected.
_BLANK = re.compile(r"^[^#\n]*:\s*([A-Z][A-Z0-9]*_[A-Z0-9_]+)\s*,?\s*$", re.MULTILINE)
_CODE = re.compile(r"^(import \w|from [\w.]+ import|def \w+\(|class \w+[(:])", re.MULTILINE)
_COMMAND = re.compile(
    r"^\s*(export\s+\w+=|[A-Za-z_]\w*\+?=|#SBATCH|#PBS|#BSUB|set -|srun\b|mpirun\b|mpiexec\b|"
    r"torchrun\b|deepspeed\b|accelerate\b|python3?\b|composer\b|bash\b|sh\b|source\b|cd\b|"
    r"if\b.*;|for\b.*;|case\b.* in|\w+\s*\(\)\s*\{|.*\s--[a-z][\w-]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What kind of text a file holds, its settings if it has any, and the reason if it cannot be
    imported.

    ``problem`` says what the text looks like where it is neither settings nor a program.
    ``repeated`` are keys of a YAML that stand twice in a mapping, of which the last counts.
    """

    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    repeated: tuple[str, ...] = ()


def content_of(source: LaunchFile) -> Content:
    """Tell what kind of text a file holds, by the ending of its name and by its content."""
    return _content(source.text, PurePath(source.name).suffix.lower())


def settings_of(source: LaunchFile) -> Mapping[str, Any]:
    """Return the settings of a configuration file, none for a script or for a file that cannot be
    parsed.
    """
    return content_of(source).settings


@lru_cache(maxsize=4)
def _content(text: str, ending: str) -> Content:
    # The kind of a text is found once and cached, since each known format asks for it again.
    if problem := _strange(text, ending):
        return Content(kind="strange", problem=problem)
    if text.startswith("#!"):
        return _of_shebang(text)
    if ending in (".json", ".toml", ".yaml", ".yml"):
        return _settings(text, ending)
    if ending in (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".pbs", ".zsh"):
        return Content(kind="shell")
    if ending == ".py" or (_CODE.search(text) and _is_python(text)):
        return Content(kind="python")
    return _by_look(text)


def _strange(text: str, ending: str) -> str:
    """Return why a text cannot be imported, for instance because it is a log or a notebook, and the
    remedy; empty if it may be one to import.
    """
    start = text.lstrip()[:200].lower()
    if not text.strip():
        return "is empty: give a launch script or a configuration file"
    if "\0" in text:
        return "is a binary file: give a launch script or a configuration file, both text"
    if start.startswith(("<!doctype", "<html")):
        return "is an HTML page: download the file itself, as plain text"
    if ending == ".ipynb" or ('"cells"' in text[:2000] and '"nbformat"' in text):
        return "is a notebook: give the script or the configuration file of the run"
    lines = text.count("\n") + 1
    if len(_LOG.findall(text)) > max(3, lines // 4):
        return "is a log of a run: give the script or the configuration file that started it"
    return ""


def _of_shebang(text: str) -> Content:
    match = _SHEBANG.match(text)
    names = [] if match is None else [PurePath(part).name for part in match.groups() if part]
    name = names[-1] if names else ""
    if any(name.startswith(shell) for shell in _SHELLS):
        return Content(kind="shell")
    if name.startswith("python"):
        return Content(kind="python")
    return Content(kind="strange", problem=f"is a program for {name or 'no shell'}: {_REMEDY}")


def _settings(text: str, ending: str) -> Content:
    repeated: list[str] = []
    try:
        if ending == ".json":
            settings = parse_json(text)
        elif ending == ".toml":
            settings = parse_toml(text)
        else:
            settings = parse_yaml(text, "the file", repeated)
    except InputError as error:
        problem = str(error).removeprefix("the file: ")
        if name := _BLANK.search(text):
            problem = f"is a template: {name[1]} stands for a value: write the value ({problem})"
        return Content(kind="strange", problem=problem)
    return Content(kind="settings", settings=settings, repeated=tuple(repeated))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _by_look(text: str) -> Content:
    """Classify a text whose file name has no known ending by trying to parse it as each kind."""
    endings = []
    if text.lstrip().startswith("{"):
        endings = [".json", ".yaml"]
    elif _TABLE.search(text) and "=" in text:
        endings = [".toml"]
    elif len(_KEY.findall(text)) > len(_COMMAND.findall(text)):
        endings = [".yaml"]
    readings = [_settings(text, ending) for ending in endings]
    for reading in readings:
        if reading.kind == "settings":
            return reading
    if _COMMAND.search(text):
        return Content(kind="shell")
    neither = "is neither a launch script nor a configuration: give one of these"
    return readings[-1] if readings else Content(kind="strange", problem=neither)
