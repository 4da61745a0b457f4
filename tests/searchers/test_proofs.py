"""Bounds over boxes of ratios: nothing inside a box undercuts them, and searches end at the best
plan."""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from numpy.typing import NDArray

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.job.search import FEWEST_ALIKE, Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import OFFLOADS
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch, StageCosts
from searchers.exact.box_costs import Boxes
from searchers.exact.box_menus import runs_of
from searchers.exact.groups import Group
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.proof import proven_s
from searchers.registry import SEARCHERS
from searchers.savings import why_empty
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import short_of_memory, small_problem
from tests.searchers.test_exact import SEEDS, every_prediction, predictor_of
from tests.searchers.test_near_exact import ROWS, problem_of
from tests.sweep import sweep

HARDWARE = ("l4-24gb", "a100-40gb", "h100-80gb")
OFFLOADING = [name for name, engine in ENGINES.items() if engine.offloads]
WITH_HOST = [name for name, engine in ENGINES.items() if engine.host is not None]


def parts_that_matter(costs: StageCosts) -> dict[str, NDArray[np.float64]]:
    """The parts of stages' times of which none makes a pipeline faster by being longer."""
    s = costs.seconds
    first = s.through_forward_s + s.within_forward_s
    last = s.through_backward_s + s.within_backward_s
    ended_s = np.maximum(s.delta_backward_s - s.within_backward_s, 0)
    return {
        "through forward": s.through_forward_s,
        "through backward": s.through_backward_s,
        "forward": s.forward_s,
        "backward": s.backward_s,
        "first": first,
        "last": last,
        "all of last backward": s.backward_s + s.within_backward_s,
        "with its end": s.backward_s + np.maximum(s.delta_backward_s, s.within_backward_s),
        "begun": np.maximum(first, s.forward_s + s.delta_forward_s),
        "sends": s.point_to_point_s,
        "first send": s.point_to_point_s / 2 + s.first_send_late_s,
        "last sends": s.point_to_point_s + s.end_send_late_s + s.end_return_late_s,
        "first and last": s.point_to_point_s
        + (s.first_send_late_s + s.end_send_late_s + s.end_return_late_s),
        "last send": s.point_to_point_s / 2 + s.end_send_late_s,
        "last return": s.point_to_point_s / 2 + s.end_return_late_s,
        "rounds": s.within_round_s,
        "sends of rounds": s.round_late_s,
        "in a queue": s.queued_late_s,
        "with what is left": s.through_backward_s + s.left_backward_s,
        "ended with it": last + s.left_backward_s + ended_s,
        "without what is left": s.backward_s - s.left_backward_s,
        "last without it": s.backward_s - s.left_backward_s + s.within_backward_s,
        "held forward": s.held_forward_s,
        "forward without it": s.forward_s - s.held_forward_s,
        "held backward": s.held_backward_s,
        "issued forward": s.issued_forward_s,
        "issued backward": s.issued_backward_s,
        "forward after its issue": s.issued_forward_s + s.issued_forward_late_s,
        "backward after its issue": s.issued_backward_s + s.issued_backward_late_s,
        "end after its issue": s.issued_backward_s + s.issued_end_s,
        "host": costs.host_bytes,
    }


def undercut(bounds: StageCosts, costs: StageCosts) -> Iterator[str]:
    """The parts of stages' times that are below their bounds."""
    parts = parts_that_matter(costs)
    for name, bound in parts_that_matter(bounds).items():
        if (bound > parts[name] * (1 + 1e-9) + 1e-12).any():
            yield name


def corners(seed: int, rows: int) -> tuple[StageBatch, StageBatch]:
    """Random stages, and the same with larger positive ratios."""
    draw = np.random.default_rng(seed)
    layers = draw.integers(1, 9, rows)
    least = {name: draw.choice([0, 0, 1, 2, 4, 8], rows) / 8 for name in OFFLOADS}
    more = {name: np.minimum(1, r + draw.integers(0, 5, rows) / 8) for name, r in least.items()}
    alike = {
        "layers": layers,
        "checkpointed_layers": draw.integers(0, layers + 1),
        "data_parallel": 2 ** draw.integers(0, 3, rows),
        "tensor_parallel": 2 ** draw.integers(0, 3, rows),
        "micro_batch": draw.integers(1, 4, rows),
        "zero": draw.integers(0, 4, rows),
        "in_flight": draw.integers(1, 5, rows),
        "has_embedding": draw.integers(0, 2, rows),
        "has_head": draw.integers(0, 2, rows),
        "first_rank": np.zeros(rows, dtype=int),
    }
    most = {name: np.where(least[name] > 0, ratios, 0.0) for name, ratios in more.items()}
    return StageBatch(**alike, **least), StageBatch(**alike, **most)


