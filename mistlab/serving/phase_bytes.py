"""The bytes that each rank receives and copies when serving switches layouts (parallel degrees),
from the actions of a schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from mistlab.plan.workload import ModelSpec, Workload
from mistlab.serving.model_tensors import tensor_sizes
from mistlab.serving.phase_schedule import Action, Change, Fetch, Store
from mistlab.serving.resharding import Layout, moved_bytes, moved_of_cache, width

BYTES_EACH = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """The bytes of weights, keys and values that one rank receives in each change of layout
    (parallel degrees), and the bytes that it copies to and from host memory.
    """

    weights: list[int]
    cache: list[int]
    stored: int
    fetched: int


def phase_bytes(
    actions: Sequence[Action], layouts: tuple[Layout, Layout], workload: Workload
) -> list[PhaseBytes]:
    """The bytes that each rank receives and copies in all actions of a schedule."""
    model, bytes_each = workload.model, BYTES_EACH[workload.precision]
    changes = [one for one in actions if isinstance(one, Change)]
    over = lcm(*(layout.tp for layout in layouts))
    sizes = tensor_sizes(model, bytes_each, over, workload.sequence_length)
    ways = {"decoding": layouts, "prompts": (layouts[1], layouts[0])}
    weights = {to: moved_bytes(*way, sizes) for to, way in ways.items()}
    token = 2 * model.layers * model.kv_heads * model.head_dim * bytes_each
    kept = [_kept_bytes(one, ways[one.to], model, token) for one in changes]
    stored = [[0] * layouts[0].gpus, [0] * layouts[0].gpus]
    now = layouts[0]
    for action in actions:
        if isinstance(action, Change):
            now = ways[action.to][1]
        elif isinstance(action, Store | Fetch):
            for rank in range(now.gpus):
                if now.replica_of(rank) == action.replica:
                    share = _share(now, rank, model)
                    stored[isinstance(action, Fetch)][rank] += int(share * token * action.tokens)
    return [
        PhaseBytes(
            weights=[weights[one.to][rank] for one in changes if layouts[0] != layouts[1]],
            cache=[each[rank] for each in kept],
            stored=stored[0][rank],
            fetched=stored[1][rank],
        )
        for rank in range(layouts[0].gpus)
    ]


def _share(layout: Layout, rank: int, model: ModelSpec) -> Fraction:
    """The share of a request's keys and values that one rank of the request's replica holds."""
    blocks = len(layout.blocks_of(rank, model.layers))
    return Fraction(blocks, model.layers) * width(layout.heads_of(rank, model.kv_heads))


def _kept_bytes(
    change: Change, way: tuple[Layout, Layout], model: ModelSpec, token: int
) -> list[int]:
    """The bytes of keys and values that each rank receives in one change of layout, for requests
    that stay on the GPUs.
    """
    taken = [Fraction(0)] * way[0].gpus
    for move in change.moved:
        before, after = (way[0], move.source), (way[1], move.target)
        shares = moved_of_cache(before, after, model.kv_heads, model.layers)
        for rank, share in enumerate(shares):
            taken[rank] += share * token * move.tokens
    return [int(one) for one in taken]
