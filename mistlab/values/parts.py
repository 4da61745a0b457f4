"""The parts of plans as columns: each chunk of a stage is a candidate for a stage of its own.

Axes: C candidates, S stages, P parts in order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.placement import Placement
from mistlab.schedule.stage_chunks import parts_of_plan
from mistlab.values.dimensions import counts_of_blocks
from mistlab.values.plan import Plan
from mistlab.values.stages import Column, StageBatch
from mistlab.values.stages_in_order import StagesInOrder


def batch_of_parts(plans: Sequence[Plan], placement: Placement) -> StageBatch:
    """The parts of plans, which lie so on the stages of each, in order, one plan after another."""
    parts = [(plan, part) for plan in plans for part in parts_of_plan(plan, placement)]
    first = np.cumsum([0, *(plan.num_stages for plan in plans)])[:-1]
    numbers = range(len(placement.stages))
    places = np.repeat(first, len(numbers))
    stages = StageBatch.of_plans(plans).chosen(places + np.array([one.stage for _, one in parts]))
    own = {
        "layers": [len(one.blocks) for _, one in parts],
        **{name: [one.treated[name] for _, one in parts] for name in parts[0][1].treated},
        "has_embedding": [int(one.has_embedding) for _, one in parts],
        "has_head": [int(one.has_head) for _, one in parts],
        "first_block": [one.blocks.start - 1 for _, one in parts],
        "comes_from": [placement.comes_from(part) for part in numbers] * len(plans),
        "goes_to": [placement.goes_to(part) for part in numbers] * len(plans),
        "shares_table": [int(placement.ends_meet)] * len(parts),
    }
    columns = {name: np.array(column) for name, column in own.items()}
    return StageBatch.of_columns({**stages.columns, **columns})


def with_ends(batch: StageBatch, placement: Placement) -> StageBatch:
    """Columns (S, C) of the stages of pipelines, with embedding and head where parts lie so."""
    each = len(batch) // placement.num_stages
    stage = np.arange(len(batch)) // each
    return batch.with_columns(
        has_embedding=(stage == placement.first_stage).astype(np.int64),
        has_head=(stage == placement.last_stage).astype(np.int64),
    )


def parts_of_stages(batch: StageBatch, placement: Placement) -> StageBatch:
    """The parts (P, C) of columns (S, C) of the stages of pipelines, part by part; a stage has as
    many blocks in all pipelines."""
    stages = np.split(np.arange(len(batch)), placement.num_stages)
    parts = []
    for part, (stage, chunk) in enumerate(placement.places):
        of_stage = batch.chosen(stages[stage])
        blocks = placement.shares_of_blocks(int(of_stage.layers[0]), stage)
        parts.append(
            of_stage.with_columns(
                layers=np.full(len(of_stage), blocks[chunk]),
                **_treated(of_stage, sum(blocks[:chunk]), sum(blocks[: chunk + 1])),
                has_embedding=np.full(len(of_stage), int(part == 0)),
                has_head=np.full(len(of_stage), int(part == len(placement.stages) - 1)),
                comes_from=placement.comes_from(part),
                goes_to=placement.goes_to(part),
                shares_table=int(placement.ends_meet),
            )
        )
    return StageBatch.joined(parts)


def chunk_of_loop(batch: StageBatch, chunk: int, chunks: int) -> StageBatch:
    """One chunk of each stage (C), of ``chunks``, where parts lie in a loop."""
    return _chunk(batch, chunk, chunks, rest_is_last=batch.has_embedding > 0)


def chunk_in_order(batch: StageBatch, chunk: int, in_order: StagesInOrder) -> StageBatch:
    """One chunk of each stage (C) of pipelines in an order."""
    placement = in_order.placement
    if placement.is_loop:
        return chunk_of_loop(batch, chunk, placement.chunks)
    own = _chunk(batch, chunk, placement.chunks, rest_is_last=np.zeros(len(batch), dtype=np.bool_))
    parts = [placement.of_stage(stage)[chunk] for stage in range(in_order.num_stages)]
    return own.with_columns(
        comes_from=np.array([placement.comes_from(part) for part in parts])[in_order.stage],
        goes_to=np.array([placement.goes_to(part) for part in parts])[in_order.stage],
        shares_table=int(placement.ends_meet),
    )


def _chunk(
    batch: StageBatch, chunk: int, chunks: int, *, rest_is_last: NDArray[np.bool_]
) -> StageBatch:
    """One chunk of each stage (C); blocks that cannot be divided evenly go to its last chunks, or
    else to its first ones."""
    each, rest = np.divmod(batch.layers, chunks)
    begin, end = (
        count * each
        + np.where(rest_is_last, np.maximum(count - (chunks - rest), 0), np.minimum(count, rest))
        for count in (chunk, chunk + 1)
    )
    return batch.with_columns(
        layers=end - begin,
        **_treated(batch, begin, end),
        has_embedding=batch.has_embedding * (chunk == 0),
        has_head=batch.has_head * (chunk == chunks - 1),
    )


def _treated(batch: StageBatch, begin: Column | int, end: Column | int) -> dict[str, Column]:
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
