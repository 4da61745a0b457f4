"""How much memory the low-rank adapters of a plan take, as a number and as text."""

from mistlab.core.units import GIB_BYTES
from mistlab.engines.engine import ENGINES
from mistlab.plan.adapter_sizes import adapter_bytes
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch

# A text mentions adapters if they take at least this many bytes.
WORTH_TELLING = GIB_BYTES


def bytes_of_adapters(workload: Workload, plan: Plan, stage: int) -> float:
    """The bytes of the weights, gradients and optimizer states of low-rank adapters on a GPU of a
    plan's stage; 0 if the workload trains all weights.
    """
    if workload.train != "adapters":
        return 0.0
    engine = workload.training_all.trained_by(ENGINES[plan.engine])
    memory = engine.memory_in(workload.precision, workload.optimizer)
    sizes = adapter_bytes(workload, StageBatch.of_plan(plan).value, memory)
    held = sizes.weights + sizes.gradients + sizes.optimizer
    return float(held[stage])


def adapters_called(workload: Workload, size_bytes: float) -> str:
    """What a workload's adapters take on a GPU, as a sentence without its full stop; empty if that
    is little.
    """
    if size_bytes < WORTH_TELLING:
        return ""
    experts = workload.model.experts
    where = "attention's products"
    if workload.adapter_targets == "all":
        where = "every product" + (f", those of {experts.count} experts too" if experts else "")
    return (
        f"{size_bytes / GIB_BYTES:.1f} GiB are weights, gradients and states of adapters of rank "
        f"{workload.rank} on {where}"
    )
