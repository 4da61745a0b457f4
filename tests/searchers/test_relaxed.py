"""Bounds of pipelines whose stages may be fractions: no plan undercuts them."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.arrays import Floats
from mistlab.cost.chains import ISSUED
from mistlab.cost.order_path import least_sends_of
from mistlab.cost.pipeline import no_stages, prepended
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.stages.stage_batch import StageBatch, StageTimes
from searchers.exact import relaxed
from searchers.exact.box_menus import BoxMenus
from searchers.exact.groups import Group
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.partials import Partials
from searchers.exact.relaxed import Columns, Prices, Relaxed
from searchers.meshes import mesh_of
from searchers.methods.exhaustive import all_plans
from searchers.strategy import Ledger
from tests.searchers.drawn import drawn_problem
from tests.searchers.test_every_plan import ENOUGH, predictor_of
from tests.sweep import sweep
from tests.workloads import workload_of

# Problems of spaces whose stages are of any sizes, with many plans of several stages.
SEEDS = (5, 185, 142, 372, 178, 196, 239)
TELLING = 5
# How many plans' partial pipelines are looked at.
FEW = 40
# Times of a stage beside its passes.
EXTRAS = (
    *("delta_forward_s", "delta_backward_s"),
    *("within_forward_s", "within_backward_s", "after_first_s", "point_to_point_s"),
    *(
        "first_send_late_s",
        "end_send_late_s",
        "end_return_late_s",
        "received_s",
        "within_round_s",
        "round_late_s",
        "queued_late_s",
        "held_forward_s",
        "held_backward_s",
        "left_backward_s",
        *ISSUED,
    ),
)
EXACT = 1e-9
# Problems from this seed on are those of the seeds before over slow links.
SLOW = 10_000


@cache
def tried(seed: int) -> tuple[Problem, SearchSpace, list[tuple[Plan, Prediction]]]:
    """A problem, its space, and its plans of several stages that fit."""
    problem, space = drawn_problem(seed % SLOW)
    if seed >= SLOW:
        problem = over_slow_links(problem, seed)
    plans = list(all_plans(problem, space))
    both = zip(plans, predictor_of(problem).predict_many(plans), strict=True)
    return problem, space, [(p, one) for p, one in both if one.fits and p.num_stages > 1]


def bounds_of(seed: int, limit_s: float) -> dict[int, Relaxed]:
    """The bounds of each group, by its number of micro-batches."""
    problem, space, _ = tried(seed)
    ledger = Ledger(predictor=predictor_of(problem), budget=ENOUGH, clock=float)
    hierarchy = Hierarchy.of(problem, space, ledger)

    def bound(group: Group) -> Relaxed:
        menus = BoxMenus(
            problem=problem, space=space, ledger=ledger, group=group, work=hierarchy.work
        )
        return Relaxed.of(menus, limit_s)

    groups = [group for group in hierarchy.least_s if group.num_stages is None]
    return {group.micro_batches: bound(group) for group in groups}


def undercut(seed: int) -> Iterator[str]:
    """What is wrong with the bounds of a problem's plans."""
    _, _, plans = tried(seed)
    limit_s = 1.5 * min(one.iteration_s for _, one in plans)
    bounds = bounds_of(seed, limit_s)
    for number, (plan, one) in enumerate(plans):
        if one.iteration_s >= limit_s * (1 - EXACT):
            continue
        bound = bounds[plan.micro_batches]
        if bound.least_s.get(plan.num_stages, inf) > one.iteration_s * (1 + EXACT):
            yield f"a pipeline takes less than {bound.least_s.get(plan.num_stages)}: {plan}"
        for after, stage in enumerate(reversed(plan.stages)):
            counts = bound.counts(after, one.iteration_s * (1 + EXACT))
            if stage.layers not in counts.get(mesh_of(stage), []):
                yield f"stage {after} from the end is left out: {plan}"
        if number % max(1, len(plans) // FEW) == 0:
            yield from (f"{what}: {plan}" for what in undercut_rest(seed, bound, plan, one))


def undercut_rest(seed: int, bound: Relaxed, plan: Plan, one: Prediction) -> Iterator[str]:
    """Partial pipelines of a plan whose rest has too high a bound."""
    problem, _, _ = tried(seed)
    costs = predictor_of(problem).stage_costs(StageBatch.of_plan(plan), engine=plan.engine)
    chains = no_stages(1)
    taken = np.zeros(2, dtype=np.intp)
    for after, stage in enumerate(reversed(range(plan.num_stages))):
        names = [entry.name for entry in fields(StageTimes)]
        times = {name: getattr(costs.seconds, name)[[stage]] for name in names}
        chains = prepended(StageTimes(**times), chains, plan.micro_batches, after + 1)
        taken += plan.stages[stage].layers, mesh_of(plan.stages[stage]).num_gpus
        if stage > 0:
            partial = replace(
                Partials.nothing(), layers=taken[:1].copy(), gpus=taken[1:].copy(), chains=chains
            )
            least_s = float(bound.rest_s(partial, after + 1)[0])
            if least_s > one.iteration_s * (1 + EXACT):
                yield f"{after + 1} stages can become a pipeline that takes less than {least_s}"


def over_slow_links(problem: Problem, seed: int) -> Problem:
    """The problem over links on which sends may take longer than passes."""
    gbytes = 0.02 * 4.0 ** (seed % 4)
    links = {"intra_node_gbytes_per_s": gbytes, "inter_node_gbytes_per_s": gbytes}
    return replace(problem, cluster=replace(problem.cluster, **links))


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_plan_undercuts_bounds_of_fractions_over_slow_links(seed: int) -> None:
    assert not list(undercut(SLOW + seed))


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_plan_undercuts_bounds_of_fractions(seed: int) -> None:
    assert tried(seed)[2]
    assert not [*undercut(seed)]


def test_other_stages_pass_beside_a_slow_first_stage() -> None:
    space = space_of("wide")
    none = {kind.name: (0.0,) for kind in fields(space.offload)}
    space = replace(space, zero=(0,), micro_batch=(8,), micro_batches=(4,))
    space = replace(space, offload=OffloadRatios(**none))
    problem = Problem(
        workload=workload_of("gpt3-2.7b", 4096, 32, "bf16", layers=5),
        cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4),
    )
    plans = [plan for plan in all_plans(problem, space) if plan.stages[0].layers == 4]
    seconds = [
        one.iteration_s if one.fits else inf for one in predictor_of(problem).predict_many(plans)
    ]
    limit_s = min(seconds) * (1 + EXACT)
    ledger = Ledger(predictor=predictor_of(problem), budget=ENOUGH, clock=float)
    hierarchy = Hierarchy.of(problem, space, ledger)
    (group,) = hierarchy.least_s
    menus = BoxMenus(problem=problem, space=space, ledger=ledger, group=group, work=hierarchy.work)
    counts = Relaxed.of(menus, limit_s).counts(1, limit_s)
    assert 4 in counts.get(mesh_of(plans[seconds.index(min(seconds))].stages[0]), [])


