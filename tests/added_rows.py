"""Dimensions that tests add to the table, each by its row, and what is to hold with them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.graph.graph import LayerGraph
from mistlab.graph.treatments import TREATMENTS, Treatment
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.plan_words import plan_line, plan_words
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 16, layers=8)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(layers=4, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
PLAN = Plan(micro_batches=4, stages=(STAGE, STAGE))

SQUEEZED = """
    "squeezed": Dimension(
        part="savings",
        symbol="sq",
        minimum=1,
        maximum=4,
        default=1,
        is_trained=True,
        of_tasks=dict.fromkeys("FBR", lambda times: 1 / times),
        of_states={"gradient": lambda times: 1 / times},
    ),
"""
THRIFTY = """
    "thrifty_layers": Dimension(part="layers", symbol="cy", default=0, noun="blocks thrifty"),
"""
REGIONS = """
    "reduce_regions": Dimension(
        part="mesh",
        symbol="rr",
        minimum=1,
        default=1,
        shared_by="reduce",
        noun="regions of reduction",
        checks={
            "states": lambda setting: (
                "does not divide data_parallel: give a divisor"
                if setting.degree("data_parallel") % setting.degree("reduce_regions")
                else ""
            )
        },
        limit=EngineLimit(
            runs=lambda engine, _: None if engine.offloads else (1,),
            why=lambda *_: "has one region",
        ),
        of_tasks={"R": lambda regions: (1 + 1 / regions) / 2},
    ),
"""
SHUFFLED = """
    "shuffled": Dimension(part="savings", symbol="qq", maximum=1, default=0),
