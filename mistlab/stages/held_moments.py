"""The moments at which a stage holds most micro-batches, in any order of its passes.

Axes: K moments, V chunks of a stage.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mistlab.core.arrays import Ints
from mistlab.plan.plan import Plan
from mistlab.schedule.order_text import (
    PassKind,
)
from mistlab.schedule.orders import (
    DEFAULT_ORDER,
    ORDERS,
    fewer_micro_batches,
    in_flight,
)
from mistlab.schedule.placement import Placement
from mistlab.schedule.stage_passes import StagePasses, passes_of
from mistlab.stages.plan_orders import check_order, named_order, passes_of_plan

# The moments at which a stage holds most micro-batches, in any order of its passes.
#
# Axes: K moments, V chunks of a stage.


# The kind of passes, their chunk, whether layers step beside them, and the chunk that leaves.
_Begin = tuple[PassKind, int, bool, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassMoments:
    """The fullest moments (K, 2 V) at which passes of one kind of a chunk begin.

    ``held`` counts micro-batches as ``HeldMoments`` does. Layers step beside passes that are
    ``first_forward``. Activations of chunk ``leaving``, if any, are on their way to the host.
    """

    kind: PassKind
    chunk: int
    first_forward: bool
    leaving: int | None
    held: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldMoments:
    """The fullest moments of stage number ``stage``, and how many micro-batches it holds then.

    A moment (a row of K) has two numbers for each chunk (2 V): first, for all chunks, micro-batches
    between their forward and their backward pass, then micro-batches between their backward pass
    and their pass for weights. The fullest moments are a Pareto frontier: at no other moment are
    all numbers as large.

    ``every`` is the frontier of all moments; ``of_whole`` that of the moments at which every chunk
    holds a micro-batch between its forward and its backward pass; ``begins`` those of the moments
    at which passes of each kind begin.
    """

    stage: int
    placement: Placement
    splits_backward: bool
    every: Ints
    of_whole: Ints
    begins: tuple[PassMoments, ...]

    @classmethod
    def of(cls, passes: StagePasses, stage: int) -> "HeldMoments":
        """The fullest moments of a stage with these passes."""
        chunks = passes.chunks
        held, found = [0] * (2 * chunks), set()
        begins: dict[_Begin, set[tuple[int, ...]]] = defaultdict(set)
        leaving: int | None = None
        for one in passes:
            begins[one.kind, one.chunk, one.phase == "first_forward", leaving].add(tuple(held))
            if one.kind != "W":
                leaving = one.chunk if one.kind == "F" else None
            if one.kind == "F":
                held[one.chunk] += 1
            elif one.kind == "W":
                held[chunks + one.chunk] -= 1
            else:
                held[one.chunk] -= 1
                held[chunks + one.chunk] += passes.splits_backward
            found.add(tuple(held))
        return cls(
            stage=stage,
            placement=passes.placement,
            splits_backward=passes.splits_backward,
            every=_fullest([*found]),
            of_whole=_fullest([moment for moment in found if min(moment[:chunks]) > 0]),
            begins=tuple(
                PassMoments(
                    kind=kind,
                    chunk=chunk,
                    first_forward=first_forward,
                    leaving=leaving,
                    held=_fullest([*moments]),
                )
                for (kind, chunk, first_forward, leaving), moments in begins.items()
            ),
        )

    @property
    def chunks(self) -> int:
        """Number of chunks of the stage."""
        return self.placement.chunks

    @property
    def least_held(self) -> int:
        """The most micro-batches that every chunk holds at the same time between their forward and
        their backward passes."""
        return int(self.every[:, : self.chunks].min(axis=1).max())

    def most_held(self, blocks: int) -> float:
        """The most micro-batches that a stage of so many blocks holds at once; a chunk of a
        micro-batch counts as its share of the blocks."""
        held = self.every[:, : self.chunks] + self.every[:, self.chunks :]
        if self.chunks == 1:
            return float(held.max())
        shares = np.array(self.placement.shares_of_blocks(blocks, self.stage))
        return float((held @ shares).max()) / blocks


@lru_cache(maxsize=1024)
def moments_in(order: str, num_stages: int, micro_batches: int) -> tuple[HeldMoments, ...]:
    """The fullest moments of each stage of a pipeline whose passes run in a named order."""
    fewer = fewer_micro_batches(order, num_stages, micro_batches)
    passes = passes_of(named_order(order, num_stages, fewer))
    return tuple(HeldMoments.of(own, stage) for stage, own in enumerate(passes))


def in_flight_of_plan(plan: Plan) -> Sequence[float]:
    """The micro-batches whose activations each stage holds at once, at most.

    A chunk of a micro-batch counts as its share of the stage's blocks.
    """
    stages, micro_batches = plan.num_stages, plan.micro_batches
    if plan.order == DEFAULT_ORDER:
        return [in_flight(stage, stages, micro_batches) for stage in range(stages)]
    moments = moments_of_plan(plan)
    return [one.most_held(stage.layers) for one, stage in zip(moments, plan.stages, strict=True)]


def moments_of_plan(plan: Plan) -> tuple[HeldMoments, ...]:
    """The fullest moments of each stage of a plan."""
    if plan.order in ORDERS:
        check_order(plan)
        return moments_in(plan.order, plan.num_stages, plan.micro_batches)
    return tuple(HeldMoments.of(own, stage) for stage, own in enumerate(passes_of_plan(plan)))


def _fullest(moments: Sequence[tuple[int, ...]]) -> Ints:
    """The Pareto frontier of moments, those with the largest sums first."""
    left = np.array(sorted(moments, key=sum, reverse=True))
    fullest = []
    while len(left):
        fullest.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(fullest)
