"""Predictions of plans some of which may be refused: a prediction each, or its reason."""

from collections.abc import Sequence

from mistlab.values.errors import InputError
from mistlab.values.job import Job
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, Predictor
from simulators.symbolic import SymbolicPredictor

Answer = Prediction | InputError


def predicted(job: Job) -> Answer:
    """The closed form's prediction of a job, or why there is none."""
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return predicted_each(predictor, [job.plan])[0]


def predicted_each(predictor: Predictor, plans: Sequence[Plan]) -> Sequence[Answer]:
    """The answer to each plan: all at once, by halves where one is refused."""
    try:
        return predictor.predict_many(plans)
    except InputError as error:
        if len(plans) == 1:
            return [error]
        half = len(plans) // 2
        return [
            *predicted_each(predictor, plans[:half]),
            *predicted_each(predictor, plans[half:]),
        ]


def order_of(prediction: Prediction) -> tuple[bool, float]:
    """Sorts predictions, the best first: plans that fit by time, then others by memory."""
    by = prediction.iteration_s if prediction.fits else prediction.peak_reserved_bytes
    return not prediction.fits, by
