"""Orders whose parts turn round at the last stage: predicted beside what is played."""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.order_memory import figures_in_order
from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.graph.stage_model import StageModel
from mistlab.job.job import Job
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.orders import dualpipe_v_text, zb_v_text
from mistlab.stages.plan_orders import order_of_plan
from mistlab.stages.stage_batch import batch_of_parts
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.memory import memory_of
from simulators.symbolic import SymbolicPredictor
from tests.pipeline_orders import whole_backwards
from tests.workloads import workload_of

HARDWARE = catalog.hardware("a100-80gb")
ONE_NODE = Cluster(hardware=HARDWARE, nodes=1, gpus_per_node=8)
NODES = Cluster(hardware=HARDWARE, nodes=4, gpus_per_node=2)
STAGE = StagePlan(layers=8, data_parallel=1, tensor_parallel=2, micro_batch=1)
STAGES = (replace(STAGE, layers=7), replace(STAGE, checkpointed_layers=3), STAGE, STAGE)
WORK = workload_of("gpt3-2.7b", 2048, 12, "bf16", layers=31, tied_embeddings=True)


def plan_of(order: str, engine: str = "mistlab") -> Plan:
    return Plan(engine=engine, micro_batches=12, stages=STAGES, order=order)


@pytest.mark.parametrize("cluster", [ONE_NODE, NODES], ids=["one node", "four nodes"])
@pytest.mark.parametrize(
    ("order", "engine"),
    [
        *(("zb-v", "mistlab"), ("dualpipe-v", "mistlab"), ("zb-v", "zero-bubble")),
        *(("v-half", "mistlab"), ("v-min", "mistlab"), ("v-half", "zero-bubble")),
    ],
)
def test_what_is_played_is_near(order: str, engine: str, cluster: Cluster) -> None:
    plan = plan_of(order, engine)
    closed = SymbolicPredictor(workload=WORK, cluster=cluster).predict(plan)
    simulation = EventSimulator(workload=WORK, cluster=cluster).simulate(plan)
    assert closed.iteration_s == pytest.approx(simulation.iteration_s, rel=0.01)
    room = np.full(4, np.inf)
    held = memory_of(simulation, plan, StageModel.of(WORK, engine), room)
    for one, other in zip(closed.stages, held, strict=True):
        assert one.peak_allocated_bytes == pytest.approx(other.peak_bytes, rel=0.01)


UNSPLIT = {"zb-v": zb_v_text, "dualpipe-v": dualpipe_v_text}


@pytest.mark.parametrize("recomputed", range(0, 9, 2))
@pytest.mark.parametrize("name", UNSPLIT)
def test_vs_with_whole_backward_passes_hold_what_is_played(
    name: str, recomputed: int, tmp_path: Path
) -> None:
    """A stage's second chunk recomputes first, but most is held while the first chunk runs."""
    order = tmp_path / "order.txt"
    order.write_text(whole_backwards(UNSPLIT[name](4, 12)))
    stage = replace(STAGE, tensor_parallel=1, micro_batch=4, checkpointed_layers=recomputed)
    plan = Plan(micro_batches=12, stages=(stage,) * 4, order=str(order))
    work = replace(WORK, model=replace(WORK.model, layers=32), global_batch=48)
    model = StageModel.of(work)
    simulation = EventSimulator(workload=work, cluster=ONE_NODE).simulate(plan)
    held = memory_of(simulation, plan, model, np.full(4, np.inf))
    played = [one.peak_bytes for one in held]
    predicted = figures_in_order([plan], model).peak_bytes
    assert predicted[:-1] == pytest.approx(played[:-1], rel=1e-9)
    # The chunk at the turn sends nothing away, but the bound of searches counts its outcome, too.
    assert played[-1] * (1 - 1e-9) <= predicted[-1] <= played[-1] * 1.006


