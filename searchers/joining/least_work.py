"""The least time of stages for one micro-batch, however a plan saves memory.

A stage that recomputes, shards and offloads nothing only computes, and no slot is shorter than its
computation. A stage with the embedding and the head also sends nothing; sends slow the passes
beside them, and those of a few blocks more than those of many. Of dimensions that change passes
themselves all values are tried: some may make computation faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mistlab.values.dimensions import DIMENSIONS, names_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.stages import StageBatch
from searchers.ledger import Ledger
from searchers.meshes import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The least seconds of a micro-batch on a mesh: in a block, and in the embedding and head."""

    block_s: float
    ends_s: float

    def blocks_within(self, seconds: float, layers: int) -> int:
        """The most blocks, up to ``layers``, of a stage that takes less than some seconds."""
        if layers * self.block_s < seconds:
            return layers
        if self.block_s == math.inf:
            return 0
        return max(0, math.ceil(seconds / self.block_s) - 1)


def work_of(
    problem: Problem, space: SearchSpace, ledger: Ledger, meshes: Sequence[Mesh]
) -> dict[Mesh, LeastWork]:
    """The least work on each mesh, in the fastest of unlike groups of nodes, from stages that have
    both ends and one block or two."""
    found = [
        _work_from(ranks.start, space, ledger, meshes) for ranks in problem.cluster.ranks_of_groups
    ]
    return {
        mesh: LeastWork(
            block_s=min(of_group[mesh].block_s for of_group in found),
            ends_s=min(of_group[mesh].ends_s for of_group in found),
        )
        for mesh in meshes
    }


def _work_from(
    first_rank: int, space: SearchSpace, ledger: Ledger, meshes: Sequence[Mesh]
) -> dict[Mesh, LeastWork]:
    """The least work on each mesh of the group of nodes at a rank."""
    names = [name for name in names_of("savings") if DIMENSIONS[name].changes_passes]
    ways = [
        dict(zip(names, values, strict=True))
        for values in product(*(space.listed(name) or () for name in names))
    ]
    layers = np.repeat([1, 2], len(meshes))
    columns = {name: np.tile([mesh.value(name) for mesh in meshes], 2) for name in names_of("mesh")}
    batches = [
        StageBatch(
            layers=layers,
            **columns,
            **way,
            has_embedding=1,
            has_head=1,
            first_rank=first_rank,
        )
        for way in ways
    ]
    costs = ledger.stage_costs(StageBatch.joined(batches), engine=space.engine)
    # Hosts may be ahead, so that a micro-batch passes through as fast as GPUs compute.
    both_s = costs.seconds.forward_s + costs.seconds.backward_s
    stable_s = both_s.reshape(len(ways), -1).min(axis=0)
    one_s, two_s = stable_s.reshape(2, -1)
    block_s = two_s - one_s
    return {
        mesh: LeastWork(block_s=float(block), ends_s=max(0.0, float(ends)))
        for mesh, block, ends in zip(meshes, block_s, one_s - block_s, strict=True)
    }
