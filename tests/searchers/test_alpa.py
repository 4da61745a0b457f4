"""The programme finds what trying every division finds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.stages.stage_batch import StageBatch
from searchers.meshes import layer_counts, pipelines
from searchers.methods.alpa import SPACING, alpa
from searchers.savings import bare_stage
from searchers.strategy import Ledger
from tests.searchers.problems import SMALL, Counting, predictor_of

FOUR = replace(SMALL, cluster=replace(SMALL.cluster, gpus_per_node=4))


class Remembering(Counting):
    """Keeps the plans that it is asked for."""

    asked: list[Plan]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        self.asked = [*getattr(self, "asked", []), *plans]
        return Counting.predict_many(self, plans)


def every_plan(problem: Problem, space_name: str) -> Iterator[Plan]:
    space, layers = space_of(space_name), problem.workload.model.layers
    for pipeline in pipelines(problem, space):
        counts = layer_counts(layers, pipeline.num_stages, space)
        for own in product(counts, repeat=pipeline.num_stages):
            if sum(own) != layers:
                continue
            for again in product((False, True), repeat=pipeline.num_stages):
                yield Plan(
                    engine=space.engine,
                    micro_batches=pipeline.micro_batches,
                    stages=tuple(
                        replace(bare_stage(mesh, n, space), checkpointed_layers=n * recomputes)
                        for mesh, n, recomputes in zip(pipeline.meshes, own, again, strict=True)
                    ),
                )


def least_objective_s(problem: Problem, plans: Sequence[Plan]) -> float:
    """The least sum over stages and G - 1 times the slowest, of plans whose stages all fit."""
    engine = plans[0].engine
    costs = predictor_of(problem).stage_costs(StageBatch.of_plans(plans), engine=engine)
    seconds = costs.seconds
    once = np.maximum(seconds.delta_forward_s, 0) + np.maximum(seconds.delta_backward_s, 0)
    least, first = float("inf"), 0
    for plan in plans:
        of_plan = slice(first, first := first + plan.num_stages)
        times = seconds.stable_s[of_plan] + once[of_plan] / plan.micro_batches
        times[:-1] += seconds.point_to_point_s[of_plan][:-1]
        if costs.fits[of_plan].all():
            least = min(least, float(times.sum() + (plan.micro_batches - 1) * times.max()))
    return least


@pytest.mark.parametrize("space", ["alpa", "mist"])
@pytest.mark.parametrize("memory_gib", [1.2, 1.4, 4.0])
def test_no_division_is_better_than_the_programme_s(space: str, memory_gib: float) -> None:
    problem = replace(FOUR, cluster=replace(FOUR.cluster, memory_gib=memory_gib))
    predictor = Remembering(predictor_of(problem))
    ledger = Ledger(predictor=predictor, budget=Budget(evaluations=999), clock=lambda: 0.0)
    alpa(problem, space_of(space), ledger, np.random.default_rng(0))
    best = least_objective_s(problem, list(every_plan(problem, space)))
    assert best < float("inf")
    assert best <= least_objective_s(problem, predictor.asked) <= best * SPACING
