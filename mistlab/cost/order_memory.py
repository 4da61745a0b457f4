"""What stages hold of micro-batches in an order of their own, beyond what the closed form counts.

The closed form counts as many micro-batches as are held at once, all blocks alike, and the head's
activations of one. Chunks hold unlike layers; a head may hold several micro-batches; and where the
gradients of weights have passes of their own, blocks that were computed again stay until then.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.plan_orders import in_flight_of_plan, passes_of_plan
from mistlab.schedule.stage_chunks import StagePart, parts_of_plan
from mistlab.schedule.stage_passes import StagePasses
from mistlab.symbolic.layer import sum_name
from mistlab.values.plan import Plan

# Bytes of one layer of each kind: saved for the backward pass, and kept where it is recomputed.
_Sums = Mapping[str, float]


def unlike_bytes(plan: Plan, sums: Mapping[str, NDArray[np.float64]]) -> list[float]:
    """Bytes on a GPU of each stage that the closed form leaves out, or counts too many.

    ``sums`` are of the layers of each of the plan's stages, by ``sum_name``.
    """
    passes = passes_of_plan(plan)
    parts = parts_of_plan(plan, passes[0].chunks)
    found = []
    for stage, held in enumerate(in_flight_of_plan(plan)):
        of_stage = {name: float(column[stage]) for name, column in sums.items()}
        own = [_Held(part, of_stage, plan) for part in parts if part.stage == stage]
        head = sum(one.head for one in own)
        counted = held * sum(one.between - one.head for one in own) + head
        found.append(_most(passes[stage], own) - counted)
    return found


class _Held:
    """Bytes of a chunk that are on the GPU between its forward and its backward pass, and between
    that and its pass for weights."""

    def __init__(self, part: StagePart, sums: _Sums, plan: Plan) -> None:
        saved, again = (sums[sum_name("block", name)] for name in _KEPT)
        blocks, away = len(part.blocks), plan.stages[part.stage].offload.activations
        kept = (blocks - part.checkpointed) * saved + part.checkpointed * again
        self.head = part.has_head * sums[sum_name("head", _KEPT[0])]
        ends = part.has_embedding * sums[sum_name("embedding", _KEPT[0])] + self.head
        self.between = (1 - away) * kept + ends
        self.afterwards = blocks * saved + ends


_KEPT = ("saved_bytes", "checkpointed_bytes")


def _most(passes: StagePasses, chunks: Sequence[_Held]) -> float:
    held = most = 0.0
    for one in passes:
        of = chunks[one.chunk]
        if one.kind == "F":
            held += of.between
        elif one.kind == "W":
            held -= of.afterwards
        else:
            held += (of.afterwards if passes.splits_backward else 0.0) - of.between
        most = max(most, held)
    return most
