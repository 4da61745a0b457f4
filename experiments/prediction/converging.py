"""Forecasts how a plan's gradient reduction changes convergence, compared with an all-reduce in
every step.
"""

from dataclasses import replace

from experiments.bench.problem import predicted
from mistlab.economy.bill import model_parameters
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.reduction.forecast import Forecast
from mistlab.reduction.reduction_costs import PLAIN_REDUCTION


def forecast_of(job: Job, prediction: Prediction) -> Forecast:
    """The forecast of convergence for a plan whose workload names a gradient reduction."""
    work = job.workload
    plain = predicted(replace(job, workload=replace(work, reduction=PLAIN_REDUCTION)))
    data_ranks = job.plan.data_ranks[0]
    return Forecast(
        how=work.reduction,
        ranks=work.reduction.replicas_of(data_ranks) if work.averages_weights else data_ranks,
        parameters=model_parameters(work),
        tokens=work.global_batch * work.sequence_length,
        step_s=prediction.iteration_s,
        plain_step_s=plain.iteration_s if isinstance(plain, Prediction) else prediction.iteration_s,
    )
