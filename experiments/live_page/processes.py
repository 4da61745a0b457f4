"""Processes that answer the page's questions, one at a time each, with limits on time and number.

A process that takes too long, dies or grows is ended, and another takes its place; the server keeps
nothing of it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The longest line of an answer: a trace of an iteration has some tens of megabytes.
MOST_LINE = 1 << 28
# So long a search has to end once it is told to.
STOPS_S = 3.0
STARTS_S = 120.0

_PROGRAM = "from experiments.live_page.worker import main; main()"


class BusyError(Exception):
    """Too many questions wait already."""


class EndedError(Exception):
    """A question took too long, or its process died: why, for people."""


@dataclass(slots=True, kw_only=True)
class Lane:
    """A process, and the questions that wait for it: at most ``most_waiting``, each at most for
    ``seconds`` once its turn has come."""

    name: str
    seconds: float
    most_waiting: int = 100
    _process: "asyncio.subprocess.Process | None" = field(default=None, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _waiting: int = field(default=0, init=False)

    async def ask(self, question: str, body: Any) -> AsyncIterator[Mapping[str, Any]]:
        """The events of an answer; the last one has ``answer`` or ``error``."""
        if self._waiting >= self.most_waiting:
            message = f"{self._waiting} questions wait already: ask again in a few seconds"
            raise BusyError(message)
        self._waiting += 1
        try:
            async with self._turn:
                async for event in self._asked(question, body):
                    yield event
        finally:
            self._waiting -= 1

    async def warm(self) -> None:
        """Start the process, so that the first question does not wait for it."""
        async with self._turn:
            await self._started()

    async def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _asked(self, question: str, body: Any) -> AsyncIterator[Mapping[str, Any]]:
        process = await self._started()
        assert process.stdin is not None
        line = json.dumps({"question": question, "body": body}) + "\n"
        process.stdin.write(line.encode())
        is_answered = False
        try:
            async with asyncio.timeout(self.seconds):
                await process.stdin.drain()
                while not is_answered:
                    event = await self._event(process)
                    is_answered = "event" not in event
                    yield event
            if event.get("tired"):
                await self.end()
        except TimeoutError:
            message = f"{question} took longer than {self.seconds:g} s: ask for less"
            raise EndedError(message) from None
        except ConnectionError:
            message = f"{question} ended its process: ask for less"
            raise EndedError(message) from None
        finally:
            if not is_answered:
                await asyncio.shield(self._stopped(process))

    async def _started(self) -> asyncio.subprocess.Process:
        """The process that is ready for a question."""
        if self._process is not None and self._process.returncode is None:
            return self._process
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
        self._process = process
        try:
            async with asyncio.timeout(STARTS_S):
                await self._event(process)
        except (TimeoutError, ConnectionError):
            await self.end()
            message = "no process could be started for it: try again"
            raise EndedError(message) from None
        return process

    async def _event(self, process: asyncio.subprocess.Process) -> Mapping[str, Any]:
        """The next line of a process."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ConnectionError
        event: Mapping[str, Any] = json.loads(line)
        return event

    async def _stopped(self, process: asyncio.subprocess.Process) -> None:
        """End a question that nobody waits for any more: a search by a signal, all else with its
        process."""
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOPS_S):
                    while "event" in await self._event(process):
                        pass
            except (TimeoutError, ConnectionError, ValueError):
                await self.end()
