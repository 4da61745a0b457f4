"""Processes that answer the page's questions, each one question at a time, with limits on time and
on the length of the queue.

A process that takes too long, dies or uses too much memory is ended, and another takes its place;
the server keeps none of its state.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Process = asyncio.subprocess.Process
Event = Mapping[str, Any]
Heard = Callable[[Event], Awaitable[None]]

ROOT = Path(__file__).parents[2]
# The longest line of an answer in bytes: the trace of an iteration has some tens of megabytes.
MOST_LINE = 1 << 28
# How many seconds a search may take to end after it is told to stop.
STOPS_S = 3.0
STARTS_S = 120.0

_PROGRAM = "from experiments.live_page.worker import main; main()"


class BusyError(Exception):
    """Raised if too many questions of the live page already wait for a worker process."""


class EndedError(Exception):
    """Raised if the answer to a question of the live page took too long, or the worker process
    died; the message says which.
    """


@dataclass(slots=True, kw_only=True)
class Lane:
    """A worker process and the queue of the live page's questions for it: at most ``most_waiting``
    questions, each answered within ``seconds``.

    If a question is abandoned, its process still starts, or its answer still ends: both are tasks
    of their own, for which the next question waits.
    """

    name: str
    seconds: float
    most_waiting: int = 100
    _process: Process | None = field(default=None, init=False)
    _starting: "asyncio.Task[Process] | None" = field(default=None, init=False)
    _stopping: "asyncio.Task[None] | None" = field(default=None, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: int = field(default=0, init=False)

    async def ask(self, question: str, body: Any, heard: Heard | None = None) -> Event:
        """The answer to a question, as an object with ``answer`` or ``error``; events are passed on
        while the question is worked on.
        """
        if self._waiting >= self.most_waiting:
            message = f"{self._waiting} questions already wait for this page: ask again in a minute"
            raise BusyError(message)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._asked(question, body, heard)
        finally:
            self._waiting -= 1

    async def warm(self) -> None:
        """Start the worker process, so that the first question does not wait for it."""
        async with self._turn:
            await self._ready()

    async def end(self) -> None:
        """End the worker process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _asked(self, question: str, body: Any, heard: Heard | None) -> Event:
        process = await self._ready()
        assert process.stdin is not None
        line = json.dumps({"question": question, "body": body}) + "\n"
        process.stdin.write(line.encode())
        is_answered = False
        try:
            async with asyncio.timeout(self.seconds):
                await process.stdin.drain()
                event = await _event(process)
                while "event" in event:
                    if heard is not None:
                        await heard(event)
                    event = await _event(process)
            is_answered = True
        except TimeoutError:
            message = (
                f"the question {question} took longer than the {self.seconds:g} s that it may "
                "take: ask about fewer GPUs, layers or choices"
            )
            raise EndedError(message) from None
        except ConnectionError:
            message = (
                f"the question {question} ended its process, perhaps for lack of memory: ask about "
                "fewer GPUs, layers or choices"
            )
            raise EndedError(message) from None
        finally:
            if not is_answered:
                self._stopping = asyncio.create_task(self._stopped(process))
        if event.get("tired"):
            await self.end()
        return event

    async def _ready(self) -> Process:
        """The worker process, which is started if necessary and ready for a question."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
            self._stopping = None
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
        try:
            process = await asyncio.shield(self._starting)
        except EndedError:
            self._starting = None
            raise
        self._process, self._starting = process, None
        return process

    async def _started(self) -> Process:
        """A new worker process, after it has reported that it is ready."""
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OPENBLAS_NUM_THREADS": "1",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _PROGRAM, self.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            limit=MOST_LINE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(STARTS_S):
                await _event(process)
        except (TimeoutError, ConnectionError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            message = "the server could not start a process for this question: ask it again"
            raise EndedError(message) from None
        return process

    async def _stopped(self, process: Process) -> None:
        """Cancel a question whose answer nobody waits for: a search by a signal, any other question
        by ending the process.
        """
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOPS_S):
                    while "event" in await _event(process):
                        pass
            except (TimeoutError, ConnectionError, ValueError):
                await self.end()


async def _event(process: Process) -> Event:
    """The next event that the worker process reports, as an object."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise ConnectionError
    event: Event = json.loads(line)
    return event
