"""What makes one iteration differ from the next: slow stages, links and clocks, and chance.

It changes how long the tasks of a graph take by themselves, before they are played; how streams
slow one another down stays as it is, and so does what an iteration takes besides its tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from mistlab.machine.slowdowns import STREAMS
from mistlab.values.errors import refuse
from mistlab.values.value import bounded, check_field, check_fields
from simulators.graph import TaskGraph

_COMPUTE = STREAMS.index("compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variability:
    """How far tasks are from what they are predicted to take; the defaults change nothing.

    A factor says how many times as long tasks take: ``slow_stage_factor`` those that stage
    ``slow_stage`` (from 0) computes, ``clock_factor`` those that any stage computes,
    ``slow_links_factor`` those of the other three streams and sends, which may block the compute
    stream but compute nothing. ``jitter`` is the standard deviation of each task's duration as a
    share of it: each is multiplied by a lognormal number of its own, of mean 1.
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
            problem = f"{self.slow_stage_factor:g} is for no stage: give slow_stage too"
            refuse("slow_stage_factor", problem)

    def disturbed(self, graph: TaskGraph, sample: int = 0) -> TaskGraph:
        """The graph with other durations; samples of one seed differ in their jitter alone.

        Raises ``FieldError`` when the graph has no ``slow_stage``.
        """
        if self.slow_stage is not None and self.slow_stage >= graph.stages:
            problem = (
                f"{self.slow_stage} is not a stage of the plan: give 0 to {graph.stages - 1}, "
                "or leave it out"
            )
            refuse("slow_stage", problem)
        seconds = np.array(graph.seconds) * self._factors(graph)
        if self.jitter:
            # Each sample has its own generator: it does not depend on how many are drawn.
            generator = np.random.default_rng([self.seed, sample])
            variance = math.log1p(self.jitter**2)
            seconds *= generator.lognormal(-variance / 2, math.sqrt(variance), len(seconds))
        return replace(graph, seconds=seconds.tolist())

    def _factors(self, graph: TaskGraph) -> np.ndarray:
        """How many times as long each task takes."""
        stages, streams = np.divmod(np.array(graph.lanes, dtype=int), len(STREAMS))
        sends = np.array([kind == "X" for kind, _, _ in graph.labels], dtype=bool)
        computes = (streams == _COMPUTE) & ~sends
        factors = np.where(computes, self.clock_factor, self.slow_links_factor)
        if self.slow_stage is not None:
            factors[computes & (stages == self.slow_stage)] *= self.slow_stage_factor
        return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """What iterations of one plan took, in seconds: their mean and their 5, 50 and 95 % quantiles.

    ``seed`` is that of the variability, ``samples`` how many iterations were played.
    """

    samples: int = field(metadata=bounded(minimum=1))
    seed: int = field(metadata=bounded(minimum=0))
    mean_s: float = field(metadata=bounded(minimum=0))
    q05_s: float = field(metadata=bounded(minimum=0))
    q50_s: float = field(metadata=bounded(minimum=0))
    q95_s: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, iterations_s: Sequence[float], seed: int) -> Self:
        """The quantiles of at least one iteration; between two of them they are interpolated."""
        check_field(cls, "samples", len(iterations_s))
        low, middle, high = np.quantile(iterations_s, [0.05, 0.5, 0.95]).tolist()
        return cls(
            samples=len(iterations_s),
            seed=seed,
            mean_s=math.fsum(iterations_s) / len(iterations_s),
            q05_s=low,
            q50_s=middle,
            q95_s=high,
        )
