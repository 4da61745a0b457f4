"""Makes a small plan of the same structure, with sizes that a CPU computes at once.

The small plan keeps everything that decides a rank's tasks, their waits and their messages: stages,
degrees, ZeRO levels, ratios, precision and padding. Widths shrink. So do the numbers of blocks and
micro-batches, by even numbers in each chunk and each repetition of the order, because tasks take
turns in rings of two buffers.
"""

from dataclasses import dataclass, replace
from math import gcd, lcm

from mistlab.schedule.orders import REPEATING, is_order_path, repeat_of
from mistlab.schedule.plan_orders import placement_of_plan
from mistlab.values.dimensions import counts_of_blocks
from mistlab.values.model import ModelSpec
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.workload import Workload

MOST_BLOCKS = 6
MOST_BLOCKS_OF_CHUNK = 3
# Micro-batches beyond the number that fills the pipeline.
MOST_BATCHES = 4
MOST_SEQUENCE = 16
HEAD_DIMS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlan:
    """A small workload, its plan, and sentences about the blocks and micro-batches left out."""

    workload: Workload
    plan: Plan
    left_out: tuple[str, ...]


def small(workload: Workload, plan: Plan) -> SmallPlan:
    """The small plan of a plan."""
    chunks = placement_of_plan(plan).chunks
    # An order that a file holds is of all of the plan's micro-batches.
    batches = plan.micro_batches
    if not is_order_path(plan.order):
        batches = _few_batches(plan)
    shared = gcd(*(stage.micro_batch for stage in plan.stages))
    stages = tuple(_small_stage(stage, shared, chunks) for stage in plan.stages)
    left_out = []
    blocks, most_blocks = (max(one.layers for one in of) for of in (stages, plan.stages))
    if blocks != most_blocks:
        left_out.append(f"{blocks} blocks stand for {most_blocks} of a stage")
    if batches != plan.micro_batches:
        left_out.append(f"{batches} micro-batches stand for {plan.micro_batches}")
    degrees = lcm(*(stage.tensor_parallel for stage in plan.stages))
    first = stages[0]
    small_workload = replace(
        workload,
        model=_small_model(workload.model, degrees, sum(stage.layers for stage in stages)),
        sequence_length=min(workload.sequence_length, MOST_SEQUENCE),
        global_batch=first.micro_batch * first.data_parallel * batches,
    )
    return SmallPlan(
        workload=small_workload,
        plan=replace(plan, micro_batches=batches, stages=stages),
        left_out=tuple(left_out),
    )


def _few_batches(plan: Plan) -> int:
    """Fewer micro-batches; an order that repeats itself keeps two groups as large as the pipeline
    at least."""
    repeat = repeat_of(plan.order, plan.num_stages)
    most = plan.num_stages + MOST_BATCHES
    if plan.order in REPEATING:
        most = 2 * plan.num_stages + repeat - 1
    return _at_most(plan.micro_batches, most, repeat)


def _small_stage(stage: StagePlan, shared: int, chunks: int) -> StagePlan:
    most = max(MOST_BLOCKS, MOST_BLOCKS_OF_CHUNK * chunks)
    layers = _at_most(stage.layers, most, 2 * chunks)
    counts = {name: stage.degree(name) for name in counts_of_blocks()}
    if layers < stage.layers:
        # Of blocks treated in one way some stay, and some of the others.
        some = layers // (1 + sum(count > 0 for count in counts.values()))
        counts = {
            name: {0: 0, stage.layers: layers}.get(count, some) for name, count in counts.items()
        }
    changes = {**counts, "layers": layers, "micro_batch": stage.micro_batch // shared}
    return stage.with_values(changes)


def _small_model(model: ModelSpec, degrees: int, layers: int) -> ModelSpec:
    """Heads and widths as small as all tensor-parallel degrees allow."""
    heads = degrees if model.kv_heads == model.heads else 2 * degrees
    head_dim = next(
        (size for size in HEAD_DIMS if (size * model.rotary_fraction) % 2 == 0), model.head_dim
    )
    hidden = heads * head_dim
    vocab = -(-96 // degrees) * degrees
    return replace(
        model,
        layers=layers,
        heads=heads,
        kv_heads=degrees,
        head_dim=head_dim,
        hidden=hidden,
        ffn=2 * hidden,
        # If the vocabulary is padded, one token more needs padding too.
        vocab=vocab + (model.vocab % degrees > 0),
    )


def _at_most(count: int, most: int, step: int) -> int:
    """``count`` made at most ``most``, by a multiple of ``step``.

    >>> _at_most(9, 6, 2), _at_most(5, 6, 2)
    (5, 5)
    """
    return count if count <= most else most - (most - count) % step
