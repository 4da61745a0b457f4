"""Predictions of plans some of which may be refused: a prediction each, or its reason."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from mistlab.core.files import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.memory import host_bytes_over, room_of_plan
from mistlab.job.job import Job
from mistlab.job.prediction import (
    MemoryByClass,
    MemoryByPhase,
    Prediction,
    Predictor,
    StagePrediction,
)
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
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


# Which stage of a predicted plan binds memory, by how much, and what fills it.


def fullest_words(job: Job, prediction: Prediction) -> Iterator[str]:
    """The stage whose GPU has least room left or lacks most, and a node that lacks host memory."""
    lacks = lacking_bytes(job.cluster, job.plan, prediction)
    number = lacks.index(max(lacks))
    fullest = prediction.stages[number]
    size = fullest.peak_reserved_bytes / GIB_BYTES
    room = (fullest.peak_reserved_bytes - lacks[number]) / GIB_BYTES
    rest = abs(lacks[number]) / GIB_BYTES
    lacking = sum(one > 0 for one in lacks)
    what = f"takes {size:.2f} of {room:.2f} GiB"
    if not lacking:
        begin = f"stage {number} binds memory: it {what}, {rest:.2f} are left"
    else:
        others = "" if lacking == 1 else f", and {lacking} stages in all lack memory"
        begin = f"stage {number} lacks {rest:.2f} GiB: it {what}{others}"
    yield f"{begin}; {_held_words(fullest)}"
    over = host_bytes_over(job.plan, prediction, job.cluster)
    if over > 0:
        yield f"the fullest node lacks {over / GIB_BYTES:.2f} GiB of host memory"


def _held_words(stage: StagePrediction) -> str:
    """When a stage's GPU is fullest, and what holds most of it then."""
    phase, _ = largest(stage.memory_by_phase)
    held, size = largest(stage.memory)
    return f"most in the {phase} phase, by {held} ({size / GIB_BYTES:.2f} GiB)"


def lacking_bytes(cluster: Cluster, plan: Plan, prediction: Prediction) -> list[float]:
    """The bytes by which each stage exceeds the room on its GPUs; negative where room is left."""
    rooms = room_of_plan(cluster, plan).tolist()
    pairs = zip(prediction.stages, rooms, strict=True)
    return [stage.peak_reserved_bytes - room for stage, room in pairs]


def largest(sizes: MemoryByClass | MemoryByPhase) -> tuple[str, int]:
    """The largest field of a value of bytes."""
    named = {entry.name: getattr(sizes, entry.name) for entry in fields(sizes)}
    name = max(named, key=lambda field: named[field])
    return name, named[name]
