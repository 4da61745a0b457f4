"""Alpa's search: a dynamic programme divides the model into stages; the best parallel degrees of
every possible stage are computed first.

Axes: K kinds of stages, M submesh sizes, P positions of a stage's first rank in its node, L blocks
of a stage (0 to all), C candidates.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import names_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import StageBatch, StageCosts
from searchers.meshes import (
    Mesh,
    allows,
    equal_pipelines,
    even_layers,
    layer_counts,
    lies_well,
    meshes,
    micro_batch_counts,
)
from searchers.savings import bare_stage
from searchers.strategy import Ending, Ledger, NeedsStageCosts

# The lower level of Alpa's search: the time of each possible stage with its best parallel degrees.
#
# Axes of arrays: K kinds of stages, M submesh sizes (numbers of GPUs of a stage), P positions of a
# stage's first rank in its node, L numbers of blocks of a stage (0 to all), C candidates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The input of one run of the dynamic programme: the number of micro-batches, and the meshes,
    numbers of stages and numbers of blocks that pipelines may have.

    ``layers`` are the numbers of blocks that stages may have, from the last stage to the first of
    the longest pipeline. ``recomputing`` says whether a stage may recompute none, all, or either.
    """

    micro_batches: int
    meshes: tuple[Mesh, ...]
    num_stages: tuple[int, ...]
    layers: tuple[Sequence[int], ...]
    recomputing: tuple[bool, ...]

    @property
    def sizes(self) -> list[int]:
        """The numbers of GPUs that a stage may have, ascending."""
        return sorted({mesh.num_gpus for mesh in self.meshes})

    @property
    def unit(self) -> int:
        """The greatest common divisor of the possible numbers of GPUs of a stage."""
        return gcd(*self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What stages with equal numbers of GPUs and blocks may differ in: the micro-batches in flight,
    and whether a stage is the first or the last.
    """

    in_flight: int
    is_first: int
    is_last: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """The time of each possible stage with its best parallel degrees, infinite where nothing fits
    in memory; and the index of these degrees. The axes are the kind of stage, its number of GPUs,
    its first rank in its node, and its number of blocks.
    """

    kinds: dict[Kind, int]
    seconds: Floats
    chosen: Ints
    candidates: list[tuple[Mesh, bool]]
    candidate: Ints

    def stage(self, position: tuple[int, ...], space: SearchSpace) -> StagePlan:
        """The best stage at an entry of the table, as a stage of a plan."""
        mesh, recomputes = self.candidates[self.candidate[self.chosen[position]]]
        bare = bare_stage(mesh, position[-1], space)
        return replace(bare, checkpointed_layers=bare.layers) if recomputes else bare


def kind_of(division: Division, from_end: int, *, is_first: bool) -> Kind:
    """The kind of the stage at position ``from_end``, counted from the last stage, which is 1."""
    return Kind(
        in_flight=min(division.micro_batches, from_end),
        is_first=int(is_first),
        is_last=int(from_end == 1),
        layers=tuple(division.layers[from_end - 1]),
    )


def stage_table(
    problem: Problem, space: SearchSpace, ledger: Ledger, division: Division
) -> StageTable | None:
    """A table of the best degrees of every stage that pipelines may have; None if there are no
    candidates.
    """
    longest = max(division.num_stages)
    kinds = [kind_of(division, place, is_first=False) for place in range(1, longest)]
    kinds += [kind_of(division, place, is_first=True) for place in division.num_stages]
    of_kind = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    candidates = [(mesh, again) for mesh in division.meshes for again in division.recomputing]
    blocks = []
    for kind, index in of_kind.items():
        ledger.check_time()
        for option, (mesh, _) in enumerate(candidates):
            ranks = _first_ranks(kind, mesh, division.unit, problem.cluster)
            blocks.append(_combined((index,), (option,), ranks, kind.layers))
    rows = np.concatenate(blocks)
    if not len(rows):
        return None
    batch = _batch(rows, list(of_kind), candidates, space)
    batch = batch.with_columns(micro_batches=division.micro_batches)
    costs = ledger.stage_costs(batch, engine=space.engine)
    seconds = _seconds(costs, batch, division.micro_batches)
    sizes = np.array([division.sizes.index(mesh.num_gpus) for mesh, _ in candidates])
    kind, option, rank, layers = rows.T
    places = (kind, sizes[option], rank % problem.cluster.ranks_alike, layers)
    shape = (
        *(len(of_kind), len(division.sizes), problem.cluster.ranks_alike),
        problem.workload.model.layers + 1,
    )
    table, chosen = np.full(shape, np.inf), np.full(shape, -1)
    # Slowest first: where several candidates belong to the same entry of the table, the fastest is
    # written last and stays.
    order = np.argsort(-seconds, kind="stable")
    by_time = tuple(axis[order] for axis in places)
    table[by_time], chosen[by_time] = seconds[order], order
    return StageTable(
        kinds=of_kind, seconds=table, chosen=chosen, candidates=candidates, candidate=option
    )


def _combined(*columns: Sequence[int]) -> Ints:
    """All combinations of the columns' values, as rows."""
    grids = np.meshgrid(*(np.array(column, dtype=np.int64) for column in columns), indexing="ij")
    return np.stack([grid.reshape(-1) for grid in grids], axis=1)


def _first_ranks(kind: Kind, mesh: Mesh, unit: int, cluster: Cluster) -> list[int]:
    """The ranks at which a stage may begin; for inner stages on one node the rank does not matter,
    so only one is tried.
    """
    if kind.is_first:
        return [0] if mesh.num_gpus == cluster.num_gpus or not kind.is_last else []
    if kind.is_last:
        ranks = [cluster.num_gpus - mesh.num_gpus]
    else:
        ranks = list(range(0, cluster.ranks_alike, unit))
    return [rank for rank in ranks if lies_well(rank, mesh.num_gpus, cluster)]


def _batch(
    rows: Ints,
    kinds: Sequence[Kind],
    candidates: Sequence[tuple[Mesh, bool]],
    space: SearchSpace,
) -> StageBatch:
    kind, option, rank, layers = rows.T
    bare = [bare_stage(mesh, 1, space) for mesh, _ in candidates]

    def of_kind(name: str) -> Ints:
        return np.asarray(np.array([getattr(one, name) for one in kinds])[kind])

    def of_stage(name: str) -> Ints:
        return np.asarray(np.array([stage.value(name) for stage in bare])[option])

    recomputes = np.array([again for _, again in candidates])[option]
    return StageBatch(
        layers=layers,
        **{name: of_stage(name) for name in (*names_of("mesh"), *names_of("savings"))},
        checkpointed_layers=np.where(recomputes, layers, 0),
        in_flight=of_kind("in_flight"),
        has_embedding=of_kind("is_first"),
        has_head=of_kind("is_last"),
        first_rank=rank,
    )


def _seconds(costs: StageCosts, batch: StageBatch, micro_batches: int) -> Floats:
    """For each candidate, the seconds of a steady-state micro-batch with its send, and this
    micro-batch's share of the work that is done once per iteration.
    """
    seconds = costs.seconds
    once = np.maximum(seconds.delta_forward_s, 0) + np.maximum(seconds.delta_backward_s, 0)
    sent = np.where(batch.has_head == 1, 0, seconds.point_to_point_s)
    return np.where(costs.fits, seconds.stable_s + sent + once / micro_batches, np.inf)


# The two-level dynamic programme of Alpa (Zheng et al., OSDI 2022), without memory savings.
#
# The lower level finds the fastest parallel degrees of each possible stage that fit in memory, with
# none or all of its blocks recomputed, the lowest ZeRO level and nothing offloaded. The upper level
# divides blocks and GPUs among stages, for each number of micro-batches G, so that
#
#     sum t_i + (G - 1) max t_i
#
# is minimal: a dynamic programme over stages, from the last one, for each bound on max t_i. t_i is
# a steady-state micro-batch of stage i with its send to the next stage, and a G-th of the work that
# is done once per iteration.
#
# Axes of arrays: B blocks and D GPUs of the stages so far (0 to all).


# Two bounds on the slowest stage's time count as one if they differ by less than this factor.
SPACING = 1.01
# The reason for refusing clusters whose nodes are of several kinds.
UNLIKE_NODES = (
    "takes all nodes as equal, and this cluster has unlike ones: ask another searcher, such as "
    "mist or aceso"
)


@NeedsStageCosts
def alpa(problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator) -> Ending:
    """Run the dynamic programme for each number of micro-batches, and predict the pipelines that it
    finds.
    """
    del draw  # This search draws no random numbers.
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
    """The inputs for all runs of the dynamic programme: one for each set of meshes that the stages
    of a pipeline may have.
    """
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
    """The possible numbers of micro-batches, each with the meshes and the numbers of stages that it
    allows.
    """
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
    """For each stage, from the last to the first, its possible numbers of blocks."""
    if space.layers_off_balance == 0:
        return tuple((own,) for own in reversed(even_layers(layers, numbers[0])))
    return (layer_counts(layers, min(numbers), space),) * max(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline that the dynamic programme found: its stages as entries of the table of stages,
    and the sum of their times.
    """

    seconds: float
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """The upper level of Alpa's search: a dynamic programme that divides blocks and GPUs into
    stages, whose best degrees are known.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    division: Division
    table: StageTable

    def plans(self) -> Iterator[Plan]:
        """The best pipeline for each bound on the slowest stage's time that can improve the
        result.
        """
        limits = self._limits()
        if not limits or (fastest := self.within(limits[-1])) is None:
            return
        waits = self.division.micro_batches - 1
        best_s = np.inf
        first = bisect_left(limits, 1, key=lambda limit: self.within(limit) is not None)
        for limit in limits[first:] if waits else limits[-1:]:
            pipeline = self.within(limit)
            assert pipeline is not None
            yield self._plan(pipeline)
            best_s = min(best_s, pipeline.seconds + waits * limit)
            if pipeline.seconds <= fastest.seconds or waits * limit >= best_s:
                return

    def within(self, limit_s: float) -> Found | None:
        """The pipeline with the least sum of stage times, if no stage may take longer than
        ``limit_s``.
        """
        unit, cluster = self.division.unit, self.problem.cluster
        layers, gpus = self.problem.workload.model.layers, cluster.num_gpus // unit
        seconds = np.full((layers + 1, gpus + 1), np.inf)
        seconds[0, 0] = 0.0
        steps: list[_Step] = []
        best: Found | None = None
        for from_end in range(1, max(self.division.num_stages) + 1):
            if from_end in self.division.num_stages:
                whole = self._step(from_end, seconds, limit_s, is_first=True)
                total = float(whole.seconds[-1, -1])
                if total < (best.seconds if best else np.inf):
                    best = Found(seconds=total, places=self._places([*steps, whole]))
            if from_end < max(self.division.num_stages):
                steps.append(self._step(from_end, seconds, limit_s, is_first=False))
                seconds = steps[-1].seconds
        return best

    def _step(self, from_end: int, after: Floats, limit_s: float, *, is_first: bool) -> "_Step":
        """Put a stage at position ``from_end`` (counted from the last, which is 1) in front of the
        partial pipelines; returns their times by the blocks and GPUs that they use.
        """
        self.ledger.check_time()
        cluster, unit = self.problem.cluster, self.division.unit
        kind = self.table.kinds[kind_of(self.division, from_end, is_first=is_first)]
        layers, gpus = (extent - 1 for extent in after.shape)
        first_ranks = cluster.num_gpus - unit * np.arange(gpus + 1)
        seconds, choice = np.full(after.shape, np.inf), np.zeros((*after.shape, 2), dtype=int)
        for index, size in enumerate(self.division.sizes):
            stage_s = self.table.seconds[kind, index][first_ranks % cluster.ranks_alike]
            stage_s = np.where(stage_s <= limit_s, stage_s, np.inf)[size // unit :]
            for count in np.flatnonzero(np.isfinite(stage_s).any(axis=0)):
                total = stage_s[:, count] + after[: layers + 1 - count, : gpus + 1 - size // unit]
                region = (slice(count, None), slice(size // unit, None))
                better = total < seconds[region]
                seconds[region][better] = total[better]
                choice[region][better] = index, count
        return _Step(kind=kind, seconds=seconds, choice=choice)

    def _places(self, steps: "Sequence[_Step]") -> tuple[tuple[int, ...], ...]:
        """The stages of a pipeline as entries of the table of stages, found by going back from the
        last step of the dynamic programme.
        """
        cluster, unit = self.problem.cluster, self.division.unit
        layers, gpus = self.problem.workload.model.layers, cluster.num_gpus // unit
        places = []
        for step in reversed(steps):
            index, count = step.choice[layers, gpus].tolist()
            rank = (cluster.num_gpus - gpus * unit) % cluster.ranks_alike
            places.append((step.kind, index, rank, count))
            layers, gpus = layers - count, gpus - self.division.sizes[index] // unit
        return tuple(places)

    def _limits(self) -> list[float]:
        """The distinct times of stages in ascending order, as upper bounds for the slowest
        stage.
        """
        times = np.unique(self.table.seconds[np.isfinite(self.table.seconds)])
        limits: list[float] = []
        for time in times.tolist()[::-1]:
            if not limits or time * SPACING < limits[-1]:
                limits.append(time)
        return limits[::-1]

    def _plan(self, pipeline: Found) -> Plan:
        return Plan(
            engine=self.space.engine,
            micro_batches=self.division.micro_batches,
            stages=tuple(self.table.stage(place, self.space) for place in pipeline.places),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """The times of partial pipelines by the blocks and GPUs that they use, with the numbers of GPUs
    and blocks of the first stage of each.
    """

    kind: int
    seconds: Floats
    choice: Ints