@pytest.mark.parametrize("engine", OFFLOADING)
@pytest.mark.parametrize("hardware", HARDWARE)
def test_no_stage_inside_a_box_undercuts_its_bounds(hardware: str, engine: str) -> None:
    seed = HARDWARE.index(hardware)
    workload = Workload(
        model=catalog.model(("gpt3-2.7b", "llama-7b", "falcon-7b")[seed % 3]),
        sequence_length=2048,
        global_batch=64,
        attention="flash",
        precision="fp16",
    )
    nodes, gpus = ((1, 8), (4, 4))[seed % 2]
    predictor = SymbolicPredictor(
        workload=workload,
        cluster=Cluster(hardware=catalog.hardware(hardware), nodes=nodes, gpus_per_node=gpus),
    )
    least, most = corners(seed, 300)
    bounds = predictor.stage_bounds(least, most, engine=engine)
    assert bounds is not None
    true, smallest = (predictor.stage_costs(end, engine=engine) for end in (most, least))
    assert not [*undercut(bounds, true), *undercut(bounds, smallest)]
    assert (true.peak_reserved_bytes <= smallest.peak_reserved_bytes * (1 + 1e-12)).all()
    near = bounds.seconds.stable_s / smallest.seconds.stable_s
    assert (near <= 1 + 1e-9).all()
    # What leaves a layer may do so in the next two slots, also after the pass, which bounds of so
    # few layers do not count; of more layers they are nearer.
    leaves = (least.offload_activations > 0) | (least.offload_gradients > 0)
    assert near[~leaves].mean() > 0.995
    assert near[leaves].mean() > 0.9
    least, most = (
        stages.with_columns(
            layers=stages.layers + 16, checkpointed_layers=stages.checkpointed_layers + 8
        )
        for stages in corners(seed + 7, 600)
    )
    of_many = predictor.stage_bounds(least, most, engine=engine)
    assert of_many is not None
    leaves = (least.offload_activations > 0) | (least.offload_gradients > 0)
    true, smallest = (predictor.stage_costs(end, engine=engine) for end in (most, least))
    assert not [*undercut(of_many, true), *undercut(of_many, smallest)]
    near = of_many.seconds.stable_s / smallest.seconds.stable_s
    assert near[leaves].mean() > 0.955
    # Where sends are late, they are nearly as late for bounds.
    late = smallest.seconds.point_to_point_s > 0
    sends = of_many.seconds.point_to_point_s[late] / smallest.seconds.point_to_point_s[late]
    assert not late.any() or sends.mean() > 0.95
    # Without sends the bounds are times of the corner itself, but for the lowered factors.
    ends = {"has_embedding": np.ones(len(least), int), "has_head": np.ones(len(least), int)}
    least, most = (one.with_columns(**ends) for one in (least, most))
    bounds = predictor.stage_bounds(least, most, engine=engine)
    assert bounds is not None
    smallest = predictor.stage_costs(least, engine=engine)
    assert (bounds.seconds.stable_s / smallest.seconds.stable_s)[~leaves].mean() > 0.99


@pytest.mark.parametrize("engine", OFFLOADING)
@pytest.mark.parametrize(("hardware", "shape"), [("l4-24gb", "1x8"), ("v100-16gb", "4x8")])
def test_no_number_of_recomputed_blocks_between_two_undercuts_their_bounds(
    engine: str, hardware: str, shape: str
) -> None:
    problem = problem_of("gpt3-7b", "4", hardware, shape, "64", "1024", "flash", "-")
    predictor, draw, rows = predictor_of(problem), np.random.default_rng(3), 300
    least, most = corners(5, rows)
    layers = draw.integers(4, 20, rows)
    fewest, some, many = np.sort(draw.integers(FEWEST_ALIKE, layers, (3, rows)), axis=0)
    low, high = (
        batch.with_columns(layers=layers, checkpointed_layers=recomputed)
        for batch, recomputed in ((least, fewest), (most, many))
    )
    bounds = predictor.stage_bounds(low, high, engine=engine)
    assert bounds is not None
    for batch in (low, high):
        inside = batch.with_columns(checkpointed_layers=some)
        true = predictor.stage_costs(inside, engine=engine)
        assert not [*undercut(bounds, true)]
        # The fewest that fit are found by halving, so memory must not grow with their number.
        one = predictor.stage_costs(batch.with_columns(checkpointed_layers=1), engine=engine)
        assert (true.peak_reserved_bytes <= one.peak_reserved_bytes * (1 + 1e-12)).all()
        more = predictor.stage_costs(batch.with_columns(checkpointed_layers=many), engine=engine)
        assert (more.peak_reserved_bytes <= true.peak_reserved_bytes * (1 + 1e-12)).all()


