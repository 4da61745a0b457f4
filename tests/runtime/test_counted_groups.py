"""Predictions count the groups that ranks make."""

import pytest

pytest.importorskip("torch")

from mistlab.cost.memory import communicators
from mistlab.plan.plan import StagePlan
from mistlab.stages.stage_batch import StageBatch
from runtime.comm.topology import Topology
from tests.runtime.drawn_runs import drawn_run

# Stages in chunks have further neighbours.
IN_CHUNKS = ("interleaved-2", "zb-v")
RUNS = {seed: run for seed in range(80) if (run := drawn_run(seed)).plan.order not in IN_CHUNKS}


def made(topology: Topology, rank: int) -> int:
    """The groups of more than one rank that a rank is in."""
    return sum(rank in ranks and len(ranks) > 1 for _, ranks in topology.groups())


def divides_experts(stage: StagePlan) -> bool:
    return stage.expert_parallel * stage.expert_tensor_parallel > 1


@pytest.mark.parametrize("seed", RUNS)
def test_as_many_groups_are_counted_as_a_rank_makes(seed: int) -> None:
    run = RUNS[seed]
    model = run.work.model
    experts = model.experts is not None
    topology = Topology(plan=run.plan, tied=model.head_has_table, experts=experts)
    counted = communicators(StageBatch.of_plan(run.plan))
    for stage, own in enumerate(run.plan.stages):
        of_rank = max(made(topology, rank) for rank in topology.ranks(stage))
        # The ends of a pipeline count though they share no table, or are all ranks; groups to
        # reduce and to gather experts that every rank has whole do not.
        whole = 2 if experts and not divides_experts(own) else 0
        assert of_rank - whole <= counted[stage] <= of_rank + 1
