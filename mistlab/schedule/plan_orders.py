"""The order of a plan's passes: by its name, or read from the file that the plan names.

A file that is longer than any order of the plan's passes is refused by its size, before it is read.
"""

from codecs import BOM_UTF8
from dataclasses import replace
from pathlib import Path

from mistlab.schedule.checked_orders import named_order, order_of_text
from mistlab.schedule.order_text import PipelineOrder
from mistlab.schedule.orders import (
    DEFAULT_ORDER,
    ORDERS,
    TURNING,
    fewer_micro_batches,
    order_problem,
)
from mistlab.schedule.placement import Placement, loop, most_chunks
from mistlab.schedule.stage_passes import StagePasses, passes_of
from mistlab.values.errors import InputError, refuse
from mistlab.values.plan import Plan

# Room for more than one blank between words, in times of what the words need.
_ROOM = 4
# F, B and W.
_KINDS = 3
# F, m and a blank.
_MARKS = 3


def check_order(plan: Plan) -> None:
    """Refuse the order of a plan's passes if it cannot run; named orders need not be made."""
    if plan.order not in ORDERS:
        order_of_plan(plan)
        return
    most = most_chunks([stage.layers for stage in plan.stages], turns=plan.order in TURNING)
    if problem := order_problem(plan.order, plan.num_stages, plan.micro_batches, most):
        refuse("plan.order", f"{plan.order}, but {problem}")


def order_of_plan(plan: Plan) -> PipelineOrder:
    """The order in which a plan's stages take their passes; refuses one that cannot run."""
    if plan.order in ORDERS:
        check_order(plan)
        return named_order(plan.order, plan.num_stages, plan.micro_batches)
    try:
        text = _text(Path(plan.order), _most_bytes(plan))
        order = order_of_text(text, plan.num_stages, plan.micro_batches)
        _check_chunks(plan, order)
    except InputError as error:
        refuse("plan.order", f"{plan.order}: {error}")
    return order


def passes_of_plan(plan: Plan) -> tuple[StagePasses, ...]:
    """The passes of each stage of a plan."""
    return passes_of(order_of_plan(plan))


def shortened(plan: Plan) -> Plan:
    """The plan with fewer micro-batches, if its order repeats itself: stages hold as much."""
    fewer = fewer_micro_batches(plan.order, plan.num_stages, plan.micro_batches)
    return plan if fewer == plan.micro_batches else replace(plan, micro_batches=fewer)


def ends_of_plan(plan: Plan) -> tuple[int, int]:
    """The stages of a plan that have the embedding and the head."""
    if plan.order == DEFAULT_ORDER:
        return 0, plan.num_stages - 1
    placement = placement_of_plan(plan)
    return placement.first_stage, placement.last_stage


def placement_of_plan(plan: Plan) -> Placement:
    """Where the parts of a plan's model lie."""
    if plan.order == DEFAULT_ORDER:
        return loop(plan.num_stages)
    return order_of_plan(shortened(plan)).placement


def _check_chunks(plan: Plan, order: PipelineOrder) -> None:
    placement = order.placement
    for number, stage in enumerate(plan.stages):
        if stage.layers < placement.blocks_needed(number):
            message = (
                f"has {order.chunks} chunks, plan.stages[{number}] {stage.layers} layers: give the "
                "stage as many layers, or the order fewer chunks"
            )
            raise InputError(message)


def _text(path: Path, most_bytes: int) -> str:
    if path.is_dir():
        message = "is a directory: give the path of a file"
        raise InputError(message)
    if path.exists() and not path.is_file():
        message = "is no file with an end: give the path of a plain file"
        raise InputError(message)
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
            size = path.stat().st_size
    except OSError as error:
        message = f"cannot be read ({error.strerror}): give the path of an order file"
        raise InputError(message) from None
    if len(content) > most_bytes:
        message = (
            f"has {size:,} bytes, all passes of the plan need {most_bytes // _ROOM:,} at most: "
            "give an order of this plan"
        )
        raise InputError(message)
    try:
        return content.removeprefix(BOM_UTF8).decode("ascii")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"line {line}: is not text: write passes like F0m3, separated by blanks"
        raise InputError(message) from None


def _most_bytes(plan: Plan) -> int:
    """A size larger than the text of any order of a plan; a stage has at most a chunk for each
    block."""
    chunks = min(stage.layers for stage in plan.stages)
    word = _MARKS + len(str(chunks)) + len(str(plan.micro_batches))
    return _ROOM * word * _KINDS * chunks * plan.micro_batches * plan.num_stages
