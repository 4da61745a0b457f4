"""Which stage of a predicted plan binds memory, by how much, and what fills it."""

from collections.abc import Iterator
from dataclasses import fields

from mistlab.core.files import GIB_BYTES
from mistlab.cost.memory import host_bytes_over, room_of_plan
from mistlab.job.job import Job
from mistlab.job.prediction import MemoryByClass, MemoryByPhase, Prediction, StagePrediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan


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
