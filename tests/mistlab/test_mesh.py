"""The mesh of a stage: shapes of groups on nodes against their ranks one by one, and the tables."""

from collections import Counter
from dataclasses import MISSING, fields
from itertools import product

import numpy as np
import pytest

from mistlab.plan.dimensions import (
    DIMENSIONS,
    GROUPS,
    groups_of,
    num_gpus,
    position_of,
    rank_of,
    ranks_of,
)
from mistlab.plan.plan import Offload, StagePlan
from mistlab.stages.stage_batch import StageBatch
from mistlab.stages.stage_shape import shape_on_nodes


@pytest.mark.parametrize("group", [*GROUPS])
@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize("order", [0, 1])
def test_shapes_are_those_of_ranks_one_by_one(group: str, gpus: int, order: int) -> None:
    degrees = [*product((1, 2, 4), (1, 2, 4), (1, 2, 8), (0, 1, 2))]
    rows = [(t, c, d, p * t * c * d) for t, c, d, p in degrees if t * c * d * (p + 1) <= 64]
    # Stages lie inside a node or fill whole ones.
    rows = [row for row in rows if gpus % np.prod(row[:3]) == 0 or np.prod(row[:3]) % gpus == 0]
    tensor, context, data, first = map(np.array, zip(*rows, strict=True))
    batch = StageBatch(
        layers=np.ones(len(rows)),
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        micro_batch=1,
        first_rank=first,
        axis_order=order,
    )
    inside, nodes = shape_on_nodes(group, batch.value, batch.first_rank, gpus)
    for row, (t, c, d, begin) in enumerate(rows):
        stage = StagePlan.of_values(
            {
                "layers": 1,
                "micro_batch": 1,
                "tensor_parallel": t,
                "context_parallel": c,
                "data_parallel": d,
                "axis_order": order,
            }
        )
        groups = [*groups_of(group, stage.degree)]
        assert sorted(rank for ranks in groups for rank in ranks) == [*range(stage.num_gpus)]
        assert {len(ranks) for ranks in groups} == {ranks_of(group, stage.degree)}
        of_node = Counter((begin + rank) // gpus for rank in groups[0])
        assert (inside[row], nodes[row]) == (max(of_node.values()), len(of_node)), (t, c, d, begin)


@pytest.mark.parametrize("group", [*GROUPS])
@pytest.mark.parametrize("gpus", [3, 5, 6, 8])
def test_where_stages_do_not_fill_nodes_the_group_on_the_most_nodes_counts(
    group: str, gpus: int
) -> None:
    degrees = [*product((1, 2, 3), (1, 2), (1, 2, 4), (0, 1, 2))]
    tensor, context, data, place = map(np.array, zip(*degrees, strict=True))
    batch = StageBatch(
        layers=np.ones(len(degrees)),
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        micro_batch=1,
        first_rank=place * tensor * context * data,
    )
    inside, nodes = shape_on_nodes(group, batch.value, batch.first_rank, gpus)
    for row, (t, c, d, before) in enumerate(degrees):
        values = {"tensor_parallel": t, "context_parallel": c, "data_parallel": d}
        stage = StagePlan.of_values({"layers": 1, "micro_batch": 1, **values})
        first = before * t * c * d
        spans = [
            len({(first + rank) // gpus for rank in ranks})
            for ranks in groups_of(group, stage.degree)
        ]
        assert nodes[row] == max(spans), (t, c, d, before)
        assert inside[row] == -(-ranks_of(group, stage.degree) // nodes[row])


def test_ranks_have_positions_along_all_axes() -> None:
    values = {"layers": 1, "micro_batch": 1, "tensor_parallel": 2, "data_parallel": 3}
    stage = StagePlan.of_values({**values, "context_parallel": 5})
    assert stage.num_gpus == num_gpus(stage.degree) == 30
    positions = [position_of(rank, stage.degree) for rank in range(30)]
    assert positions[7] == {"tensor": 1, "context": 3, "data": 0}
    assert [rank_of(one, stage.degree) for one in positions] == [*range(30)]


def test_the_table_and_the_fields_of_stages_agree() -> None:
    own = {entry.name: entry for entry in fields(StagePlan)}
    offload = {f"offload_{entry.name}": entry for entry in fields(Offload)}
    for name in DIMENSIONS:
        default = {**own, **offload}[name].default
        assert DIMENSIONS[name].default == (None if default is MISSING else default), name
