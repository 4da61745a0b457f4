"""Ladders from one plan to another: every rung changes one choice, and what it costs adds up."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from experiments.studies.ladder import STAGES, Rung, choices_of, ladder, plan_with
from mistlab import catalog
from mistlab.cost.pipeline import Terms
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

PROBLEM = Problem(
    workload=workload_of("gpt3-2.7b", 4096, 8),
    cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4),
)
# Two stages of two tensor-parallel ranks, with all in memory.
BARE = Plan(
    micro_batches=8,
    stages=(StagePlan(layers=16, data_parallel=1, tensor_parallel=2, micro_batch=1),) * 2,
)
# Four replicas that save memory in three ways.
SAVING = Plan(
    micro_batches=1,
    stages=(
        StagePlan(
            layers=32,
            data_parallel=4,
            tensor_parallel=1,
            micro_batch=2,
            zero=2,
            checkpointed_layers=22,
            offload=Offload(weights=0.625, gradients=0.875),
        ),
    ),
)


@pytest.fixture(scope="module")
def rungs() -> list[Rung]:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    return ladder(PROBLEM, BARE, SAVING, predictor.predict_many)


def test_a_ladder_leads_from_the_first_plan_to_the_last(rungs: list[Rung]) -> None:
    assert (rungs[0].plan, rungs[-1].plan) == (BARE, SAVING)
    for before, after in pairwise(rungs):
        old, new = choices_of(before.plan), choices_of(after.plan)
        assert [name for name in old if old[name] != new[name]] == [after.changed]
        assert new[after.changed] == choices_of(SAVING)[after.changed]
    changed = [rung.changed for rung in rungs[1:]]
    assert len(changed) == len(set(changed)) == 7


def test_terms_add_up_to_the_difference_of_predictions(rungs: list[Rung]) -> None:
    names = [entry.name for entry in fields(Terms)]
    for before, after in pairwise(rungs):
        longer_s = after.prediction.iteration_s - before.prediction.iteration_s
        assert sum(getattr(after.terms, name) for name in names) == pytest.approx(longer_s)
    gained = rungs[-1].prediction.iteration_s - rungs[0].prediction.iteration_s
    assert gained < -1
    assert sum(getattr(rung.terms, name) for rung in rungs for name in names) == pytest.approx(
        gained
    )


def test_savings_free_memory_before_it_is_spent(rungs: list[Rung]) -> None:
    assert all(rung.prediction.fits for rung in rungs)
    assert all(rung.freed_bytes >= 0 for rung in rungs if rung.is_saving)
    # Nothing spends memory before something was saved, and something that was saved bought it.
    spent = [rung for rung in rungs[1:] if not rung.is_saving]
    assert rungs[1].is_saving
    assert {rung.changed for rung in spent} == {"tensor_parallel", "micro_batch", STAGES}
    bought = {words.split(" 2 ")[0].split(" 1 ")[0] for rung in rungs for words in rung.bought}
    assert bought == {"tensor parallel", "stages", "micro batch"}
    assert sum(rung.freed_bytes for rung in rungs) == (
        rungs[0].prediction.peak_reserved_bytes - rungs[-1].prediction.peak_reserved_bytes
    )


def test_words_say_what_a_rung_changes(rungs: list[Rung]) -> None:
    words = {rung.changed: rung.words for rung in rungs}
    assert words["zero"] == "ZeRO-0 to ZeRO-2"
    assert words["offload_weights"] == "weights offloaded 0.0% to 62.5%"
    assert words[STAGES] == "stages 2 to 1"
    assert words["micro_batch"] == "micro batch 1 to 2"


def test_choices_that_do_not_divide_have_no_plan() -> None:
    choices = choices_of(BARE)
    assert plan_with(PROBLEM, BARE, choices) == BARE
    for change in ({STAGES: 3}, {"tensor_parallel": 8}, {"micro_batch": 3}, {STAGES: 64}):
        assert plan_with(PROBLEM, BARE, {**choices, **change}) is None


def test_what_no_single_choice_reaches_is_changed_at_once() -> None:
    # Five stages divide four GPUs in no way; two nodes would have to change at once.
    other = replace(SAVING, micro_batches=2, stages=(replace(SAVING.stages[0], micro_batch=1),))
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    unequal = replace(
        BARE,
        stages=(replace(BARE.stages[0], layers=17), replace(BARE.stages[0], layers=15)),
    )
    found = ladder(PROBLEM, other, unequal, predictor.predict_many)
    assert found[-1].plan == unequal
    assert found[-1].changed == "rest"
