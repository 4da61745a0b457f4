"""Which plans are a space's: all that choices lead to, and none with one thing changed."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.job.search import Problem
from mistlab.plan.named_spaces import SPACES, space_of
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.meshes import equal_pipelines
from searchers.methods.optuna_study import key_names
from searchers.savings import Chooser, chosen_plan, contains
from tests.searchers.problems import SMALL

FOUR = replace(SMALL, cluster=replace(SMALL.cluster, gpus_per_node=4))
STAGE = StagePlan(layers=2, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
PLAN = Plan(micro_batches=2, stages=(STAGE, STAGE))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_every_chosen_plan_is_inside_and_asks_for_known_names(space: SearchSpace) -> None:
    draw = np.random.default_rng(0)
    names = set()

    def place(name: str, options: int) -> int:
        names.add(name)
        return int(draw.integers(options))

    plans = [chosen_plan(FOUR, space, Chooser(place)) for _ in range(60)]
    assert any(plans)
    assert all(contains(FOUR, space, plan) for plan in plans if plan is not None)
    assert names <= set(key_names(FOUR, space))


@pytest.mark.parametrize("name", ["3d", "+zero", "aceso"])
def test_no_stage_lies_in_parts_of_two_nodes(name: str) -> None:
    """Of three stages of two GPUs on two nodes of three, the middle one would."""
    cluster = replace(SMALL.cluster, nodes=2, gpus_per_node=3)
    model = replace(SMALL.workload.model, layers=6)
    problem = Problem(workload=replace(SMALL.workload, model=model), cluster=cluster)
    draw, space = np.random.default_rng(0), space_of(name)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    drawn = [plan for _ in range(50) if (plan := chosen_plan(problem, space, chooser)) is not None]
    even = [pipeline.meshes for pipeline in equal_pipelines(problem, space)]
    assert drawn
    assert all(contains(problem, space, plan) for plan in drawn)
    assert {mesh.num_gpus for chosen in even for mesh in chosen} == {1}


def with_first(**changes: object) -> Plan:
    return replace(PLAN, stages=(replace(STAGE, **changes), STAGE))  # type: ignore[arg-type]


def with_both(**changes: object) -> Plan:
    stage = replace(STAGE, **changes)  # type: ignore[arg-type]
    return replace(PLAN, stages=(stage, stage))


# What was changed, and which is the smallest space that still has the plan; None where none has.
CHANGES = {
    "nothing": (PLAN, "3d"),
    "another engine": (replace(PLAN, engine="megatron"), None),
    "all recomputed": (with_both(checkpointed_layers=2), "3d"),
    "ZeRO 2": (with_both(zero=2), "+zero"),
    "half recomputed": (with_both(checkpointed_layers=1), "+checkpointing"),
    "offloaded": (with_both(offload=Offload(optimizer=0.5)), "+offload"),
    "a third offloaded": (with_both(offload=Offload(optimizer=0.3)), None),
    "one stage recomputed": (with_first(checkpointed_layers=2), "+zero"),
    "one stage half recomputed": (with_first(checkpointed_layers=1), "+checkpointing"),
    "one stage offloaded": (with_first(offload=Offload(optimizer=0.5)), "+offload"),
    "one stage of ZeRO 2": (with_first(zero=2), "+zero"),
    "ZeRO 0": (with_both(zero=0), "wide"),
    "too few blocks": (with_first(layers=1), None),
    "too few GPUs": (with_both(data_parallel=1, micro_batch=2), None),
    "another batch": (with_both(micro_batch=2), None),
}
GROWING = ("3d", "+zero", "+checkpointing", "+offload", "mist", "wide")


@pytest.mark.parametrize(("plan", "smallest"), CHANGES.values(), ids=CHANGES.keys())
def test_spaces_have_the_plan_from_the_smallest_on(plan: Plan, smallest: str | None) -> None:
    having = [name for name in GROWING if contains(FOUR, space_of(name), plan)]
    assert having == ([] if smallest is None else list(GROWING[GROWING.index(smallest) :]))


def test_uneven_stages_and_unequal_meshes() -> None:
    uneven = replace(PLAN, stages=(replace(STAGE, layers=3), replace(STAGE, layers=1)))
    assert contains(FOUR, space_of("mist"), uneven)
    assert not contains(FOUR, space_of("+offload"), uneven)
    narrow = replace(STAGE, data_parallel=1, micro_batch=2, layers=1, zero=0)
    unequal = replace(PLAN, stages=(narrow, narrow, replace(STAGE, zero=0)))
    assert contains(FOUR, space_of("wide"), unequal)
    assert not contains(FOUR, space_of("mist"), unequal)
    # A single rank takes the lowest level.
    sharded = replace(unequal, stages=(replace(narrow, zero=1), *unequal.stages[1:]))
    assert not contains(FOUR, space_of("wide"), sharded)


def test_stages_may_be_uneven_and_save_memory_alike() -> None:
    alike = replace(space_of("mist"), unequal_stages=False)
    largest = replace(STAGE, layers=3, checkpointed_layers=2)
    for own, inside in ((1, True), (0, False)):
        smaller = replace(STAGE, layers=1, checkpointed_layers=own)
        for stages in ((largest, smaller), (smaller, largest)):
            plan = replace(PLAN, stages=stages)
            assert contains(FOUR, alike, plan) == inside
            assert contains(FOUR, space_of("mist"), plan)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_baselines_as_published_recompute_everything_and_shard_the_optimizer(engine: str) -> None:
    published, tuned = space_of(f"{engine}:published"), space_of(engine)

    def inside(**changes: object) -> tuple[bool, bool]:
        values = {"layers": 4, "data_parallel": 4, "checkpointed_layers": 4, "zero": 1, **changes}
        stage = replace(STAGE, **values)
        plan = Plan(engine=engine, micro_batches=1, stages=(stage,))
        return contains(FOUR, published, plan), contains(FOUR, tuned, plan)

    assert inside() == (True, True)
    assert inside(zero=0) == (False, True)
    assert inside(checkpointed_layers=0) == (False, True)
    assert inside(checkpointed_layers=3) == (False, False)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("engine", ["mistlab", "megatron", "deepspeed"])
def test_spaces_have_the_zero_levels_that_plan_files_may(engine: str, num_stages: int) -> None:
    space = replace(space_of("wide"), engine=engine, offload=OffloadRatios())
    shape = {"layers": 4 // num_stages, "data_parallel": 4 // num_stages}
    accepted = []
    for zero in range(4):
        stage = replace(STAGE, zero=zero, micro_batch=1, **shape)
        plan = Plan(engine=engine, micro_batches=num_stages, stages=(stage,) * num_stages)
        try:
            Job(workload=FOUR.workload, cluster=FOUR.cluster, plan=plan)
        except InputError:
            assert not contains(FOUR, space, plan)
        else:
            assert contains(FOUR, space, plan)
            accepted.append(zero)
    sharing = {"mistlab": 4, "megatron": 2, "deepspeed": 4 if num_stages == 1 else 2}
    assert accepted == list(range(sharing[engine]))
