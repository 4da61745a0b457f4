"""The parts of plans as columns: each chunk of a stage is a candidate for a stage of its own."""

from collections.abc import Sequence

import numpy as np

from mistlab.schedule.stage_chunks import parts_of_plan
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch


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