"""


def squeezed_is_like_others(folder: str) -> None:
    """It is predicted, played, searched, written and trained like the others."""
    path = Path(folder) / "plan.yaml"
    squeezed = replace(PLAN, stages=(STAGE.with_values({"squeezed": 2}), STAGE))
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=squeezed), path)
    assert "squeezed: 2" in path.read_text("utf-8")
    assert load_job(path).plan == squeezed
    for kind in (SymbolicPredictor, EventSimulator):
        ours, theirs = kind(workload=WORK, cluster=CLUSTER).predict_many([PLAN, squeezed])
        assert theirs.iteration_s < ours.iteration_s
        kept = [[stage.memory.gradients for stage in one.stages] for one in (ours, theirs)]
        assert kept[0][0] == 2 * kept[1][0]
        assert kept[0][1] == kept[1][1]
    for name, space in (("mist", "mist"), ("aceso", "mist"), ("exhaustive", "3d")):
        found = searched(name, replace(space_of(space), squeezed=(1, 2, 4)))
        assert {stage.value("squeezed") for stage in found.stages} == {4}
    train_like_plain(stage=lambda own: own.with_values({"squeezed": 2}))


def thrifty_is_like_others(folder: str) -> None:
    """It is predicted, played, searched, written and trained like the others."""
    path = Path(folder) / "plan.yaml"

    def thrifty(block: LayerGraph) -> LayerGraph:
        forward = block.of_phase("forward")
        return replace(
            block, saved=block.saved[: len(block.saved) // 2], again=forward[: len(forward) // 2]
        )

    TREATMENTS["thrifty"] = Treatment(dimension="thrifty_layers", graph=thrifty)
    plans = [
        replace(PLAN, stages=(STAGE.with_values(values), STAGE))
        for values in ({}, {"thrifty_layers": 2}, {"checkpointed_layers": 1, "thrifty_layers": 3})
    ]
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=plans[2]), path)
    assert load_job(path).plan == plans[2]
    for kind in (SymbolicPredictor, EventSimulator):
        plain, some, all_treated = kind(workload=WORK, cluster=CLUSTER).predict_many(plans)
        assert plain.iteration_s < some.iteration_s < all_treated.iteration_s
        kept = [one.stages[0].memory.activations for one in (plain, some, all_treated)]
        assert kept[0] > kept[1] > kept[2]
    deeper = replace(WORK, model=catalog.model("gpt3-1.3b"), sequence_length=2048, global_batch=64)
    offered = tuple(range(25))
    space = replace(space_of("+checkpointing"), thrifty_layers=offered, micro_batch=(4,))
    assert any(stage.value("thrifty_layers") for stage in searched("mist", space, deeper).stages)
    pytest.importorskip("torch")
    from runtime.engine.work.layer_passes import LAYER_RUNS, LayerRun, Passes  # noqa: PLC0415

    run = LayerRun(forward=Passes.keeping_input, runs_again=True)
    LAYER_RUNS["thrifty"] = run
    both = {"thrifty_layers": 1, "checkpointed_layers": 1}
    train_like_plain(stage=lambda own: own.with_values(both))


def regions_are_like_others(folder: str) -> None:
    """They divide data-parallel ranks: predicted, played, searched, written, told and checked."""
    path, kind = Path(folder) / "plan.yaml", "reduce_regions"
    stage = STAGE.with_values({kind: 2})
    divided = replace(PLAN, stages=(stage, STAGE))
    dump_job(Job(workload=WORK, cluster=CLUSTER, plan=divided), path)
    assert "reduce_regions: 2" in path.read_text("utf-8")
    assert load_job(path).plan == divided
    for predictor in (SymbolicPredictor, EventSimulator):
        ours, theirs = predictor(workload=WORK, cluster=CLUSTER).predict_many([PLAN, divided])
        assert theirs.iteration_s < ours.iteration_s
    assert "2 regions of reduction" in plan_line(divided)
    assert "2 regions of reduction" in plan_words(divided)[1]
    uneven = replace(PLAN, stages=(STAGE.with_values({kind: 3}), STAGE))
    with pytest.raises(InputError, match=r"stages\[0\].reduce_regions: does not divide"):
        Job(workload=WORK, cluster=CLUSTER, plan=uneven)
    unsharded = replace(stage, zero=0)
    under_aceso = replace(PLAN, engine="aceso", stages=(unsharded, unsharded))
    with pytest.raises(InputError, match="2, but engine aceso has one region: give 1"):
        Job(workload=WORK, cluster=CLUSTER, plan=under_aceso)
    for name in ("mist", "aceso", "exhaustive"):
        found = searched(name, replace(space_of("3d"), **{kind: (1, 2, 4)}))
        assert {stage.value(kind) for stage in found.stages} == {4}
    assert replace(space_of("3d"), **{kind: (1, 2)}).on("aceso").listed(kind) == (1,)


def shuffled_is_lost(_: str) -> None:
    """Every target without a row for it says that it is lost."""
    stage = replace(STAGE, shuffled=1)
    job = Job(workload=WORK, cluster=CLUSTER, plan=replace(PLAN, stages=(stage, stage)))
    for name, target in TARGETS.items():
        near = nearest(job, target)
        (lost,) = [remark for remark in near.remarks if remark.choice == "shuffled"]
        assert lost.kind == "lost", name
        assert "cannot express it" in lost.text, name
        assert all(stage.value("shuffled") == 0 for stage in near.job.plan.stages), name


def searched(name: str, space: SearchSpace, work: Workload = WORK) -> Plan:
    """The plan that a searcher finds in a space."""
    predictor = SymbolicPredictor(workload=work, cluster=CLUSTER)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    problem = Problem(workload=work, cluster=CLUSTER)
    found = searcher.search(problem, space, Budget(evaluations=200), 0)
    assert found.plan is not None
    assert contains(problem, space, found.plan)
    return found.plan


def train_like_plain(
    stage: Callable[[StagePlan], StagePlan] = lambda own: own, **fields: object
) -> None:
    """A small model trained by a plan with these fields and stages loses as in a plain run."""
    pytest.importorskip("torch")
    from tests.runtime import worlds  # noqa: PLC0415

    half = stage(worlds.stage(2, data_parallel=2, zero=1))
    plan = replace(Plan(micro_batches=2, stages=(half, half)), **fields)  # type: ignore[arg-type]
    worlds.assert_alike(worlds.by_plan(worlds.workload(), plan), worlds.plainly(worlds.workload()))
