"""Replicas: states are sharded within each, and ranks with one shard add their gradients up."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.network.link_times import GroupSpread
from mistlab.plan.dimensions import groups_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from mistlab.stages.stage_shape import shape_on_nodes
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("llama3-8b", 2048, 32, "bf16", name="", layers=8)
CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=2, gpus_per_node=8)
EXPERTS = replace(WORK, model=replace(catalog.model("mixtral-8x7b"), name="", layers=4))


def plan(replicas: int, *, zero: int = 3, data: int = 16, **others: int) -> Plan:
    stage = StagePlan.of_values(
        {
            "layers": 8,
            "data_parallel": data,
            "tensor_parallel": 1,
            "micro_batch": 1,
            "state_replicas": replicas,
            "zero": zero,
            **others,
        }
    )
    return Plan(engine="fsdp", micro_batches=32 // data, stages=(stage,))


def predicted(*plans: Plan, kind: type = SymbolicPredictor) -> list[Prediction]:
    return list(kind(workload=WORK, cluster=CLUSTER).predict_many(plans))


@pytest.mark.parametrize("group", ["gather", "state replicas", "gather experts", "reduce experts"])
def test_shapes_are_those_of_ranks_one_by_one(group: str) -> None:
    rows = [
        row
        for row in product((1, 2), (1, 2), (4, 8), (1, 2, 4), (1, 2, 4))
        if row[0] * row[1] * row[2] // row[3] % row[4] == 0
    ]
    tensor, context, data, replicas, experts = map(np.array, zip(*rows, strict=True))
    names = (
        "tensor_parallel",
        "context_parallel",
        "data_parallel",
        "state_replicas",
        "expert_parallel",
    )
    columns = dict(zip(names, (tensor, context, data, replicas, experts), strict=True))
    batch = StageBatch(layers=1, micro_batch=1, **columns)
    inside, nodes = shape_on_nodes(group, batch.value, batch.first_rank, 8)
    for row, values in enumerate(rows):
        named = dict(zip(names, values, strict=True))
        stage = StagePlan.of_values({"layers": 1, "micro_batch": 1, **named})
        groups = [*groups_of(group, stage.degree)]
        assert sorted(rank for ranks in groups for rank in ranks) == [*range(stage.num_gpus)]
        of_node = Counter(rank // 8 for rank in groups[0])
        assert (inside[row], nodes[row]) == (max(of_node.values()), len(of_node)), values


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_replica_keeps_what_as_many_ranks_without_replicas_keep(zero: int) -> None:
    for engine in ("fsdp", "mistlab"):
        two, one = predicted(
            *(
                replace(own, engine=engine)
                for own in (plan(2, zero=zero), plan(1, zero=zero, data=8))
            )
        )
        assert two.stages[0].memory == one.stages[0].memory


def test_experts_are_sharded_within_replicas_too() -> None:
    predictor = SymbolicPredictor(workload=EXPERTS, cluster=CLUSTER)
    two, one = predictor.predict_many(
        [plan(2, layers=4, expert_parallel=4), plan(1, data=8, layers=4, expert_parallel=4)]
    )
    assert two.stages[0].memory.optimizer == pytest.approx(one.stages[0].memory.optimizer)


def test_gradients_are_scattered_within_nodes_and_added_up_across() -> None:
    """One goes over the network, the other inside nodes, at once: the longer one counts."""
    model = TaskModel.of(WORK, CLUSTER, ENGINES["fsdp"])
    batch = StageBatch.of_plans([plan(1), plan(2)])
    seconds = model.seconds(batch.columns)
    block = model.types.names.index("block")
    parameters = seconds.parameters[block]
    inside = model.collective("reduce_scatter", GroupSpread(8, 1))
    across = model.collective("all_reduce", GroupSpread(1, 2))
    width = model.memory.reduced_gradient
    expected = np.maximum(inside(parameters * width), across(parameters * width / 8))
    assert seconds.alone("R", "")[block][1] == pytest.approx(expected[1], rel=1e-12)
    gathered = model.collective("all_gather", GroupSpread(8, 1))
    assert seconds.alone("U", "")[block][1] == gathered(parameters * model.memory.weight)[1]


def test_replicas_gain_where_the_network_is_slow() -> None:
    slow, fast = (replace(CLUSTER, inter_node_gbytes_per_s=rate) for rate in (10.0, 2000.0))
    gains = []
    for cluster in (slow, fast):
        one, two = SymbolicPredictor(workload=WORK, cluster=cluster).predict_many(
            [plan(1), plan(2)]
        )
        gains.append(one.iteration_s / two.iteration_s)
    assert gains[0] > 1.2
    assert gains[1] < gains[0]


def test_a_played_plan_is_a_predicted_one() -> None:
    """Within the differences that plans without replicas have (the first of each engine)."""
    plans = [plan(replicas, zero=3) for replicas in (1, 2, 4)]
    plans += [replace(own, engine="mistlab") for own in plans]
    for one, other in zip(predicted(*plans), predicted(*plans, kind=EventSimulator), strict=True):
        assert one.iteration_s == pytest.approx(other.iteration_s, rel=1e-2)
        for stage, twin in zip(one.stages, other.stages, strict=True):
            assert stage.memory == twin.memory


def test_a_plan_file_says_it(tmp_path: Path) -> None:
    job = Job(workload=WORK, cluster=CLUSTER, plan=plan(2))
    dump_job(job, tmp_path / "plan.yaml")
    assert "state_replicas: 2" in (tmp_path / "plan.yaml").read_text("utf-8")
    assert load_job(tmp_path / "plan.yaml") == job


@pytest.mark.parametrize(
    ("work", "ours", "problem"),
    [
        (WORK, plan(3), "3 does not divide data_parallel 16: give a divisor"),
        (EXPERTS, plan(8, layers=4, expert_parallel=4), "8 leaves 2 GPUs to a replica"),
    ],
)
def test_replicas_that_do_not_divide_are_refused(work: Workload, ours: Plan, problem: str) -> None:
    with pytest.raises(InputError, match=f"state_replicas: {problem}"):
        Job(workload=work, cluster=CLUSTER, plan=ours)