def test_stages_with_several_micro_batches_in_flight_send_no_sooner() -> None:
    problem = Problem(
        workload=workload_of("gpt3-2.7b", 2048, 8, "bf16"),
        cluster=Cluster(hardware=catalog.hardware("a100-40gb"), nodes=6, gpus_per_node=1),
    )
    ratios = (0.0, 0.5, 1.0)
    rows = np.array([*product((1, 2), (0, 1, 3), ratios, ratios)])
    of_counts = []
    for in_flight in (1, 2, 3):
        batch = StageBatch(
            layers=2,
            data_parallel=rows[:, 0].astype(np.int64),
            tensor_parallel=1,
            micro_batch=1,
            zero=rows[:, 1].astype(np.int64),
            offload_gradients=rows[:, 2],
            offload_activations=rows[:, 3],
            in_flight=np.full(len(rows), in_flight),
            first_rank=2,
            micro_batches=4,
        )
        of_counts.append(predictor_of(problem).stage_costs(batch).seconds)
    least_s = relaxed.least_sent_s(of_counts[0])
    for times in of_counts:
        assert (least_s <= sum(least_sends_of(times)) * (1 + EXACT)).all()
    # For some stages the sends differ by more than a tenth.
    assert (sum(least_sends_of(of_counts[0])) > sum(least_sends_of(of_counts[1])) * 1.1).any()


def at_any_end(column: Floats) -> Floats:
    """Times of stages that are the same wherever they are."""
    return np.tile(column, (3, 1))


def undercut_waits(seed: int) -> bool:
    """Whether a random pipeline takes less than its passages and its longest wait."""
    draw = np.random.default_rng(seed)
    stages, micro_batches = int(draw.integers(2, 7)), int(draw.integers(1, 12))
    forward_s, backward_s = draw.exponential(1.0, (2, stages))
    times = {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "through_forward_s": forward_s * draw.uniform(0.8, 1, stages),
        "through_backward_s": backward_s * draw.uniform(0.8, 1, stages),
        **{name: draw.exponential(0.01, stages) for name in EXTRAS},
    }
    columns = Columns(
        micro_batches=micro_batches,
        all_layers=stages,
        all_gpus=stages,
        layers=np.ones(stages, dtype=np.intp),
        gpus=np.ones(stages, dtype=np.intp),
        share_of_layers=np.full(stages, 1 / stages),
        passed_s=at_any_end(
            times["through_forward_s"] + times["within_forward_s"] + times["through_backward_s"]
        ),
        sent_s=times["point_to_point_s"],
        forward_s=at_any_end(forward_s),
        backward_s=at_any_end(backward_s),
    )
    chains = no_stages(1)
    for after in range(stages):
        own = StageTimes(**{name: column[[after]] for name, column in times.items()})
        chains = prepended(own, chains, micro_batches, after + 1)
    passed_s = columns.latencies_s(stages).diagonal().sum()
    longest_s = columns.waits_s(stages).diagonal().max()
    return bool(passed_s + longest_s > chains.whole[0] * (1 + EXACT))


def test_no_pipeline_takes_less_than_its_passages_and_its_longest_wait() -> None:
    assert not any(map(undercut_waits, range(100)))


def test_a_bound_that_forgets_passes_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_s(columns: Columns, stages: int) -> Any:
        both_s = columns.forward_s[0] + columns.backward_s[0]
        return np.tile((columns.micro_batches - 1) * both_s, (stages, 1))

    monkeypatch.setattr(Columns, "waits_s", waits_s)
    assert any(map(undercut_waits, range(100)))


def weighed_twice(made: Callable[..., Prices]) -> Any:
    """Weights that add up to two."""
    return lambda *given: made(*given).raised(2.0)


def costlier(cost_s: Callable[..., Any]) -> Any:
    """Costs of columns at positions that are larger by half."""
    return lambda self, columns: 1.5 * cost_s(self, columns)


# Planted faults: owners, names, and what takes their place.
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "weights": (Prices, "made", weighed_twice),
    "costs of columns": (Prices, "cost_s", costlier),
    "blocks of other stages": (
        relaxed,
        "_most_elsewhere",
        lambda true: lambda gpus_s, *given: true(0.2 * gpus_s, *given),
    ),
    "weights of the rest": (Prices, "weight_of", lambda true: lambda *given: 0.3 * true(*given)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_bounds_of_fractions_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted(getattr(owner, name)))
    assert any(undercut(TELLING))
