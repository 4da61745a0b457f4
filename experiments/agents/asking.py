"""Runs a command in a separate process, with limits on time, memory and concurrency."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore, Lock
from typing import Any

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, reject

ROOT = Path(__file__).parents[2]
# The most characters of a text that an agent may pass; the largest launch scripts have some tens of
# kilobytes.
MOST_TEXT = 1 << 18
# The limit of a command's memory (address space); the largest searches need 2 GiB.
MOST_BYTES = 8 * GIB_BYTES
# How many questions of agents may wait in the queue.
MOST_WAITING = 100

# The program that the separate process runs: one command, as its console script would, with a
# memory limit where the operating system supports one.
_PROGRAM = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
except ImportError:
    pass
sys.argv[1:] = sys.argv[2:]
from experiments.__main__ import console
sys.exit(console())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """A command's answer: the objects that it printed, its messages, and its exit status."""

    objects: tuple[Mapping[str, Any], ...]
    told: str
    status: int


@dataclass(slots=True, kw_only=True)
class Asking:
    """Runs a few commands at the same time; further questions wait in a queue, and are refused when
    the queue is full.
    """

    at_once: int = field(default_factory=lambda: os.cpu_count() or 1)
    seconds: float = 120.0
    most_waiting: int = MOST_WAITING
    _running: BoundedSemaphore = field(init=False)
    _lock: Lock = field(init=False, default_factory=Lock)
    _waiting: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._running = BoundedSemaphore(self.at_once)

    def answer(self, command: str, *line: str, seconds: float | None = None) -> CommandAnswer:
        """The answer of a command to these arguments; refused if the command takes too long."""
        with self._turn():
            return _run([command, *line, "--json"], seconds or self.seconds)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._waiting >= self.most_waiting:
                reject(
                    f"{self._waiting} questions already wait for this server, which keeps at most "
                    f"{self.most_waiting}: ask again in a minute"
                )
            self._waiting += 1
        try:
            with self._running:
                yield
        finally:
            with self._lock:
                self._waiting -= 1


def _run(line: Sequence[str], seconds: float) -> CommandAnswer:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, str(MOST_BYTES), *line],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reject(
            f"{line[0]} took longer than the {seconds:g} s that a question may take: ask about "
            f"fewer GPUs or choices, or give budget_seconds below {seconds:g}"
        )
    if done.returncode < 0 or "MemoryError" in done.stderr:
        reject(
            f"{line[0]} needs more than the {MOST_BYTES // GIB_BYTES} GiB of memory that a "
            "question may take: ask about fewer GPUs, plans or choices"
        )
    return CommandAnswer(
        objects=tuple(json.loads(text) for text in done.stdout.splitlines() if text[:1] == "{"),
        told=done.stderr.strip(),
        status=done.returncode,
    )


@contextmanager
def folder_of(**texts: str) -> Iterator[Mapping[str, str]]:
    """Command-line arguments from an agent's values, by name. A text of several lines, or of JSON,
    is written to a file of that name, and the file's path becomes the argument; any other text is
    the argument itself.
    """
    with TemporaryDirectory(prefix="mistlab-") as name:
        try:
            yield {key: _word(Path(name), key, text) for key, text in texts.items()}
        except InputError as error:
            # The caller knows a text by its key only, so the name of the temporary file is replaced
            # by the key.
            reject(re.sub(rf"{re.escape(name)}/(\w+)\.\w+", r"\1", str(error)))


def _word(folder: Path, key: str, text: str) -> str:
    if len(text) > MOST_TEXT:
        reject(f"{key}: has {len(text):,} characters: give at most {MOST_TEXT:,}")
    if text.startswith("-"):
        reject(f"{key}: {text[:40]!r} begins with a hyphen: give a name, a path or a file's text")
    if "\n" not in text and not text.lstrip().startswith("{"):
        return text
    ending = ".json" if text.lstrip().startswith("{") else ".sh" if "--" in text else ".yaml"
    path = folder / f"{key}{ending}"
    path.write_text(text, encoding="utf-8")
    return str(path)
