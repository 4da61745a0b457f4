"""Measures with several processes at once, one for each device of the node."""

import queue
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mistlab.core.values import InputError, reject
from runtime.profiling.environment import Devices
from runtime.profiling.links import CollectiveCase, CopyCase, OutsideCase, SendCase
from runtime.profiling.side_by_side import Lengths, OverlapCase, OverlapTiming, StreamLoads
from runtime.profiling.timing import PATIENCE, Rank, Timing

Case = CollectiveCase | CopyCase | SendCase | OverlapCase
Outcome = Timing | OverlapTiming

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWorld:
    """The processes that measure together, and the lengths of work that they combine."""

    devices: Devices
    repetitions: int
    lengths: Lengths

    def measured(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Measure all cases in order; yields each case with its result as soon as the result is
        known.
        """
        yield from self._measured(cases)

    def outside_bytes(self, size_bytes: int) -> int:
        """The device memory that a process uses outside torch's allocator, in bytes.

        ``size_bytes`` is the size of the messages that the processes exchange first.
        """
        ((_, outside),) = self._measured([OutsideCase(size_bytes=size_bytes)])
        return outside

    def _measured(self, cases: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        context = get_context("spawn")
        outcomes = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(
                    target=_measure, args=(rank, self, Path(folder), list(cases), outcomes)
                )
                for rank in range(self.devices.count)
            ]
            try:
                for process in processes:
                    process.start()
                for case in cases:
                    yield case, _next(outcomes, processes, case)
                for process in processes:
                    process.join()
            finally:
                for process in processes:
                    process.kill()
                    process.join()
                outcomes.close()


def _described(case: Any) -> str:
    """The fields of a measured case as text, such as "kind all_gather, gpus 3"."""
    return ", ".join(f"{entry.name} {getattr(case, entry.name)}" for entry in fields(case))


def _next(outcomes: Any, processes: Sequence[BaseProcess], case: object) -> Any:
    """The next result of the processes; raises an error if a process has died, or none answers in
    time.
    """
    waits = round(2 * PATIENCE.total_seconds() / POLL_S)
    for _ in range(waits):
        try:
            outcome = outcomes.get(timeout=POLL_S)
        except queue.Empty:
            ended = [f"{i} (status {p.exitcode})" for i, p in enumerate(processes) if p.exitcode]
            if ended:
                reject(
                    f"measuring {_described(case)} failed in process {', '.join(ended)}: correct "
                    "the error that this process printed above, and start the command again; "
                    "earlier measurements are kept"
                )
        else:
            return outcome
    message = (
        f"measuring {_described(case)} takes more than {waits * POLL_S:.0f} s: look for other "
        "processes on the devices or a device that hangs, and start the command again; earlier "
        "measurements are kept"
    )
    raise InputError(message)


def _measure(
    rank: int, world: ProfiledWorld, folder: Path, cases: Sequence[Any], outcomes: Any
) -> None:
    """The main function of a measuring process: measures all cases in order; the first process
    reports the results.
    """
    # An interrupt in the terminal reaches all processes. This one ignores it, since its parent ends
    # it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    meeting = folder / "meeting"
    with Rank.joined(rank, world.devices, meeting, world.repetitions) as joined_rank:
        _measure_all(joined_rank, world.lengths, cases, outcomes)


def _measure_all(measuring: Rank, lengths: Lengths, cases: Sequence[Any], outcomes: Any) -> None:
    loads: dict[int, StreamLoads] = {}
    parent = parent_process()
    for case in cases:
        if parent is not None and not parent.is_alive():
            return
        if isinstance(case, OverlapCase):
            if case.gpus not in loads:
                loads = {case.gpus: StreamLoads(lengths, measuring, case.gpus)}
            outcome: object = loads[case.gpus].measured(case)
        else:
            outcome = case.measured(measuring)
        if measuring.rank == 0:
            outcomes.put(outcome)
