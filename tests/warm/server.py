"""A process that has imported torch and the runtime, and forks a process for whoever asks.

Importing torch takes a process 2 to 5 CPU seconds. Tests that need processes of their own start
them here instead: a fork has everything imported. This process only imports and waits. It never
computes, so that a fork finds no threads missing and no device begun.

Standard input is a socket of the test process. When it closes, everything here ends.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "experiments.training.run_plan",
    "runtime.checkpoints.checkpoint",
    "runtime.session",
    "torch.distributed.checkpoint",
    "tests.runtime.checkpoint_memory",
    "tests.runtime.lazy_world",
    "tests.runtime.process_world",
)
MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A process that somebody asked for: what the command line of ``python`` says, and where."""

    words: Sequence[str]
    environment: dict[str, str]
    folder: str
    streams: Sequence[int]


@dataclass(kw_only=True)
class Server:
    """Forks processes, and tells each one's end to who asked for it."""

    listener: socket.socket
    askers: dict[int, socket.socket] = field(default_factory=dict)

    def serve(self) -> Asked:
        """Fork for all who ask. Returns in a fork only, with what it is to do."""
        wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        while True:
            waited = [0, wakes, self.listener, *self.askers.values()]
            ready, _, _ = select.select(waited, [], [])
            if 0 in ready:
                self._end()
            if wakes in ready:
                os.read(wakes, 4096)
                self._tell()
            for pid, asker in list(self.askers.items()):
                if asker in ready:
                    # Who asked was killed, so the process is not wanted any more.
                    os.kill(pid, signal.SIGKILL)
                    self._forget(pid)
            if self.listener in ready:
                asked = self._forked()
                if asked is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(wakes)
                    os.close(wake)
                    return asked

    def _forked(self) -> Asked | None:
        asker, _ = self.listener.accept()
        asked = _asked(asker)
        pid = os.fork()
        if pid == 0:
            self.listener.close()
            for other in [asker, *self.askers.values()]:
                other.close()
            return asked
        for stream in asked.streams:
            os.close(stream)
        self.askers[pid] = asker
        self._say(pid, pid)
        return None

    def _tell(self) -> None:
        """Tell who asked of all processes that have ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.askers:
                    self._say(pid, os.waitstatus_to_exitcode(status))
                    self._forget(pid)

    def _say(self, pid: int, number: int) -> None:
        # Who asked may have been killed meanwhile.
        with suppress(OSError):
            self.askers[pid].sendall(f"{number}\n".encode())

    def _forget(self, pid: int) -> None:
        self.askers.pop(pid).close()

    def _end(self) -> None:
        for pid in self.askers:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _asked(asker: socket.socket) -> Asked:
    """What an asker wants: its length in a line, JSON, and three streams."""
    content, streams, _, _ = socket.recv_fds(asker, MOST_BYTES, 3)
    length, _, rest = content.partition(b"\n")
    while len(rest) < int(length):
        rest += asker.recv(MOST_BYTES)
    said: dict[str, Any] = json.loads(rest)
    return Asked(
        words=said["words"],
        environment=said["environment"],
        folder=said["folder"],
        streams=streams,
    )


def become(asked: Asked) -> None:
    """Take the place of a process that ``python`` would have started: run a module (``-m``), code
    (``-c``) or a file, under ``-W`` and ``-u`` if they are given."""
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    words = list(asked.words)
    while words[0] in ("-W", "-u"):
        if words[0] == "-W":
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
            words = words[2:]
        else:
            sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
            words = words[1:]
    added = asked.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *(path for path in added if path and path not in sys.path)]
    _import_site(added)
    kind, *arguments = words
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


def _import_site(added: Sequence[str]) -> None:
    """Import ``sitecustomize`` from the folders that were added, as any Python would."""
    if any(Path(path, "sitecustomize.py").exists() for path in added if path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def main() -> None:
    """Import everything, and serve; the argument is the descriptor of a socket that listens."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in PRELOADED:
            importlib.import_module(name)
    gc.freeze()
    asked = Server(listener=listener).serve()
    _end(lambda: become(asked))


def _end(work: Callable[[], None]) -> NoReturn:
    """Work, and end as Python does, but let modules be: to take them apart takes seconds."""
    status = 0
    try:
        work()
    except SystemExit as end:
        status = _status(end.code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _status(code: object) -> int:
    """The status of a process that ends by ``sys.exit``."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


if __name__ == "__main__":
    main()