def test_parts_of_one_stage_send_nothing_and_every_pass_is_played_once() -> None:
    simulation = EventSimulator(workload=WORK, cluster=ONE_NODE).simulate(plan_of("zb-v"))
    tasks = [one.action for one in simulation.tasks()]
    computed = Counter((one.kind, one.layer, one.micro_batch) for one in tasks if one.kind in "FBW")
    assert {*computed.values()} == {1}
    assert len([1 for kind, *_ in computed if kind == "F"]) == 12 * 33
    assert {one.stage for one in tasks if one.layer in (0, 32)} == {0}
    sends = Counter(one.stage for one in tasks if one.kind == "X")
    # Both ways: the first stage and the last send on one of their chunks, the others on both.
    assert sends == {0: 2 * 12, 1: 4 * 12, 2: 4 * 12, 3: 2 * 12}


def test_times_of_parts_know_what_is_sent_away_and_which_table_is_shared() -> None:
    plan = plan_of("zb-v")
    batch = batch_of_parts([plan], order_of_plan(plan).placement)
    predictor = SymbolicPredictor(workload=WORK, cluster=NODES)
    seconds = predictor.stage_costs(batch).seconds
    # Neither the part at the turn nor the last one sends anything away.
    sends = [True, True, True, False, True, True, True, False]
    assert (seconds.point_to_point_s > 0).tolist() == sends
    assert batch.shares_table.all()
    apart = predictor.stage_costs(batch.with_columns(shares_table=0)).seconds
    longer_s = apart.delta_backward_s - seconds.delta_backward_s
    assert (longer_s > 0).tolist() == [True] + [False] * 7


def test_the_ends_share_their_table_of_tokens() -> None:
    """No gradient of the table is exchanged, and the first stage counts it once."""
    predictor = SymbolicPredictor(workload=WORK, cluster=NODES)
    simulator = EventSimulator(workload=WORK, cluster=NODES)

    def reductions(order: str) -> int:
        tasks = simulator.simulate(plan_of(order)).tasks()
        return sum(one.action.kind == "R" and one.action.layer is None for one in tasks)

    assert (reductions("1f1b"), reductions("zb-v")) == (2, 0)
    apart = replace(WORK, model=replace(WORK.model, tied_embeddings=False))
    untied = SymbolicPredictor(workload=apart, cluster=NODES)
    first, other = (one.predict(plan_of("zb-v")).stages[0].memory for one in (predictor, untied))
    table_bytes = 2 * WORK.model.padded_vocab(2) * WORK.model.hidden / 2
    assert other.weights - first.weights == pytest.approx(table_bytes)


def test_a_v_holds_about_what_1f1b_holds_and_waits_less() -> None:
    model = replace(catalog.model("gpt3-2.7b"), vocab=2048)
    # States of 16 bytes a parameter, beside which activations count.
    work = replace(WORK, model=model, global_batch=16, gradients="16bit")
    predictor = SymbolicPredictor(workload=work, cluster=ONE_NODE)
    plans = [
        Plan(micro_batches=16, stages=(STAGE,) * 4, order=order)
        for order in ("1f1b", "zb-h1", "zb-2p", "zb-v")
    ]
    usual, h1, twice, turning = predictor.predict_many(plans)
    # The last stage begins earlier than under ZB-2p, whose chunks are twice as long.
    assert turning.iteration_s < twice.iteration_s < h1.iteration_s < usual.iteration_s
    peaks = [max(s.peak_allocated_bytes for s in one.stages) for one in (usual, turning, twice)]
    assert peaks[1] < 1.25 * peaks[0] < 0.8 * peaks[2]


def test_less_is_held_the_more_is_waited() -> None:
    """Beside 1F1B: V-Half holds half and waits less, V-Min holds a third and waits more."""
    work = replace(WORK, model=replace(catalog.model("gpt3-2.7b"), vocab=2048), global_batch=64)
    predictor = SymbolicPredictor(workload=work, cluster=ONE_NODE)
    stages = (replace(STAGE, layers=4, tensor_parallel=1),) * 8
    usual, half, least, turning = predictor.predict_many(
        [
            Plan(micro_batches=64, stages=stages, order=order)
            for order in ("1f1b", "v-half", "v-min", "zb-v")
        ]
    )
    assert turning.iteration_s < half.iteration_s < usual.iteration_s < least.iteration_s
    held = [max(stage.memory.activations for stage in one.stages) for one in (usual, half, least)]
    # Of eight micro-batches five and four.
    assert held[1] / held[0] == pytest.approx(5 / 8, abs=0.03)
    assert held[2] / held[0] == pytest.approx(4 / 8, abs=0.03)


