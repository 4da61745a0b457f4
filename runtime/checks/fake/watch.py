"""Records each point of an iteration at which the host would wait for the device, or would fail.

The code that runs an operator need not know the task that it works for. The executor's frames on
the call stack tell whether an iteration is being issued, which task, and on which lane (queue).
"""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Literal

import runtime
from mistlab.stages.stage_program import Op
from runtime.engine.captured_steps import CapturedSteps
from runtime.engine.executor import Executor
from runtime.engine.task_names import brief_name

Kind = Literal[
    "value read",
    "size from values",
    "blocking copy",
    "unpinned copy",
    "scalar copied",
    "work on the CPU",
    "wrong device",
    "memory pinned",
    "wait",
    "outside wait",
    "outside work",
    "never joined",
    "collective",
    "failure",
]
# For each kind of finding, the effect that it would have on a GPU, and the remedy.
REMEDIES: Mapping[Kind, str] = {
    "value read": "the host waits for a number of the device: keep it in a tensor there",
    "size from values": "the host waits to learn a size: mask values instead of choosing some",
    "blocking copy": "the host waits for it: give non_blocking=True, and pinned host memory",
    "unpinned copy": "the host waits for it: give host memory that is pinned and in one piece",
    "scalar copied": "the host waits until one number is copied: use zero_ or fill_",
    "work on the CPU": "the host works where it should issue: give device=, or use its own lane",
    "wrong device": "it ends the run: bring all tensors to one device before",
    "memory pinned": "pinning waits for the device: do it before the second iteration",
    "wait": "the host waits for the device: order lanes by events instead",
    "outside wait": "what was issued before cannot be waited for: a replay comes after it anyway",
    "outside work": "it runs while the rest is captured: let the lane wait for compute first",
    "never joined": "the capture fails: let compute wait for the lane's last work",
    "collective": "the library of collectives refuses it",
    "failure": "it cannot run, or cannot be judged",
}

# Kinds of findings that would invalidate the capture of a CUDA graph, on whichever lane (queue of
# work) they occur.
FORBIDDEN: tuple[Kind, ...] = (
    *("value read", "size from values", "blocking copy", "unpinned copy", "scalar copied"),
    *("memory pinned", "wait", "outside wait", "outside work", "never joined"),
)
# Kinds of findings that the first iteration may have, since it allocates lasting memory.
_ONCE: tuple[Kind, ...] = ("work on the CPU", "memory pinned", "wait")
# Kinds of findings after which a run cannot continue, on whichever lane they occur.
_ENDINGS: tuple[Kind, ...] = ("wrong device", "collective", "failure")
MOST_SAID = 160
_ROOT = Path(runtime.__file__).parent
_ASIDE = (_ROOT / "checks", _ROOT / "comm/processes.py")
_ITERATIONS = (Executor.iterate.__code__, CapturedSteps.iterate.__code__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFinding:
    """A point where the host would wait for its GPU, or would fail: the operator, the task being
    issued, and the source line.

    ``place`` is the innermost line of this project's code, ``times`` how often the point was
    reached, ``said`` the message of an error.
    """

    kind: Kind
    operator: str
    task: str
    lane: str
    place: str
    said: str = ""
    times: int = 1

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        remedy = f"{REMEDIES[self.kind]}{f' ({self.said})' if self.said else ''}"
        return (
            f"{self.place}: {self.operator} in {self.task}, lane {self.lane}{often}: "
            f"{self.kind}: {remedy}"
        )


class Watch:
    """Collects findings in the thread that creates it, and in threads that work for this thread.

    ``captures`` says that iterations will be captured as a CUDA graph. Then the host's lane may not
    wait either, and times may not be read; what makes the host wait, or pins memory, also breaks
    the capture.
    """

    def __init__(self, *, captures: bool = False) -> None:
        self.captures = captures
        self._thread = threading.get_ident()
        self._times: Counter[WaitFinding] = Counter()
        self.stopped_by: BaseException | None = None

    @property
    def findings(self) -> tuple[WaitFinding, ...]:
        """All findings; of several with the same kind, operator, lane and source line only the
        first.
        """
        return tuple(replace(one, times=times) for one, times in self._times.items())

    def note(self, kind: Kind, operator: str, detail: str = "") -> bool:
        """Record a finding if it is inside an iteration and not allowed there; returns whether it
        was recorded.

        The host's lane may wait, and the first iteration may allocate lasting memory.
        """
        frames = list(self._frames())
        executor = next((_executor(frame) for frame in frames if frame.f_code in _ITERATIONS), None)
        if executor is None or (kind in _ONCE and executor.steps == 0):
            return False
        lane = next((op.lane for frame in frames if (op := _op(frame))), "compute")
        if lane == "host" and kind not in _ENDINGS and not (self.captures and kind in FORBIDDEN):
            return False
        where = next((at for frame in frames if (at := _place(frame))), "runtime")
        finding = WaitFinding(
            kind=kind,
            operator=operator,
            task=brief_name(executor.issuing),
            lane=lane,
            place=where,
            said=detail,
        )
        alike = (one for one in self._times if replace(one, task=finding.task) == finding)
        self._times[next(alike, finding)] += 1
        return True

    def stop(self, kind: Kind, operator: str, error: BaseException) -> None:
        """Record the error that ends the run as a finding."""
        detail = shorten(str(error), MOST_SAID)
        if error is not self.stopped_by and self.note(kind, operator, detail):
            self.stopped_by = error

    def _frames(self) -> Iterator[FrameType]:
        """The Python frames of this thread, innermost first, then the frames of the thread that
        waits for this one.
        """
        frame = inspect.currentframe()
        while frame is not None:
            yield frame
            frame = frame.f_back
        if threading.get_ident() != self._thread:
            frame = sys._current_frames().get(self._thread)
            while frame is not None:
                yield frame
                frame = frame.f_back


def _executor(frame: FrameType) -> Executor:
    issuer = frame.f_locals["self"]
    executor = issuer.executor if isinstance(issuer, CapturedSteps) else issuer
    assert isinstance(executor, Executor)
    return executor


def _op(frame: FrameType) -> Op | None:
    """The task that a frame of the executor's code is issuing; None for other frames."""
    op = frame.f_locals.get("op") if _file(frame.f_code.co_filename) else None
    return op if isinstance(op, Op) else None


def _place(frame: FrameType) -> str | None:
    file = _file(frame.f_code.co_filename)
    return file and f"{file}:{frame.f_lineno} ({frame.f_code.co_qualname})"


@cache
def _file(name: str) -> str | None:
    """The path of a source file relative to the project. It is None for other code, for the checks,
    and for the code of groups, since a wrong collective is reported at the line that calls it.
    """
    path = Path(name)
    if not path.is_relative_to(_ROOT) or any(map(path.is_relative_to, _ASIDE)):
        return None
    return path.relative_to(_ROOT.parent).as_posix()
