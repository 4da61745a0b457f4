"""The seams: a row that a test adds is predicted, played, searched and trained like the others.

Each test adds one row to one table and changes no file of the packages.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.engines.kernel_rules import KernelRule
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.slot_table import GATHER_STEPPED
from mistlab.schedule.stage_program import iterations
from mistlab.schedule.stage_shape import StageShape
from mistlab.values.job import Job, dump_job, load_job
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.search import Budget, Problem
from mistlab.values.space import space_of
from mistlab.values.workload import Workload
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

WORK = Workload(
    model=replace(catalog.model("gpt3-1.3b"), layers=8),
    sequence_length=1024,
    global_batch=16,
    attention="flash",
    precision="fp16",
)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(layers=4, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
PLAN = Plan(micro_batches=4, stages=(STAGE, STAGE))


def test_an_engine_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engine made-up gathers weights for every pass, moves twice the bytes in reductions and keeps
    gradients in 32 bits."""
    plain = ENGINES["mistlab"]
    assert plain.overlapped is not None
    phases = dict(plain.overlapped.phases)
    phases["forward"] = (*phases["forward"], GATHER_STEPPED)
    slower = (KernelRule(kind="reduction", bytes_factor=2.0), *plain.kernels)
    wide = {precision: replace(one, gradient=4) for precision, one in plain.memory.items()}
    row = replace(
        plain,
        name="made-up",
        overlapped=replace(plain.overlapped, phases=phases),
        kernels=slower,
        memory=wide,
    )
    monkeypatch.setitem(ENGINES, "made-up", row)
    made_up = replace(PLAN, engine="made-up")
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=made_up), tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml").plan == made_up
    for kind in (SymbolicPredictor, EventSimulator):
        ours, theirs = kind(workload=WORK, cluster=CLUSTER).predict_many([PLAN, made_up])
        assert theirs.iteration_s > ours.iteration_s
        kept = [stage.memory.gradients for stage in theirs.stages]
        assert kept == [2 * stage.memory.gradients for stage in ours.stages]
    space = replace(space_of("+zero"), engine="made-up")
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)
    found = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor).search(
        Problem(workload=WORK, cluster=CLUSTER), space, Budget(seconds=60), 0
    )
    assert found.plan is not None
    assert found.plan.engine == "made-up"
    gathered = [gathers(replace(PLAN, engine=name)) for name in ("mistlab", "made-up")]
    assert gathered[1] > gathered[0]
    train_like_plain(engine="made-up")


def gathers(plan: Plan) -> int:
    """How often the runtime's program of a plan's first stage gathers weights."""
    (program,) = iterations(StageShape.of(plan, 0), 1)
    return sum(op.name == "U" for op in program)


def train_like_plain(**fields: object) -> None:
    """A small model trained by a plan with these fields has the losses of a plain run."""
    pytest.importorskip("torch")
    from tests.runtime.worlds import assert_alike, by_plan, plainly, stage, workload  # noqa: PLC0415

    half = stage(2, data_parallel=2, zero=1)
    plan = replace(Plan(micro_batches=2, stages=(half, half)), **fields)  # type: ignore[arg-type]
    assert_alike(by_plan(workload(), plan), plainly(workload()))
