"""The seams: a row that a test adds is predicted, played, searched and trained like the others.

Each test adds one row to one table. Stages and spaces are made from the table of dimensions: a row
of it is added in a process of its own.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mistlab.engines.engine import ENGINES, KernelRule
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.schedule.orders import ORDERS
from mistlab.schedule.slots import GATHER_STEPPED
from mistlab.stages.stage_program import iterations
from mistlab.stages.stage_shape import StageShape
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests import added_rows
from tests.added_rows import CLUSTER, PLAN, WORK, train_like_plain
from tests.with_row import run_with_row


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


def test_a_dimension_is_a_row(tmp_path: Path) -> None:
    """Dimension ``squeezed`` takes a part of the passes' time and of gradients' bytes."""
    run_with_row(added_rows.SQUEEZED, added_rows.squeezed_is_like_others, str(tmp_path))


def test_a_dimension_of_the_mesh_is_a_row(tmp_path: Path) -> None:
    """Data-parallel ranks reduce gradients in ``reduce_regions``, each with fewer bytes."""
    run_with_row(added_rows.REGIONS, added_rows.regions_are_like_others, str(tmp_path))


def test_a_treatment_is_a_row(tmp_path: Path) -> None:
    """Blocks treated ``thrifty`` keep half of what they save, and half of them run again."""
    run_with_row(added_rows.THRIFTY, added_rows.thrifty_is_like_others, str(tmp_path))


def test_an_order_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Order made-up takes micro-batches backwards: the last one first, all forwards ahead."""

    def text(stages: int, micro_batches: int) -> str:
        line = [f"{kind}m{m}" for kind in "FB" for m in reversed(range(micro_batches))]
        return f"{' '.join(line)}\n" * stages

    monkeypatch.setitem(ORDERS, "made-up", text)
    made_up = replace(PLAN, order="made-up")
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=made_up), tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml").plan == made_up
    for kind in (SymbolicPredictor, EventSimulator):
        ours, theirs = kind(workload=WORK, cluster=CLUSTER).predict_many([PLAN, made_up])
        # Equal stages wait as long as under 1F1B, and hold all micro-batches.
        assert theirs.iteration_s == pytest.approx(ours.iteration_s, rel=0.05)
        assert theirs.stages[1].memory.activations > 3 * ours.stages[1].memory.activations
    played = EventSimulator(workload=WORK, cluster=CLUSTER).simulate(made_up).tasks()
    first = min((task for task in played if task.action.kind == "F"), key=lambda one: one.start_s)
    assert first.action.micro_batch == PLAN.micro_batches - 1
    train_like_plain(order="made-up")
