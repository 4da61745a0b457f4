"""Pipelines of torchtitan: its schedules, and the names of modules in each part of the model."""

from collections.abc import Mapping, Sequence

from mistlab.core.values import InputError
from mistlab.export.found import Found
from mistlab.export.sections import Section
from mistlab.job.job import Job
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, TURNING, order_of_chunks
from mistlab.schedule.placement import Placement, even_shares, loop, turning
from mistlab.stages.stage_shape import parts_of_plan

# Torch's name for each order.
SCHEDULES: Mapping[str, str] = {
    DEFAULT_ORDER: "1F1B",
    "gpipe": "GPipe",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def pipeline_settings(job: Job, head: str = "output") -> dict[str, object]:
    """The settings of a job's pipeline, in whose model the head has this name; empty if there is
    none."""
    plan = job.plan
    if plan.num_stages == 1:
        return {}
    parts = [
        [f"layers.{block - 1}" for block in part.blocks]
        for part in parts_of_plan(plan, _placement(plan.order, plan.num_stages))
    ]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return {
        "pipeline_parallel_schedule": SCHEDULES[plan.order],
        "pipeline_parallel_microbatch_size": plan.stages[0].micro_batch,
        "module_fqns_per_model_part": parts,
    }


def _placement(order: str, num_stages: int, chunks: int = 1) -> Placement:
    return turning(num_stages) if order in TURNING else loop(num_stages, chunks)


def read_stages(section: Section, found: Found, layers: int) -> None:
    """The order and the blocks of the stages that a section says."""
    parts = section.get("module_fqns_per_model_part")
    schedule = section.get("pipeline_parallel_schedule", "1F1B")
    names = {name: order for order, name in SCHEDULES.items()}
    less = [
        section.whole(f"pipeline_parallel_{end}_stage_less_layers", minimum=0)
        for end in ("first", "last")
    ]
    if found.num_stages == 1:
        return
    if schedule in names:
        found.order = names[schedule]
    else:
        chunks = len(parts) // found.num_stages if parts else 2
        order = order_of_chunks(chunks)
        if schedule == "Interleaved1F1B" and order in INTERLEAVED:
            found.order = order
        else:
            text = f"{schedule}: no order of plans: taken as {DEFAULT_ORDER}"
            found.remark("ignored", "order", text)
    if parts:
        blocks = [sum(name.startswith("layers.") for name in part) for part in parts]
        if len(blocks) % found.num_stages:
            message = (
                f"parallelism.module_fqns_per_model_part: {len(blocks)} parts are no multiple of "
                f"{found.num_stages} stages: give each stage as many"
            )
            raise InputError(message)
        chunks = len(blocks) // found.num_stages
        placement = _placement(found.order, found.num_stages, chunks)
        if placement.chunks != chunks:
            message = (
                f"parallelism.module_fqns_per_model_part: {len(blocks)} parts, but {schedule} has "
                f"{placement.chunks} a stage: give {placement.chunks * found.num_stages}"
            )
            raise InputError(message)
        found.layers = _of_stages(blocks, placement)
    else:
        first, last = (1 if one is None else one for one in less)
        placement = _placement(found.order, found.num_stages)
        found.layers = _of_stages(_weighted(layers, len(placement.stages), first, last), placement)


def _of_stages(blocks: Sequence[int], placement: Placement) -> list[int]:
    """The blocks of each stage, from those of each part."""
    parts = map(placement.of_stage, range(placement.num_stages))
    return [sum(blocks[part] for part in own) for own in parts]


def _weighted(layers: int, stages: int, first: int, last: int) -> list[int]:
    """Blocks of stages (or parts) where embedding and head count as so many blocks."""
    counts = [*even_shares(layers + first + last, stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts
