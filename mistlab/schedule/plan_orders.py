"""Finds the pipeline order of a plan, and the passes of each of its stages."""

from collections.abc import Sequence

from mistlab.schedule.order_text import PipelineOrder
from mistlab.schedule.orders import DEFAULT_ORDER, named_order
from mistlab.schedule.stage_passes import StagePasses, passes_of
from mistlab.values.plan import Plan


def order_of_plan(plan: Plan) -> PipelineOrder:
    """The order in which a plan's stages take their passes."""
    return named_order(DEFAULT_ORDER, plan.num_stages, plan.micro_batches)


def passes_of_plan(plan: Plan) -> Sequence[StagePasses]:
    """The passes of each stage of a plan."""
    return passes_of(order_of_plan(plan))
