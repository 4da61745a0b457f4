"""Plans of stages with several chunks, drawn from everything that a plan can say."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.placement import Placement, loop, turning
from tests.pipeline_orders import drawn
from tests.runtime.worlds import ratios, stage, workload

# Parts that go round, turn at the last stage, turn twice, and do both.
PLACEMENTS = {
    "loop of two stages": loop(2, 2),
    "loop of three stages": loop(3, 2),
    "V of two stages": turning(2),
    "V of three stages": turning(3),
    "W": Placement((0, 1, 1, 0, 0, 1, 1, 0)),
    "loop, then back": Placement((0, 1, 2, 0, 1, 2, 2, 1, 0)),
    "one stage": loop(1, 2),
}


def ordered(plan: Plan, text: str, folder: Path) -> Plan:
    """The plan with an order of its own, which a file of a folder holds."""
    file = folder / "order.txt"
    file.write_text(text)
    return replace(plan, order=str(file))


def any_plan(
    placement: Placement, seed: int, folder: Path, *, splits: bool = False
) -> tuple[Workload, Plan]:
    """A workload, and a plan of it drawn from everything that a plan can say. Its order is in a
    file of a folder; if it ``splits``, some stages have passes for weights."""
    draw = np.random.default_rng(seed)
    micro_batches = int(draw.choice([2, 4, 5]))
    stages = []
    for number in range(placement.num_stages):
        layers = max(1, placement.blocks_needed(number)) + int(draw.integers(0, 3))
        data = int(draw.choice([1, 2]))
        stages.append(
            stage(
                layers,
                data_parallel=data,
                tensor_parallel=int(draw.choice([1, 1, 2])),
                micro_batch=2 // data,
                zero=int(draw.integers(0, 4)),
                checkpointed_layers=int(draw.integers(0, layers + 1)),
                offload=ratios(*(float(draw.choice([0.0, 0.37, 0.5, 1.0])) for _ in range(4))),
            )
        )
    splitting = [stage for stage in range(placement.num_stages) if draw.random() < 0.7]
    text = drawn(placement, micro_batches, seed, splitting=splitting if splits else ())
    plan = ordered(Plan(micro_batches=micro_batches, stages=tuple(stages)), text, folder)
    work = workload(
        ("gpt", "llama", "falcon")[seed % 3],
        layers=sum(one.layers for one in stages),
        kv_heads=2,
        tied_embeddings=seed % 2 == 0,
        batch=2 * micro_batches,
        vocab=97 if seed % 4 < 2 else 96,
    )
    return work, plan
