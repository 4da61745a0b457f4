"""Changes the times of a simulated iteration's tasks: by slow stages, slow links, slow GPU clocks
and random jitter.

It changes the times of single tasks in a graph before the simulation. Two things stay as predicted:
the factors by which streams slow one another down, and time that an iteration spends outside its
tasks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from mistlab.core.values import Checked, bounded, check_field, check_fields, refuse
from simulators.graph import LANES, TaskGraph

_COMPUTE = LANES.index("compute")
# The quantiles of iteration times that are reported: 90 % of iterations lie between the outer two,
# as within the bounds of predictions (docs/decisions/0041).
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variability:
    """Factors on the predicted times of tasks; with the default factors nothing changes.

    ``slow_stage_factor`` applies to computing on stage ``slow_stage`` (counted from 0),
    ``clock_factor`` to computing on every stage, ``slow_links_factor`` to sends and to tasks of the
    three streams that do not compute. ``jitter`` is the standard deviation of a task's time as a
    share of the time: each task is multiplied by a lognormal random number of mean 1.
    """

    jitter: float = field(default=0.0, metadata=bounded(minimum=0, maximum=10))
    slow_stage: int | None = field(default=None, metadata=bounded(minimum=0))
    slow_stage_factor: float = field(default=1.0, metadata=bounded(minimum=1))
    slow_links_factor: float = field(default=1.0, metadata=bounded(minimum=1))
    clock_factor: float = field(default=1.0, metadata=bounded(minimum=1))
    seed: int = field(default=0, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slow_stage is None and self.slow_stage_factor != 1:
            refuse(
                "slow_stage_factor",
                f"{self.slow_stage_factor:g} needs slow_stage: give the stage that it slows",
            )

    def disturbed(self, graph: TaskGraph, sample: int = 0) -> TaskGraph:
        """The task graph with changed times of tasks; samples with the same seed differ only in
        their random jitter.

        Raises ``FieldError`` if the graph has no stage ``slow_stage``.
        """
        if self.slow_stage is not None and self.slow_stage >= graph.stages:
            refuse(
                "slow_stage",
                f"{self.slow_stage} is not a stage of the plan: give 0 to {graph.stages - 1}, or "
                "leave it out",
            )
        seconds = np.array(graph.seconds) * self._factors(graph)
        if self.jitter:
            # Each sample has its own random generator, so a sample does not depend on the number of
            # samples.
            generator = np.random.default_rng([self.seed, sample])
            variance = math.log1p(self.jitter**2)
            seconds *= generator.lognormal(-variance / 2, math.sqrt(variance), len(seconds))
        return replace(graph, seconds=seconds.tolist())

    def _factors(self, graph: TaskGraph) -> np.ndarray:
        """For each task, the factor by which its time is multiplied."""
        stages, lanes = np.divmod(np.array(graph.lanes, dtype=int), len(LANES))
        sends = np.array([kind == "X" for kind, _, _ in graph.labels], dtype=bool)
        computes = (lanes == _COMPUTE) & ~sends
        factors = np.where(computes, self.clock_factor, self.slow_links_factor)
        if self.slow_stage is not None:
            factors[computes & (stages == self.slow_stage)] *= self.slow_stage_factor
        return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles(Checked):
    """The mean and the 5, 50 and 95 % quantiles of a plan's iteration times, in seconds.

    ``seed`` is the seed of the variability, ``samples`` the number of simulated iterations.
    """

    samples: int = field(metadata=bounded(minimum=1))
    seed: int = field(metadata=bounded(minimum=0))
    mean_s: float = field(metadata=bounded(minimum=0))
    q05_s: float = field(metadata=bounded(minimum=0))
    q50_s: float = field(metadata=bounded(minimum=0))
    q95_s: float = field(metadata=bounded(minimum=0))

    @classmethod
    def of(cls, iterations_s: Iterable[float], seed: int) -> Self:
        """The quantiles of iteration times, of which there must be at least one; values between two
        iterations are interpolated.
        """
        iterations_s = list(iterations_s)
        check_field(cls, "samples", len(iterations_s))
        low, middle, high = np.quantile(iterations_s, QUANTILES).tolist()
        return cls(
            samples=len(iterations_s),
            seed=seed,
            mean_s=math.fsum(iterations_s) / len(iterations_s),
            q05_s=low,
            q50_s=middle,
            q95_s=high,
        )
