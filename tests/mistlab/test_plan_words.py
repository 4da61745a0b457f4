"""Plans in one line: unequal plans have unequal lines."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from mistlab.engines.table import names_for_plans, names_that_wait
from mistlab.schedule.orders import ORDERS
from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.plan_words import plan_line

STAGE = StagePlan(layers=8, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
PLAN = Plan(micro_batches=4, stages=(STAGE, STAGE))


def drawn_value(draw: np.random.Generator, name: str) -> float:
    """A random value of a dimension."""
    row = DIMENSIONS[name]
    if row.is_ratio:
        return float(draw.choice([0.0, 1 / 3, 0.333333, 0.3333334, 1.0]))
    most = 3 if name in counts_of_blocks() else row.maximum or 8
    return int(draw.integers(1 if name == "layers" else row.minimum, most + 1))


def drawn_stage(draw: np.random.Generator) -> StagePlan:
    """A random stage in which few dimensions differ from their default."""
    values = {name: row.default for name, row in DIMENSIONS.items() if row.default is not None}
    values |= {name: 1 for name, row in DIMENSIONS.items() if row.default is None}
    for name in draw.choice([*DIMENSIONS], size=int(draw.integers(0, 4)), replace=False):
        values[str(name)] = drawn_value(draw, str(name))
    return StagePlan.of_values({**values, "layers": 9 + values["layers"]})


def drawn_plan(draw: np.random.Generator) -> Plan:
    """A random plan of a few stages, some of which are equal."""
    few = [drawn_stage(draw) for _ in range(2)]
    stages = tuple(few[int(draw.integers(2))] for _ in range(int(draw.integers(1, 4))))
    return Plan(
        engine=str(draw.choice(names_for_plans())),
        micro_batches=int(draw.integers(1, 3)),
        order=str(draw.choice([*ORDERS, "orders/order.txt"])),
        stages=stages,
    )


def test_random_unequal_plans_have_unequal_lines() -> None:
    """Lines of 5,000 plans are as many as the plans."""
    draw = np.random.default_rng(0)
    plans = {drawn_plan(draw) for _ in range(5000)}
    assert len({plan_line(plan) for plan in plans}) == len(plans)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_each_dimension_is_in_the_line(name: str) -> None:
    draw = np.random.default_rng(1)
    changed = {STAGE.with_values({name: drawn_value(draw, name)}) for _ in range(30)} | {STAGE}
    plans = [replace(PLAN, stages=(STAGE, stage)) for stage in changed]
    assert len(plans) > 1
    for one, other in combinations(plans, 2):
        assert plan_line(one) != plan_line(other)


def test_what_is_of_the_whole_plan_is_in_the_line() -> None:
    changed = [
        replace(PLAN, micro_batches=1),
        replace(PLAN, engine=names_that_wait()[0], overlap_communication=False),
        replace(PLAN, engine=names_that_wait()[0]),
        *(replace(PLAN, order=order) for order in ORDERS if order != PLAN.order),
        replace(PLAN, stages=(STAGE,)),
        replace(PLAN, stages=(STAGE, STAGE, STAGE)),
    ]
    assert len({plan_line(plan) for plan in (PLAN, *changed)}) == 1 + len(changed)
    line = plan_line(replace(changed[1], order="gpipe"))
    assert line.startswith("4 micro-batches, engine megatron, order gpipe, nothing overlapped: ")


def test_a_line_tells_each_choice_in_the_words_of_its_row() -> None:
    values = {"layers": 1, "context_parallel": 2, "context_exchange": 2, "offload_weights": 0.5}
    assert plan_line(Plan(micro_batches=1, stages=(STAGE.with_values(values),))) == (
        "1 micro-batch: 1 block, 2 data x 1 tensor, micro-batch 1, ZeRO-1, 2 context parallel, "
        "heads exchanged, offloads 0.5 of weights"
    )
