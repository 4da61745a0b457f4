"""The number of parameters of a model, as its layer graphs have them."""

from mistlab.symbolic.stage_model import StageModel
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.stages import StageBatch
from mistlab.values.workload import Workload


def model_parameters(workload: Workload) -> int:
    """The parameters of a workload's model, all of it on one GPU."""
    whole = StagePlan(
        layers=workload.model.layers, data_parallel=1, tensor_parallel=1, micro_batch=1
    )
    batch = StageBatch.of_plan(Plan(micro_batches=1, stages=(whole,)))
    return round(float(StageModel.of(workload).figures(batch).parameters[0]))