@pytest.mark.parametrize("layers", range(1, 9))
def test_runs_of_recomputed_blocks_have_every_number_once(layers: int) -> None:
    counts, most = runs_of(space_of("mist"), layers)
    runs = zip(counts[:, 0].tolist(), most.tolist(), strict=True)
    assert sorted(n for a, b in runs for n in range(a, b + 1)) == [*range(layers + 1)]
    assert len(counts) == min(layers + 1, 4)


@pytest.mark.parametrize("engine", WITH_HOST)
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_no_stage_whose_host_issues_its_passes_undercuts_its_bounds(
    engine: str, model: str
) -> None:
    rows, draw = 300, np.random.default_rng(7)
    workload = Workload(
        model=catalog.model(model),
        sequence_length=1024,
        global_batch=64,
        attention="flash",
        precision="bf16",
    )
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=4, gpus_per_node=8)
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    layers = draw.integers(4, 20, rows)
    fewest, some, many = np.sort(draw.integers(FEWEST_ALIKE, layers, (3, rows)), axis=0)
    bare = corners(5, rows)[0].with_columns(
        layers=layers, **dict.fromkeys(OFFLOADS, np.zeros(rows))
    )
    low, inside, high = (
        bare.with_columns(checkpointed_layers=count) for count in (fewest, some, many)
    )
    bounds = predictor.stage_bounds(low, high, engine=engine)
    assert bounds is not None
    assert not [*undercut(bounds, predictor.stage_costs(inside, engine=engine))]
    host = ENGINES[engine].host
    assert host is not None
    # The bounds are times of the end with fewest blocks, unless hosts wait for messages: passes
    # then share what their host takes by their lengths, which differ between the ends.
    if host.waits_for_sends:
        return
    near = bounds.seconds.stable_s / predictor.stage_costs(low, engine=engine).seconds.stable_s
    assert np.allclose(near, 1, rtol=1e-9, atol=0)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_boxes_and_their_halves_have_every_way_once(times: int) -> None:
    eighths = tuple(place / 8 for place in range(9))
    whole = Boxes.whole(((1.0, 2.0), (0.0,), (0.0, 0.5, 1.0), eighths, (0.25, 1.0)))
    expected = {
        (level, 0, w, o, a)
        for level in range(2)
        for w in range(3)
        for o in range(9)
        for a in range(2)
    }
    boxes = whole
    while True:
        inside = [
            tuple(int(place) for place in places)
            for low, high in zip(boxes.low, boxes.high, strict=True)
            for places in np.stack(
                np.meshgrid(*(np.arange(a, b + 1) for a, b in zip(low, high, strict=True))), -1
            ).reshape(-1, 5)
        ]
        assert len(inside) == len(expected)
        assert {*inside} == expected
        if boxes.are_points.all():
            break
        boxes, origin = boxes.halved(times)
        assert len(boxes) == len(origin)


def proven(
    problem: Problem, space: SearchSpace, predictor: SymbolicPredictor
) -> tuple[float, Ledger]:
    """The bound of a whole space and the ledger, from nothing but boxes."""
    ledger = Ledger(predictor=predictor, budget=Budget(seconds=1000), clock=perf_counter)
    hierarchy = Hierarchy.of(problem, space, ledger)
    bounds: dict[Group, float] = {**hierarchy.least_s}
    seconds = proven_s(problem, space, ledger, hierarchy.work, bounds, tolerance=0.0, seconds=1000)
    return seconds, ledger


@pytest.mark.parametrize("is_short", [False, True], ids=["roomy", "short of memory"])
@pytest.mark.parametrize("seed", sweep(SEEDS, first=2))
def test_boxes_alone_lead_to_the_best_of_all_plans(seed: int, is_short: bool) -> None:
    problem, space = small_problem(seed)
    predictions = every_prediction(problem, space, predictor_of(problem))
    if is_short:
        problem = short_of_memory(problem, predictions)
        predictions = every_prediction(problem, space, predictor_of(problem))
    best_s = min(one.iteration_s for one in predictions if one.fits)
    bound_s, ledger = proven(problem, space, predictor_of(problem))
    assert ledger.best_s == pytest.approx(best_s, rel=1e-9)
    assert bound_s == pytest.approx(best_s, rel=1e-9)


