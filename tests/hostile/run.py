"""Runs a case in a fork that has everything imported, or as a process of its own, within limits.

A fork costs 20 ms, where a process that imports a command's modules costs a second. What a case
uses is that of the fork and its children, beyond what the fork began with.
"""

import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.hostile.case import Case

# A case hangs that takes more of the processor, or of the clock where others use the machine too.
MOST_CPU_S, MOST_WALL_S = 10.0, 40.0
MOST_BYTES = 1 << 30
# What a case may ask for before it is refused by the system: more than may be used.
ROOM_BYTES = 3 << 30
CRASHED = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case left: its exit status (below 0: the signal), its texts, seconds and bytes."""

    status: int
    out: str
    err: str
    cpu_s: float
    wall_s: float
    grown_bytes: int


def forked(case: Case, folder: Path) -> Outcome:
    """Run a case in a fork of this process."""
    case.lay_out(folder)
    child = os.fork()
    if child == 0:
        _become(case, folder)
    return _awaited(child, folder, _resident_bytes("self"))


def started(case: Case, folder: Path) -> Outcome:
    """Run a case as a process of its own."""
    case.lay_out(folder)
    child = os.fork()
    if child == 0:
        _redirect(folder)
        words = [sys.executable, "-m", "experiments", case.command, *case.arguments]
        os.environ["PYTHONPATH"] = _ROOT
        os.execv(sys.executable, [os.fsencode(word) for word in words])
    return _awaited(child, folder, 0)


_ROOT = str(Path(__file__).parents[2])


def _become(case: Case, folder: Path) -> NoReturn:
    """Run the command in this process, and end it."""
    status = CRASHED
    try:
        _redirect(folder)
        used = _virtual_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
        status = _called([case.command, *case.arguments])
    except BaseException:
        import traceback  # noqa: PLC0415

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                status = status or CRASHED
        os._exit(status)


def _called(words: Sequence[str]) -> int:
    from experiments.cli.commandline import run  # noqa: PLC0415

    def main(arguments: Sequence[str]) -> int:
        sys.argv = [*arguments]
        # It was imported ahead, and is now run under another name.
        sys.modules.pop(f"experiments.{arguments[0]}", None)
        runpy.run_module(f"experiments.{arguments[0]}", run_name="__main__", alter_sys=True)
        return 0

    try:
        return run(main, words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _redirect(folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(folder.parent / f"{folder.name}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _awaited(child: int, folder: Path, begun_bytes: int) -> Outcome:
    """Wait for a case, and end it where it takes too long or too much."""
    began_s, peak_bytes, status = time.monotonic(), 0, None
    while True:
        pid, ended, usage = os.wait4(child, os.WNOHANG)
        wall_s = time.monotonic() - began_s
        if pid:
            status = os.waitstatus_to_exitcode(ended)
            cpu_s = usage.ru_utime + usage.ru_stime
            peak_bytes = max(peak_bytes, usage.ru_maxrss * 1024)
            break
        cpu_s = _cpu_s(child)
        if cpu_s > MOST_CPU_S or wall_s > MOST_WALL_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = -signal.SIGKILL
            break
        time.sleep(0.005 if wall_s < 1 else 0.05)
    with suppress(ProcessLookupError):
        # What a case has started, and left.
        os.killpg(child, signal.SIGKILL)
    texts = [
        (folder.parent / f"{folder.name}.{name}").read_text(encoding="utf-8", errors="replace")
        for name in ("stdout", "stderr")
    ]
    return Outcome(
        status=status,
        out=texts[0],
        err=texts[1],
        cpu_s=cpu_s,
        wall_s=wall_s,
        grown_bytes=max(0, peak_bytes - begun_bytes),
    )


def _resident_bytes(process: str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _cpu_s(process: int) -> float:
    """Processor time of a process and of its children that have ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0.0
    ticks = text.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
