"""Which jobs the runtime can run, found out before anything is allocated or joined."""

from mistlab.engines.table import ENGINES
from mistlab.values.errors import InputError
from mistlab.values.job import Job
from mistlab.values.workload import Workload


def check_runnable(job: Job) -> None:
    """Refuse a plan of another engine, and a model that the runtime has no layers for."""
    if not ENGINES[job.plan.engine].runs_here:
        message = (
            f"plan.engine: {job.plan.engine} runs in its own framework: give mistlab to run here"
        )
        raise InputError(message)
    check_model(job.workload)


def check_model(workload: Workload) -> None:
    """Refuse a model that the runtime has no layers for."""
    model = workload.model
    if model.family == "custom":
        message = "workload.model: a traced model cannot be run: give a family of the catalogue"
        raise InputError(message)
    if model.dropout:
        message = f"workload.model: dropout {model.dropout:g} cannot be run: give dropout: 0"
        raise InputError(message)