def test_a_file_of_its_text_is_predicted_as_the_order(tmp_path: Path) -> None:
    plan = plan_of("zb-v")
    (tmp_path / "v.txt").write_text(str(order_of_plan(plan)))
    predictor = SymbolicPredictor(workload=WORK, cluster=NODES)
    from_file = predictor.predict(replace(plan, order=str(tmp_path / "v.txt")))
    named = predictor.predict(plan)
    assert (from_file.iteration_s, from_file.stages) == (named.iteration_s, named.stages)


def test_engines_say_which_orders_they_run() -> None:
    Job(workload=WORK, cluster=ONE_NODE, plan=plan_of("zb-v", "zero-bubble"))
    with pytest.raises(InputError, match="zb-v, but engine megatron does not run it here"):
        Job(workload=WORK, cluster=ONE_NODE, plan=plan_of("zb-v", "megatron"))
    with pytest.raises(InputError, match="dualpipe-v, but engine zero-bubble does not run it"):
        Job(workload=WORK, cluster=ONE_NODE, plan=plan_of("dualpipe-v", "zero-bubble"))


@pytest.mark.parametrize("name", ["random", "aceso"])
def test_searches_find_it(name: str) -> None:
    """In a pipeline of four stages with little room, where nothing else fills the waits as well."""
    space = replace(space_of("zero-bubble"), tensor_parallel=(2,), pipeline=(4,), micro_batch=(1,))
    work = replace(WORK, model=replace(WORK.model, layers=32), global_batch=8)
    cluster = replace(ONE_NODE, memory_gib=13.0)
    predictor = SymbolicPredictor(workload=work, cluster=cluster)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    problem = Problem(workload=work, cluster=cluster)
    found = searcher.search(problem, space, Budget(evaluations=60), 0)
    assert found.plan is not None
    assert found.plan.order == "zb-v"
    assert contains(problem, space, found.plan)


def test_spaces_of_any_order_have_them() -> None:
    assert "zb-v" in space_of("everything:orders").orders
    assert "dualpipe-v" not in space_of("zero-bubble").orders
    everything = space_of("everything:orders")
    assert replace(everything, name="everything", orders=("1f1b",)) == space_of("everything")


@pytest.mark.parametrize("order", ["zb-v", "dualpipe-v"])
def test_torchtitan_says_both_and_is_read(order: str) -> None:
    work = replace(WORK, model=catalog.model("llama3-8b"), sequence_length=4096, global_batch=8)
    stage = replace(STAGE, layers=8, tensor_parallel=1, data_parallel=2, zero=2)
    unlike = (replace(stage, layers=15), replace(stage, layers=17))
    plan = Plan(engine="fsdp", micro_batches=4, stages=unlike, order=order)
    target = TARGETS["torchtitan-toml"]
    found = nearest(Job(workload=work, cluster=ONE_NODE, plan=plan), target)
    assert found.is_exact
    assert found.job.plan.engine == "fsdp"
    text = target.write(found.job)
    parts = tomllib.loads(text)["parallelism"]["module_fqns_per_model_part"]
    # Down the two stages, and back up: the first stage has parts 0 and 3.
    assert [len(one) for one in parts] == [1 + 8, 9, 8, 7 + 2]
    assert (parts[2][0], parts[3][0], parts[3][-2:]) == (
        "layers.17",
        "layers.25",
        ["norm", "output"],
    )
    given = Given(hardware=ONE_NODE.hardware, nodes=1, gpus_per_node=4)
    assert target.read(text, given).job.plan == plan
