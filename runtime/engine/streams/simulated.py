"""Simulated streams on a CPU, which can vary how far each lane has come, to uncover races.

Compute runs its work at once. Other lanes may hold work back: ``eager`` runs all work that can run,
``lazy`` runs nothing before somebody waits for it, ``random`` mixes both, by seed. A correct
program gives the same results with each. Memory that may no longer be read is overwritten with NaN.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from mistlab.schedule.lanes import LANES, Lane
from runtime.comm.group import Pending
from runtime.engine.streams.lanes import Event, LaneWork

Progress = Literal["eager", "lazy", "random"]


def _done() -> None:
    """Stands in place of work that has run."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    lane: Lane
    work: LaneWork
    waits: Sequence["_Item"]
    pending: Pending | None = None
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None


@dataclass(slots=True, kw_only=True)
class SimulatedStreams:
    """Lanes as queues of calls; an event is the queued item itself."""

    progress: Progress = "eager"
    seed: int = 0
    spoils: bool = True
    _queues: dict[Lane, deque[_Item]] = field(
        default_factory=lambda: {lane: deque() for lane in LANES}, init=False
    )
    _draw: random.Random = field(init=False)
    _log: list[_Item] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Queue work; work on compute waits and runs now."""
        item = _Item(lane=lane, work=work, waits=waits)
        self._log.append(item)
        self._queues[lane].append(item)
        if lane == "compute":
            for event in waits:
                self._run_up_to(event)
            self._advance_some()
            self._run_up_to(item)
        else:
            self._advance_some()
        return item

    def settle(self, pending: Pending | None) -> None:
        """Wait for a collective; the other lanes go on meanwhile, as on a device."""
        if pending is None:
            return
        while not pending.is_ready():
            if not self._advance_all():
                pending.wait_a_moment()
        pending.finish()

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Start a collective, do ``work``, then wait for the collective."""
        pending = collective()
        work()
        self.settle(pending)

    def synchronize(self) -> None:
        """Run all work."""
        for queue in self._queues.values():
            while queue:
                self._run_up_to(queue[-1])

    def spoil(self, tensor: Tensor) -> None:
        """Fill a tensor with bytes that are NaN in every floating-point type."""
        if self.spoils:
            tensor.view(torch.uint8).fill_(255)

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each work, in order of submission."""
        self.synchronize()
        spans = []
        for item in self._log:
            assert item.started_s is not None
            assert item.ended_s is not None
            spans.append((item.started_s, item.ended_s))
        self._log.clear()
        return spans

    def close(self) -> None:
        """Drop all queued work, and the tensors that it holds."""
        for queue in self._queues.values():
            queue.clear()
        self._log.clear()

    def _advance_some(self) -> None:
        if self.progress == "eager":
            while self._advance_all():
                pass
        elif self.progress == "random":
            for lane in self._draw.sample(LANES, len(LANES)):
                while self._draw.random() < 0.5 and self._advance(lane):
                    pass

    def _advance_all(self) -> bool:
        """Take each lane one step further if possible; return whether any lane could go."""
        advanced = [self._advance(lane) for lane, queue in self._queues.items() if queue]
        return any(advanced)

    def _advance(self, lane: Lane) -> bool:
        queue = self._queues[lane]
        if not queue or lane == "compute":
            return False
        item = queue[0]
        started = False
        if item.started_s is None:
            if not all(event.is_done for event in item.waits):
                return False
            self._start(item)
            started = True
        if item.pending is not None:
            if not item.pending.is_ready():
                return started
            item.pending.finish()
        self._end(item)
        return True

    def _run_up_to(self, event: _Item) -> None:
        """Run a lane up to an event, and all work that it waits for."""
        queue = self._queues[event.lane]
        while not event.is_done:
            item = queue[0]
            if item.started_s is None:
                for before in item.waits:
                    self._run_up_to(before)
            # While another collective was waited for, this lane may have gone on.
            if item.is_done:
                continue
            if item.started_s is None:
                self._start(item)
            if item.pending is not None:
                self._await(item)
            if not item.is_done:
                self._end(item)

    def _await(self, item: _Item) -> None:
        assert item.pending is not None
        while not item.is_done and not item.pending.is_ready():
            if not self._advance_all():
                item.pending.wait_a_moment()
        if not item.is_done:
            item.pending.finish()

    def _start(self, item: _Item) -> None:
        item.started_s = perf_counter()
        # Work holds tensors and the log holds items, so work that has run is dropped.
        work, item.work = item.work, _done
        with torch.no_grad() if item.lane != "compute" else torch.enable_grad():
            item.pending = work()

    def _end(self, item: _Item) -> None:
        head = self._queues[item.lane].popleft()
        assert head is item
        item.ended_s = perf_counter()
        # Later work keeps items to wait for; tensors of messages and earlier items go at once.
        item.pending, item.waits = None, ()
