"""The lower level of Alpa's programme: the time of the best choice for each stage.

Axes: K kinds of stages, M submesh sizes, P places of a stage's first rank in its node, L blocks of
a stage (0 to all), C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.values.dimensions import names_of
from mistlab.values.plan import StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.stages import StageBatch, StageCosts
from searchers.ledger import Ledger
from searchers.meshes import Mesh, lies_well
from searchers.savings import bare_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A batch and meshes that are divided into stages, and the limits of the division.

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
        """The numbers of GPUs that stages may have."""
        return sorted({mesh.num_gpus for mesh in self.meshes})

    @property
    def unit(self) -> int:
        """The number of GPUs of which all sizes are multiples."""
        return gcd(*self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Tells stages of the same size and place apart: 1 or 0 for the first stage, and for the
    last."""

    in_flight: int
    is_first: int
    is_last: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """Seconds of the best choice for each stage (K, M, P, L), infinite where none fits, and the
    number of the chosen candidate."""

    kinds: dict[Kind, int]
    seconds: NDArray[np.float64]
    chosen: NDArray[np.int64]
    candidates: list[tuple[Mesh, bool]]
    candidate: NDArray[np.int64]

    def stage(self, place: tuple[int, ...], space: SearchSpace) -> StagePlan:
        """The chosen stage at a place in the table."""
        mesh, recomputes = self.candidates[self.candidate[self.chosen[place]]]
        bare = bare_stage(mesh, place[-1], space)
        return replace(bare, checkpointed_layers=bare.layers) if recomputes else bare


def kind_of(division: Division, place: int, *, is_first: bool) -> Kind:
    """The kind of a stage, ``place`` stages from the end, the last one 1."""
    return Kind(
        in_flight=min(division.micro_batches, place),
        is_first=int(is_first),
        is_last=int(place == 1),
        layers=tuple(division.layers[place - 1]),
    )


def stage_table(
    problem: Problem, space: SearchSpace, ledger: Ledger, division: Division
) -> StageTable | None:
    """The best choices for all stages of the division's pipelines; None if there are no
    candidates."""
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
    places = (kind, sizes[option], rank % problem.cluster.gpus_per_node, layers)
    shape = (
        *(len(of_kind), len(division.sizes), problem.cluster.gpus_per_node),
        problem.workload.model.layers + 1,
    )
    table, chosen = np.full(shape, np.inf), np.full(shape, -1)
    # If several candidates write to one place, the last one stays: the fastest.
    order = np.argsort(-seconds, kind="stable")
    by_time = tuple(axis[order] for axis in places)
    table[by_time], chosen[by_time] = seconds[order], order
    return StageTable(
        kinds=of_kind, seconds=table, chosen=chosen, candidates=candidates, candidate=option
    )


def _combined(*columns: Sequence[int]) -> NDArray[np.int64]:
    """All combinations of the columns' values, as rows."""
    grids = np.meshgrid(*(np.array(column, dtype=np.int64) for column in columns), indexing="ij")
    return np.stack([grid.reshape(-1) for grid in grids], axis=1)


def _first_ranks(kind: Kind, mesh: Mesh, unit: int, cluster: Cluster) -> list[int]:
    """The places where a stage may begin; middle stages stand for the stages of all nodes."""
    if kind.is_first:
        return [0] if mesh.num_gpus == cluster.num_gpus or not kind.is_last else []
    if kind.is_last:
        ranks = [cluster.num_gpus - mesh.num_gpus]
    else:
        ranks = list(range(0, cluster.gpus_per_node, unit))
    return [rank for rank in ranks if lies_well(rank, mesh.num_gpus, cluster)]


def _batch(
    rows: NDArray[np.int64],
    kinds: Sequence[Kind],
    candidates: Sequence[tuple[Mesh, bool]],
    space: SearchSpace,
) -> StageBatch:
    kind, option, rank, layers = rows.T
    bare = [bare_stage(mesh, 1, space) for mesh, _ in candidates]

    def of_kind(name: str) -> NDArray[np.int64]:
        return np.asarray(np.array([getattr(one, name) for one in kinds])[kind])

    def of_stage(name: str) -> NDArray[np.int64]:
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


def _seconds(costs: StageCosts, batch: StageBatch, micro_batches: int) -> NDArray[np.float64]:
    """Seconds of a steady micro-batch, its transfer, and its part of the tasks that run once
    (C)."""
    seconds = costs.seconds
    once = np.maximum(seconds.delta_forward_s, 0) + np.maximum(seconds.delta_backward_s, 0)
    sent = np.where(batch.has_head == 1, 0, seconds.point_to_point_s)
    return np.where(costs.fits, seconds.stable_s + sent + once / micro_batches, np.inf)
