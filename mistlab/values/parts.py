"""The parts of plans as columns: each chunk of a stage is a candidate for a stage of its own.

Axes: C candidates, V chunks of a stage, S stages.
"""

from collections.abc import Sequence

import numpy as np

from mistlab.schedule.stage_chunks import blocks_of_chunks, parts_of_plan
from mistlab.values.dimensions import counts_of_blocks
from mistlab.values.plan import Plan
from mistlab.values.stages import Column, StageBatch


def batch_of_parts(plans: Sequence[Plan], chunks: int) -> StageBatch:
    """The parts of plans whose stages have ``chunks`` chunks, in order, one plan after another."""
    parts = [(plan, part) for plan in plans for part in parts_of_plan(plan, chunks)]
    first = np.cumsum([0, *(plan.num_stages for plan in plans)])[:-1]
    places = np.repeat(first, [plan.num_stages * chunks for plan in plans])
    stages = StageBatch.of_plans(plans).chosen(places + np.array([one.stage for _, one in parts]))
    own = {
        "layers": [len(one.blocks) for _, one in parts],
        **{name: [one.treated[name] for _, one in parts] for name in parts[0][1].treated},
        "has_embedding": [int(one.has_embedding) for _, one in parts],
        "has_head": [int(one.has_head) for _, one in parts],
        "first_block": [one.blocks.start - 1 for _, one in parts],
    }
    columns = {name: np.array(column) for name, column in own.items()}
    return StageBatch.of_columns({**stages.columns, **columns})


def parts_of_stages(batch: StageBatch, num_stages: int, chunks: int) -> StageBatch:
    """The parts (V, S, C) of columns (S, C) of the stages of pipelines, part by part; a stage has
    as many blocks in all pipelines."""
    stages = np.split(np.arange(len(batch)), num_stages)
    parts = []
    for chunk in range(chunks):
        for stage, rows in enumerate(stages):
            of_stage = batch.chosen(rows)
            blocks = blocks_of_chunks(int(of_stage.layers[0]), chunks, is_first=stage == 0)
            parts.append(
                of_stage.with_columns(
                    layers=np.full(len(rows), blocks[chunk]),
                    **_treated(of_stage, sum(blocks[:chunk]), sum(blocks[: chunk + 1])),
                    has_embedding=of_stage.has_embedding * (chunk == 0),
                    has_head=of_stage.has_head * (chunk == chunks - 1),
                )
            )
    return StageBatch.joined(parts)


def _treated(batch: StageBatch, begin: int, end: int) -> dict[str, Column]:
    """How many of the blocks from ``begin`` to ``end`` of each stage have each treatment: first
    come plain blocks, then those of one treatment after the other."""
    names = counts_of_blocks()
    after = batch.layers - sum(batch.value(name) for name in names)
    found: dict[str, Column] = {}
    for name in names:
        before, after = after, after + batch.value(name)
        within = np.minimum(end, after) - np.maximum(begin, before)
        found[name] = np.maximum(within, 0).astype(np.int64)
    return found
