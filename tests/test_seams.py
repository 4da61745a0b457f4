"""The seams: a row that a test adds is predicted, played, searched and trained like the others.

Each test adds one row to one table and changes no file of the packages.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.engines.engine_parts import KernelRule
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.orders import ORDERS
from mistlab.schedule.slot_table import GATHER_STEPPED
from mistlab.schedule.stage_program import iterations
from mistlab.schedule.stage_shape import StageShape
from mistlab.symbolic.graph import LayerGraph
from mistlab.symbolic.treatments import TREATMENTS, Treatment
from mistlab.values.dimensions import DIMENSIONS, Dimension
from mistlab.values.job import Job, dump_job, load_job
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.search import Budget, Problem
from mistlab.values.space import SearchSpace, space_of
from mistlab.values.workload import Workload
from searchers.membership import contains
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 16, layers=8)
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


def train_like_plain(
    stage: Callable[[StagePlan], StagePlan] = lambda own: own, **fields: object
) -> None:
    """A small model trained by a plan with these fields and stages loses as in a plain run."""
    pytest.importorskip("torch")
    from tests.runtime import worlds  # noqa: PLC0415

    half = stage(worlds.stage(2, data_parallel=2, zero=1))
    plan = replace(Plan(micro_batches=2, stages=(half, half)), **fields)  # type: ignore[arg-type]
    worlds.assert_alike(worlds.by_plan(worlds.workload(), plan), worlds.plainly(worlds.workload()))


def test_a_dimension_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dimension ``squeezed`` takes a part of the passes' time and of gradients' bytes."""
    row = Dimension(
        part="savings",
        symbol="sq",
        minimum=1,
        maximum=4,
        default=1,
        of_tasks=dict.fromkeys("FBR", lambda times: 1 / times),
        of_states={"gradient": lambda times: 1 / times},
    )
    monkeypatch.setitem(DIMENSIONS, "squeezed", row)
    squeezed = replace(PLAN, stages=(STAGE.with_values({"squeezed": 2}), STAGE))
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=squeezed), tmp_path / "plan.yaml")
    assert "squeezed: 2" in (tmp_path / "plan.yaml").read_text("utf-8")
    assert load_job(tmp_path / "plan.yaml").plan == squeezed
    for kind in (SymbolicPredictor, EventSimulator):
        ours, theirs = kind(workload=WORK, cluster=CLUSTER).predict_many([PLAN, squeezed])
        assert theirs.iteration_s < ours.iteration_s
        kept = [[stage.memory.gradients for stage in one.stages] for one in (ours, theirs)]
        assert kept[0][0] == 2 * kept[1][0]
        assert kept[0][1] == kept[1][1]
    offered = (("squeezed", (1, 2, 4)),)
    for name, space in (("mist", "mist"), ("aceso", "mist"), ("exhaustive", "3d")):
        found = searched(name, replace(space_of(space), others=offered))
        assert {stage.value("squeezed") for stage in found.stages} == {4}
    train_like_plain(stage=lambda own: own.with_values({"squeezed": 2}))


def test_a_treatment_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks treated ``lean`` keep half of what they save, and run half of their forward again."""

    def lean(block: LayerGraph) -> LayerGraph:
        forward = block.of_phase("forward")
        return replace(
            block, saved=block.saved[: len(block.saved) // 2], again=forward[: len(forward) // 2]
        )

    count = Dimension(part="layers", symbol="cl", default=0, noun="blocks lean")
    monkeypatch.setitem(DIMENSIONS, "lean_layers", count)
    monkeypatch.setitem(TREATMENTS, "lean", Treatment(dimension="lean_layers", graph=lean))
    plans = [
        replace(PLAN, stages=(STAGE.with_values(values), STAGE))
        for values in ({}, {"lean_layers": 2}, {"checkpointed_layers": 1, "lean_layers": 3})
    ]
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=plans[2]), tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml").plan == plans[2]
    for kind in (SymbolicPredictor, EventSimulator):
        plain, some, all_treated = kind(workload=WORK, cluster=CLUSTER).predict_many(plans)
        assert plain.iteration_s < some.iteration_s < all_treated.iteration_s
        kept = [one.stages[0].memory.activations for one in (plain, some, all_treated)]
        assert kept[0] > kept[1] > kept[2]
    deeper = replace(WORK, model=catalog.model("gpt3-1.3b"), sequence_length=2048, global_batch=64)
    offered = (("lean_layers", tuple(range(25))),)
    space = replace(space_of("+checkpointing"), others=offered, micro_batch=(4,))
    assert any(stage.value("lean_layers") for stage in searched("mist", space, deeper).stages)
    pytest.importorskip("torch")
    from runtime.engine.work.layer_passes import LAYER_RUNS, LayerRun, Passes  # noqa: PLC0415

    run = LayerRun(forward=Passes.keeping_input, runs_again=True)
    monkeypatch.setitem(LAYER_RUNS, "lean", run)
    both = {"lean_layers": 1, "checkpointed_layers": 1}
    train_like_plain(stage=lambda own: own.with_values(both))


def searched(name: str, space: SearchSpace, work: Workload = WORK) -> Plan:
    """The plan that a searcher finds in a space."""
    predictor = SymbolicPredictor(workload=work, cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    problem = Problem(workload=work, cluster=CLUSTER)
    found = searcher.search(problem, space, Budget(evaluations=200), 0)
    assert found.plan is not None
    assert contains(problem, space, found.plan)
    return found.plan


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
