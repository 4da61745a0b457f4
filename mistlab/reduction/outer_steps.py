"""Streaming outer steps (DiLoCo): a model's fragments are averaged one after another, with a delay,
and mixed into each rank's weights.

Each fragment is averaged once in ``every`` inner steps, at equal distances from the other
fragments. Its change since its last outer step is taken ``delay`` steps before the next one, and
averaged meanwhile. Then the outer optimizer applies the mean change to the weights that all ranks
share, and each rank continues from a mixture of the shared weights and its own, with the share
``mixed`` of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.values import bounded, check_fields, refuse
from mistlab.reduction.outer_schedule import OuterSchedule

# A function that returns the change of each rank's weights in an inner step; ranks are rows,
# fragments columns.
InnerStep = Callable[[Floats, int], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSteps:
    """When the fragments of a model are averaged, and the outer optimizer's learning rate and
    Nesterov momentum.
    """

    every: int = field(metadata=bounded(minimum=1))
    fragments: int = field(default=1, metadata=bounded(minimum=1))
    delay: int = field(default=0, metadata=bounded(minimum=0))
    mixed: float = field(default=0.0, metadata=bounded(minimum=0, maximum=1))
    rate: float = field(default=0.7, metadata=bounded(above=0))
    momentum: float = field(default=0.0, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.schedule

    @property
    def schedule(self) -> OuterSchedule:
        """The schedule by which the fragments of the model take their outer steps."""
        return OuterSchedule(every=self.every, fragments=self.fragments, delay=self.delay)


@dataclass(slots=True)
class OuterRun:
    """A simulated run of ranks with outer steps: each rank's weights are a row, with a column for
    each fragment; in addition, the weights that all ranks share, and the outer momenta. Ranks that
    are ``away`` neither step nor are averaged.
    """

    how: OuterSteps
    weights: Floats
    shared: Floats = field(init=False)
    momenta: Floats = field(init=False)
    away: set[int] = field(default_factory=set, init=False)
    _changes: dict[int, Floats] = field(default_factory=dict, init=False)
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.weights = np.array(self.weights, dtype=float)
        if self.weights.ndim < 2 or self.weights.shape[1] != self.how.fragments:
            refuse(
                "weights",
                f"shape {self.weights.shape} has no column for each of {self.how.fragments} "
                "fragments: give ranks x fragments",
            )
        self.shared = self.weights[0].copy()
        self.momenta = np.zeros_like(self.shared)

    def advance(self, inner: InnerStep) -> None:
        """Run one inner step of every rank, and the outer step that follows it, if one does."""
        self.step += 1
        there = self._there
        self.weights[there] += inner(self.weights, self.step)[there]
        starting = self.how.schedule.starting(self.step)
        if starting is not None:
            change = self.shared[starting] - self.weights[there, starting]
            self._changes[starting] = change.mean(axis=0)
        due = self.how.schedule.due(self.step)
        if due is not None:
            self._outer(due)

    def leave(self, rank: int) -> None:
        """Take a rank out of the run; the other ranks continue without it."""
        if self.away | {rank} == {*range(len(self.weights))}:
            refuse(
                "rank",
                f"{rank} is the only active rank, and cannot leave: let another rank return first",
            )
        self.away.add(rank)

    def rejoin(self, rank: int) -> None:
        """Bring back a rank that was away; it continues from the shared weights."""
        self.away.discard(rank)
        self.weights[rank] = self.shared

    @property
    def _there(self) -> list[int]:
        return [rank for rank in range(len(self.weights)) if rank not in self.away]

    def _outer(self, fragment: int) -> None:
        how, change = self.how, self._changes.pop(fragment)
        self.momenta[fragment] = how.momentum * self.momenta[fragment] + change
        ahead = change + how.momentum * self.momenta[fragment] if how.momentum else change
        self.shared[fragment] = self.shared[fragment] - how.rate * ahead
        there = self._there
        mine = self.weights[there, fragment]
        self.weights[there, fragment] = how.mixed * mine + (1 - how.mixed) * self.shared[fragment]
