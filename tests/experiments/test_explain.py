"""Why a plan won, what is next to it, and the least that any plan needs."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.bench.bench import Bench, Entry, Point, front_of
from experiments.tuning.explain import explain, neighbours
from experiments.tuning.search_words import why_words
from experiments.tuning.smallest import nearest, smallest
from mistlab import catalog
from mistlab.cost.memory import room_bytes
from mistlab.cost.pipeline import Terms
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from searchers.savings import Chooser, chosen_plan

BUDGET = Budget(evaluations=64)


@pytest.fixture(scope="module")
def bench(small_problem: Problem) -> Bench:
    """A GPU that is too small for most plans."""
    return Bench.of(replace(small_problem, cluster=replace(small_problem.cluster, memory_gib=5)))


def found(bench: Bench, space: SearchSpace) -> Entry:
    entry = bench.search("random", space, BUDGET, 0, lambda _: None)
    assert entry.answer is not None
    return bench.played(entry)


def drawn(bench: Bench, space: SearchSpace, plans: int) -> list[Plan]:
    draw = np.random.default_rng(0)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    chosen = [chosen_plan(bench.problem, space, chooser) for _ in range(plans)]
    return [plan for plan in chosen if plan is not None]


def test_a_front_has_no_point_that_another_beats() -> None:
    draw = np.random.default_rng(0)
    points = [
        Point(iteration_s=float(seconds), memory_bytes=int(size))
        for seconds, size in draw.integers(1, 20, (200, 2))
    ]
    front = front_of(points)
    for point in points:
        better = [
            other
            for other in front
            if other.iteration_s <= point.iteration_s and other.memory_bytes <= point.memory_bytes
        ]
        assert better
        assert point not in front or better == [point]


@pytest.mark.parametrize("name", ["3d", "mist", "megatron"])
def test_neighbours_save_less_and_are_of_the_space(bench: Bench, name: str) -> None:
    space = space_of(name)
    for plan in drawn(bench, space, 8):
        for neighbour in neighbours(plan, bench.problem, space):
            assert bench.job(neighbour.plan)
            assert neighbour.plan != plan
            for stage, other in zip(plan.stages, neighbour.plan.stages, strict=True):
                assert other.zero <= stage.zero
                assert other.checkpointed_layers <= stage.checkpointed_layers
                assert other.offload.optimizer <= stage.offload.optimizer
            if space.recomputation == "none_or_all":
                assert all(s.checkpointed_layers in {0, s.layers} for s in neighbour.plan.stages)


def test_terms_add_up_to_the_iteration(bench: Bench) -> None:
    for plan in drawn(bench, space_of("mist"), 16):
        prediction = bench.predictor.predict(plan)
        terms = Terms.of(plan, prediction)
        parts = (terms.computation_s, terms.exposed_communication_s)
        whole = sum(parts) + terms.other_stages_s + terms.rest_s
        assert whole == pytest.approx(prediction.iteration_s)


def test_the_rejected_plan_is_faster_and_lacks_what_is_said(bench: Bench) -> None:
    space = space_of("3d")
    entry = found(bench, space)
    assert entry.answer is not None
    plan, prediction = entry.answer
    why = explain(entry, [entry], bench)
    assert why.rejected is not None
    (neighbour,) = [
        one.plan
        for one in neighbours(plan, bench.problem, space)
        if one.change == why.rejected.change
    ]
    other = bench.predictor.predict(neighbour)
    assert not other.fits
    assert prediction.iteration_s - other.iteration_s == why.rejected.faster_by_s > 0
    over = other.peak_reserved_bytes - bench.room_bytes(neighbour)[0]
    assert why.rejected.over_bytes == pytest.approx(over, abs=1)
    assert any(stage.limit == "memory" for stage in why.stages)
    assert any("does not fit" in line for line in why_words(why))


def test_the_runner_up_is_another_plan_of_the_same_space(bench: Bench) -> None:
    best = found(bench, space_of("mist"))
    other = bench.search("random", best.space, BUDGET, 1, lambda _: None)
    if other.result.prediction is not None and other.result.prediction.iteration_s < (
        best.result.prediction.iteration_s if best.result.prediction else 0
    ):
        best, other = other, best
    elsewhere = found(bench, space_of("megatron"))
    same = replace(best, searcher="same")
    why = explain(best, [best, replace(other, searcher="other"), same, elsewhere], bench)
    assert why.same == ("same",)
    assert why.runner_up is not None
    assert why.runner_up.searcher == "other"
    assert why.runner_up.comparison.ratio > 1


def test_no_plan_needs_less_than_the_smallest(bench: Bench) -> None:
    tight = Bench.of(
        replace(
            bench.problem,
            cluster=replace(bench.problem.cluster, memory_gib=0.9, host_memory_gib=0.5),
        )
    )
    space = space_of("mist")
    least = smallest(tight, space)
    assert not least.prediction.fits

    def fullness(memory_bytes: float, host_bytes: float) -> float:
        room, host = room_bytes(tight.problem.cluster), tight.problem.cluster.host_memory_bytes
        return max(memory_bytes / room, host_bytes / host)

    at_least = fullness(least.prediction.peak_reserved_bytes, least.host_bytes)
    for prediction in tight.predictor.predict_many(drawn(tight, space, 200)):
        host = max(stage.host_bytes for stage in prediction.stages)
        assert fullness(prediction.peak_reserved_bytes, host) >= 0.999 * at_least


def test_a_plan_whose_experts_are_divided_comes_nearest() -> None:
    """DeepSeek-V3 fits on 512 H100 with expert parallelism, and not without."""
    workload = Workload(
        model=catalog.model("deepseek-v3"),
        sequence_length=4096,
        global_batch=2048,
        attention="flash",
        precision="bf16",
    )
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=64, gpus_per_node=8)
    bench = Bench.of(Problem(workload=workload, cluster=cluster))
    assert nearest(bench, space_of("moe")).prediction.fits
    alone = replace(space_of("moe"), expert_parallel=(1,))
    assert not nearest(bench, alone).prediction.fits
