"""The two-level dynamic programme of Alpa (Zheng et al., OSDI 2022), without memory savings.

Inside a stage (``searchers/strategies/alpa_stages.py``): of the degrees that a submesh can have,
the fastest that fits, with none or all of its blocks recomputed, the lowest ZeRO level and nothing
offloaded. Across stages: for each number of micro-batches G, blocks and GPUs are divided so that

    sum t_i + (G - 1) max t_i

is least, by a programme over stages from the last one, once for each bound on max t_i. t_i is a
steady micro-batch with its transfer to the next stage, and a G-th of what comes once an iteration.

Axes: B blocks and D GPUs of the stages so far (0 to all).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.values.plan import Plan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.ledger import Ledger
from searchers.meshes import (
    Mesh,
    allows,
    equal_pipelines,
    even_layers,
    layer_counts,
    meshes,
    micro_batch_counts,
)
from searchers.strategies.alpa_stages import Division, StageTable, kind_of, stage_table
from searchers.strategy import Ending, NeedsStageCosts

# Bounds on the slowest stage that lie closer together than this count as one.
SPACING = 1.01
# The reason to refuse a search on unlike nodes.
UNLIKE_NODES = (
    "takes all nodes as equal, and this cluster has unlike ones: ask another searcher, such as "
    "mist or aceso"
)


@NeedsStageCosts
def alpa(problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator) -> Ending:
    """Solve the programme for each number of micro-batches; predict the pipelines it finds."""
    del draw  # Nothing is left to chance.
    if problem.cluster.others:
        return Ending(status="REFUSED", reason=UNLIKE_NODES)
    for division in divisions(problem, space):
        table = stage_table(problem, space, ledger, division)
        if table is not None:
            programme = Programme(
                problem=problem, space=space, ledger=ledger, division=division, table=table
            )
            ledger.predict(list(dict.fromkeys(programme.plans())))
    return Ending()


def divisions(problem: Problem, space: SearchSpace) -> Iterator[Division]:
    """All divisions for which the programme is solved."""
    layers = problem.workload.model.layers
    ways = {"all": (True,), "none_or_all": (False, True), "any": (False, True)}[space.recomputation]
    alike = (ways,) if space.unequal_stages else tuple((way,) for way in ways)
    for micro_batches, chosen, numbers in _pipelines(problem, space):
        for recomputing in alike:
            yield Division(
                micro_batches=micro_batches,
                meshes=chosen,
                num_stages=numbers,
                layers=_layers(layers, numbers, space),
                recomputing=recomputing,
            )


def _pipelines(
    problem: Problem, space: SearchSpace
) -> Iterator[tuple[int, tuple[Mesh, ...], tuple[int, ...]]]:
    """The numbers of micro-batches, each with meshes and numbers of stages."""
    if not space.unequal_meshes:
        for pipeline in equal_pipelines(problem, space):
            yield pipeline.micro_batches, pipeline.meshes[:1], (pipeline.num_stages,)
        return
    for micro_batches in micro_batch_counts(problem, space):
        chosen = tuple(meshes(problem, space, micro_batches))
        smallest = min((mesh.num_gpus for mesh in chosen), default=problem.cluster.num_gpus + 1)
        most = min(problem.cluster.num_gpus // smallest, problem.workload.model.layers)
        numbers = [number for number in range(1, most + 1) if allows(space.pipeline, number)]
        if space.layers_off_balance is None and numbers:
            yield micro_batches, chosen, tuple(numbers)
        else:
            yield from ((micro_batches, chosen, (number,)) for number in numbers)


def _layers(layers: int, numbers: Sequence[int], space: SearchSpace) -> tuple[Sequence[int], ...]:
    """The numbers of blocks that each stage may have, from the last stage to the first."""
    if space.layers_off_balance == 0:
        return tuple((own,) for own in reversed(even_layers(layers, numbers[0])))
    return (layer_counts(layers, min(numbers), space),) * max(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline: its stages' places in the table, and the sum of their times."""

    seconds: float
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """The upper level: blocks and GPUs divided into stages whose choices are known."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    division: Division
    table: StageTable

    def plans(self) -> Iterator[Plan]:
        """The best pipeline for each bound on the slowest stage that may be useful."""
        limits = self._limits()
        if not limits or (fastest := self.within(limits[-1])) is None:
            return
        waits = self.division.micro_batches - 1
        best_s = np.inf
        first = bisect_left(limits, 1, key=lambda limit: self.within(limit) is not None)
        for limit in limits[first:] if waits else limits[-1:]:
            found = self.within(limit)
            assert found is not None
            yield self._plan(found)
            best_s = min(best_s, found.seconds + waits * limit)
            if found.seconds <= fastest.seconds or waits * limit >= best_s:
                return

    def within(self, limit_s: float) -> Found | None:
        """The pipeline with the least sum of times whose stages each take at most a limit."""
        unit, cluster = self.division.unit, self.problem.cluster
        layers, gpus = self.problem.workload.model.layers, cluster.num_gpus // unit
        seconds = np.full((layers + 1, gpus + 1), np.inf)
        seconds[0, 0] = 0.0
        steps: list[_Step] = []
        best: Found | None = None
        for place in range(1, max(self.division.num_stages) + 1):
            if place in self.division.num_stages:
                whole = self._step(place, seconds, limit_s, is_first=True)
                total = float(whole.seconds[-1, -1])
                if total < (best.seconds if best else np.inf):
                    best = Found(seconds=total, places=self._places([*steps, whole]))
            if place < max(self.division.num_stages):
                steps.append(self._step(place, seconds, limit_s, is_first=False))
                seconds = steps[-1].seconds
        return best

    def _step(
        self, place: int, after: NDArray[np.float64], limit_s: float, *, is_first: bool
    ) -> "_Step":
        """The times of pipelines with one more stage, ``place`` from the end (B, D)."""
        self.ledger.check_time()
        cluster, unit = self.problem.cluster, self.division.unit
        kind = self.table.kinds[kind_of(self.division, place, is_first=is_first)]
        layers, gpus = (extent - 1 for extent in after.shape)
        first_ranks = cluster.num_gpus - unit * np.arange(gpus + 1)
        seconds, choice = np.full(after.shape, np.inf), np.zeros((*after.shape, 2), dtype=int)
        for index, size in enumerate(self.division.sizes):
            own = self.table.seconds[kind, index][first_ranks % cluster.gpus_per_node]
            own = np.where(own <= limit_s, own, np.inf)[size // unit :]
            for count in np.flatnonzero(np.isfinite(own).any(axis=0)):
                total = own[:, count] + after[: layers + 1 - count, : gpus + 1 - size // unit]
                region = (slice(count, None), slice(size // unit, None))
                better = total < seconds[region]
                seconds[region][better] = total[better]
                choice[region][better] = index, count
        return _Step(kind=kind, seconds=seconds, choice=choice)

    def _places(self, steps: "Sequence[_Step]") -> tuple[tuple[int, ...], ...]:
        """The places in the table of a pipeline's stages, from the last step back."""
        cluster, unit = self.problem.cluster, self.division.unit
        layers, gpus = self.problem.workload.model.layers, cluster.num_gpus // unit
        places = []
        for step in reversed(steps):
            index, count = step.choice[layers, gpus].tolist()
            rank = (cluster.num_gpus - gpus * unit) % cluster.gpus_per_node
            places.append((step.kind, index, rank, count))
            layers, gpus = layers - count, gpus - self.division.sizes[index] // unit
        return tuple(places)

    def _limits(self) -> list[float]:
        """Times of stages as limits, each a little longer than the one before."""
        times = np.unique(self.table.seconds[np.isfinite(self.table.seconds)])
        limits: list[float] = []
        for time in times.tolist()[::-1]:
            if not limits or time * SPACING < limits[-1]:
                limits.append(time)
        return limits[::-1]

    def _plan(self, found: Found) -> Plan:
        return Plan(
            engine=self.space.engine,
            micro_batches=self.division.micro_batches,
            stages=tuple(self.table.stage(place, self.space) for place in found.places),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """Total times of pipelines (B, D), and the size and blocks of the first stage of each."""

    kind: int
    seconds: NDArray[np.float64]
    choice: NDArray[np.int64]
