"""Finds a form of a plan that a target can say and that fits, where the nearest one does not."""

from collections import defaultdict
from collections.abc import Iterator

from experiments.bench.problem import lacking_bytes, predicted_each
from experiments.interchange.single_changes import single_changes
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.export.given import changes
from mistlab.export.nearest import Nearest, nearest
from mistlab.export.target import Target
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from simulators.symbolic import SymbolicPredictor

# How many changes are made one after another.
STEPS = 4
# Changes that move memory from one stage to another, or nothing: each would be tried many times.
_LEFT_OUT = ("layers", "order")


def fitting_form(found: Nearest, near: Prediction, target: Target) -> Nearest | None:
    """The fastest form that fits, by as few changes of the nearest form as possible; none if a few
    changes make no form fit."""
    job, lacks = found.job, _most_lacking(found.job, near)
    what = f"{lacks / GIB_BYTES:.2f} GiB on a GPU" if lacks > 0 else "host memory"
    because = f"so that it fits; the nearest form lacks {what}"
    seen = {job}
    for _ in range(STEPS):
        forms = list(_predicted_forms(job, target, seen))
        fitting = [(form, prediction) for form, prediction in forms if prediction.fits]
        if fitting:
            best, _ = min(fitting, key=lambda pair: pair[1].iteration_s)
            told = changes(found.job, best, because)
            return Nearest(job=best, remarks=(*found.remarks, *told))
        if not forms:
            return None
        job, _ = min(forms, key=lambda pair: _most_lacking(*pair))
    return None


def _most_lacking(job: Job, prediction: Prediction) -> float:
    return max(lacking_bytes(job.cluster, job.plan, prediction))


def _predicted_forms(job: Job, target: Target, seen: set[Job]) -> Iterator[tuple[Job, Prediction]]:
    """Every form by a single change of a job that the target can say, with its prediction."""
    of_clusters: dict[Cluster, list[Job]] = defaultdict(list)
    for form in _forms(job, target):
        if form not in seen and form.workload == job.workload:
            seen.add(form)
            of_clusters[form.cluster].append(form)
    for cluster, forms in of_clusters.items():
        predictor = SymbolicPredictor(workload=job.workload, cluster=cluster)
        answers = predicted_each(predictor, [form.plan for form in forms])
        for form, answer in zip(forms, answers, strict=True):
            if isinstance(answer, Prediction):
                yield form, answer


def _forms(job: Job, target: Target) -> Iterator[Job]:
    for change in single_changes(job):
        if change.choice not in _LEFT_OUT:
            try:
                yield nearest(change.job, target).job
            except InputError:
                continue