# Problems of space ``mist``, with nine choices of each ratio.
MANY = [row for row in ROWS if row[1] == "mist"]
QUICKEST = next(row for row in MANY if row[2:4] == ["gpt3-7b", "4"])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row[1:], id=" ".join(row[2:]), marks=[pytest.mark.slow] * (row != QUICKEST))
        for row in MANY
    ],
)
def test_boxes_alone_lead_to_the_plan_that_is_proven_by_trying_all(row: list[str]) -> None:
    problem, space = problem_of(*row[1:]), space_of(row[0])
    predictor = predictor_of(problem)
    exact = StrategySearcher(strategy=SEARCHERS["exact"], predictor=predictor).search(
        problem, space, Budget(seconds=1000), 0
    )
    assert exact.prediction is not None
    bound_s, ledger = proven(problem, space, predictor)
    assert ledger.best_s == pytest.approx(exact.prediction.iteration_s, rel=1e-9)
    assert bound_s == pytest.approx(exact.prediction.iteration_s, rel=1e-9)


class TooHigh(SymbolicPredictor):
    """A predictor with a planted fault: the times of its bounds are those of boxes that recompute a
    block more."""

    def stage_bounds(
        self, least: StageBatch, most: StageBatch, *, engine: str = "mistlab"
    ) -> StageCosts | None:
        bounds = super().stage_bounds(least, most, engine=engine)
        more = super().stage_bounds(one_more(least), one_more(most), engine=engine)
        assert bounds is not None
        assert more is not None
        return replace(bounds, seconds=more.seconds)


def one_more(batch: StageBatch) -> StageBatch:
    """The same stages with one recomputed block more, if they have one."""
    recomputed = np.minimum(batch.value("checkpointed_layers") + 1, batch.value("layers"))
    return batch.with_columns(checkpointed_layers=recomputed)


def test_a_fault_in_a_bound_is_noticed() -> None:
    """With too high a bound, a worse plan is taken for the best: the tests above can fail."""
    problem, space = problem_of(*QUICKEST[2:]), space_of("mist")
    bound_s, ledger = proven(problem, space, predictor_of(problem))
    wrong = TooHigh(workload=problem.workload, cluster=problem.cluster)
    wrong_s, misled = proven(problem, space, wrong)
    assert wrong_s > bound_s * 1.001
    assert misled.best_s > ledger.best_s * 1.001


def test_a_space_without_a_plan_that_fits_is_infeasible() -> None:
    problem, space = small_problem(SEEDS[0])
    tight = replace(problem, cluster=replace(problem.cluster, memory_gib=0.8))
    bound_s, ledger = proven(tight, space, predictor_of(tight))
    assert ledger.best is None
    assert bound_s == np.inf


def test_a_proof_that_is_stopped_still_says_how_good_the_plan_is() -> None:
    problem, space = problem_of(*QUICKEST[2:]), space_of("mist")
    exact_s, _ = proven(problem, space, predictor_of(problem))
    ledger = Ledger(
        predictor=predictor_of(problem), budget=Budget(seconds=1000), clock=perf_counter
    )
    hierarchy = Hierarchy.of(problem, space, ledger)
    bound_s = proven_s(
        problem, space, ledger, hierarchy.work, hierarchy.least_s, tolerance=0.2, seconds=1000
    )
    assert bound_s <= exact_s <= ledger.best_s
    assert bound_s >= 0.8 * ledger.best_s


def test_a_search_that_is_stopped_in_its_first_look_says_its_gap() -> None:
    problem, space = small_problem(SEEDS[1])
    space = replace(space, unequal_meshes=True)
    with_plan: list[Ledger] = []
    ledger = Ledger(
        predictor=predictor_of(problem),
        budget=Budget(seconds=40),
        # Time is up as soon as there is a plan.
        clock=lambda: 100.0 * bool(with_plan),
        listener=lambda ledger: with_plan.extend([ledger] * (ledger.best is not None)),
    )
    ending = Hierarchy.of(problem, space, ledger).proven(tolerance=0.0, seconds=60.0)
    assert ending.status == "FEASIBLE"
    assert ending.lower_bound_s is not None
    assert 0 < ending.lower_bound_s < ledger.best_s


def test_a_large_cluster_with_meshes_of_any_sizes_is_known_to_have_a_pipeline_at_once() -> None:
    """Trying meshes one after another ends in many dead ends: one GPU for each of all blocks."""
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=64, gpus_per_node=8)
    model = catalog.model("llama3-405b")
    work = Workload(
        model=model, sequence_length=8192, global_batch=64, attention="flash", precision="bf16"
    )
    assert not why_empty(Problem(workload=work, cluster=cluster), space_of("everything"))
    # No stage can have three GPUs, so none of the 10 can be left over.
    odd = replace(space_of("everything"), data_parallel=(3,), tensor_parallel=(1,))
    assert why_empty(Problem(workload=replace(work, global_batch=96), cluster=cluster), odd)
