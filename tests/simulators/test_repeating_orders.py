"""Orders that repeat themselves, interleaved 1F1B and ZB-H1: cut to few micro-batches."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from mistlab.schedule import orders
from mistlab.schedule.orders import fewer_micro_batches
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=8)
STAGE = StagePlan(layers=8, data_parallel=1, tensor_parallel=2, micro_batch=1)
UNLIKE = (replace(STAGE, layers=6), replace(STAGE, layers=9, checkpointed_layers=4), STAGE, STAGE)


def work(micro_batches: int, layers: int = 31) -> Workload:
    return workload_of("gpt3-2.7b", 2048, micro_batches, "bf16", layers=layers)


def plan(order: str, micro_batches: int, engine: str = "mistlab") -> Plan:
    return Plan(engine=engine, micro_batches=micro_batches, stages=UNLIKE, order=order)


def predicted(one: Plan, kind: type = SymbolicPredictor) -> Prediction:
    found: Prediction = kind(workload=work(one.micro_batches), cluster=CLUSTER).predict(one)
    return found


@pytest.mark.parametrize(
    "order",
    [
        *("interleaved-2", "interleaved-5", "zb-h1", "zb-h2", "zb-2p", "zb-v", "dualpipe-v"),
        *("v-half", "v-min"),
    ],
)
def test_a_few_groups_stand_for_all(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are unlike, so the slowest one sets the pace only after a while."""
    ours = plan(order, 44)
    assert fewer_micro_batches(order, 4, 44) == 16
    cut = predicted(ours)
    monkeypatch.setattr(orders, "GROUPS_PLAYED", 100)
    assert fewer_micro_batches(order, 4, 44) == 44
    whole = predicted(ours)
    assert cut.iteration_s == pytest.approx(whole.iteration_s, rel=1e-4)
    assert [one.memory for one in cut.stages] == [one.memory for one in whole.stages]


@pytest.mark.parametrize(
    ("order", "engine"),
    [
        ("interleaved-2", "megatron"),
        ("interleaved-3", "mistlab"),
        ("interleaved-3", "zero-bubble-waiting"),
        ("zb-2p", "mistlab"),
        ("zb-2p", "zero-bubble"),
    ],
)
def test_what_is_played_is_near(order: str, engine: str) -> None:
    ours = plan(order, 24, engine)
    closed, played = predicted(ours), predicted(ours, EventSimulator)
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.01)
    for one, other in zip(closed.stages, played.stages, strict=True):
        assert one.peak_allocated_bytes == pytest.approx(other.peak_allocated_bytes, rel=0.05)


def test_parts_without_blocks_are_predicted_and_played() -> None:
    """Embedding and head have a chunk each, so ten blocks fill four stages of three chunks."""
    ends, inner = replace(STAGE, layers=2), replace(STAGE, layers=3)
    given = {"workload": work(8, layers=10), "cluster": CLUSTER}
    stages = ends, inner, inner, ends
    ours = Plan(engine="megatron", micro_batches=8, stages=stages, order="interleaved-3")
    closed = SymbolicPredictor(**given).predict(ours)  # type: ignore[arg-type]
    played = EventSimulator(**given).predict(ours)  # type: ignore[arg-type]
    # A stage steps its chunks one after another, when all of its passes are over.
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.005)
    for one, other in zip(closed.stages, played.stages, strict=True):
        assert one.peak_allocated_bytes == pytest.approx(other.peak_allocated_bytes, rel=0.01)


def test_gradients_of_experts_weights_have_passes_of_their_own() -> None:
    ours = replace(plan("zb-h1", 8), engine="mistlab", stages=(replace(STAGE, layers=8),) * 4)
    workload = replace(work(8), model=catalog.model("mixtral-8x7b"))
    given = {"workload": workload, "cluster": CLUSTER}
    closed = SymbolicPredictor(**given).predict(ours)  # type: ignore[arg-type]
    simulation = EventSimulator(**given).simulate(ours)  # type: ignore[arg-type]
    assert closed.iteration_s == pytest.approx(simulation.iteration_s, rel=0.01)
    # A gradient of weights takes as long as one of the same product's input, which is not all that
    # passes for inputs compute.
    busy = dict.fromkeys("FBW", 0.0)
    for task in simulation.tasks():
        if task.action.kind in busy:
            busy[task.action.kind] += task.end_s - task.start_s
    assert 0.2 * sum(busy.values()) < busy["W"] < busy["B"]


def test_interleaving_fills_the_bubble_and_holds_more() -> None:
    plain, cut = (
        predicted(replace(plan(order, 8, "megatron"), stages=(STAGE,) * 4))
        for order in ("1f1b", "interleaved-4")
    )
    assert cut.iteration_s < plain.iteration_s
    assert cut.stages[0].memory.activations > plain.stages[0].memory.activations


@pytest.mark.parametrize(
    ("order", "micro_batches", "engine", "problem"),
    [
        ("interleaved-2", 6, "megatron", "give a multiple of 4 micro-batches"),
        ("interleaved-8", 8, "megatron", "blocks for 7 chunks, not 8"),
        ("zb-h1", 8, "megatron", "give 1f1b, interleaved-2"),
        ("interleaved-2", 8, "deepspeed", "runs only 1f1b here"),
    ],
)
def test_an_order_that_cannot_run_is_refused(
    order: str, micro_batches: int, engine: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        Job(
            workload=work(micro_batches),
            cluster=CLUSTER,
            plan=plan(order, micro_batches, engine),
        )


OFFERED = replace(
    space_of("megatron"), tensor_parallel=(2,), pipeline=(4,), orders=("1f1b", "interleaved-4")
)


@pytest.mark.parametrize("name", ["exhaustive", "random", "aceso", "mist", "exact"])
def test_searches_choose_it(name: str) -> None:
    problem = Problem(workload=work(8, 32), cluster=CLUSTER)
    found = searched(name, OFFERED, problem)
    assert found.plan is not None
    assert found.plan.order == "interleaved-4"
    assert contains(problem, OFFERED, found.plan)
    assert not contains(problem, replace(OFFERED, orders=("1f1b",)), found.plan)


def test_other_searches_that_join_stages_refuse_it() -> None:
    found = searched("alpa", OFFERED, Problem(workload=work(8, 32), cluster=CLUSTER))
    assert found.status == "REFUSED"
    assert "joins stages of pipelines of 1f1b" in found.reason


def searched(name: str, space: SearchSpace, problem: Problem) -> SearchResult:
    predictor = SymbolicPredictor(workload=problem.workload, cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    return searcher.search(problem, space, Budget(evaluations=100), 0)
