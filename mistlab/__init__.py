"""Predicts and tunes the distributed training of language models: values, costs and Protocols.

A name is imported when it is first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mistlab.core.values import FieldError, InputError, from_mapping, near_matches, to_mapping
    from mistlab.job.job import Job, dump_job, job_from_mapping, job_to_mapping, load_job
    from mistlab.job.prediction import (
        Environment,
        Measurement,
        MemoryByClass,
        MemoryByPhase,
        Prediction,
        Predictor,
        StageMeasurement,
        StagePrediction,
    )
    from mistlab.job.search import Budget, Improvement, Problem, Searcher, SearchResult
    from mistlab.machine.cluster import Cluster
    from mistlab.machine.hardware import Gpu, Hardware, Node, PeakTflops, Provenance, Source
    from mistlab.plan.plan import Offload, Plan, StagePlan
    from mistlab.plan.space import OffloadRatios, SearchSpace
    from mistlab.plan.workload import ModelSpec, Workload
    from mistlab.schedule.slots import Action
    from mistlab.stages.stage_batch import StageBatch, StageFigures

__all__ = [
    "Action",
    "Budget",
    "Cluster",
    "Environment",
    "FieldError",
    "Gpu",
    "Hardware",
    "Improvement",
    "InputError",
    "Job",
    "Measurement",
    "MemoryByClass",
    "MemoryByPhase",
    "ModelSpec",
    "Node",
    "Offload",
    "OffloadRatios",
    "PeakTflops",
    "Plan",
    "Prediction",
    "Predictor",
    "Problem",
    "Provenance",
    "SearchResult",
    "SearchSpace",
    "Searcher",
    "Source",
    "StageBatch",
    "StageFigures",
    "StageMeasurement",
    "StagePlan",
    "StagePrediction",
    "Workload",
    "dump_job",
    "from_mapping",
    "job_from_mapping",
    "job_to_mapping",
    "load_job",
    "near_matches",
    "to_mapping",
]

_MODULE_OF_NAME = {
    "Action": "mistlab.schedule.slots",
    "Budget": "mistlab.job.search",
    "Cluster": "mistlab.machine.cluster",
    "Environment": "mistlab.job.prediction",
    "FieldError": "mistlab.core.values",
    "Gpu": "mistlab.machine.hardware",
    "Hardware": "mistlab.machine.hardware",
    "Improvement": "mistlab.job.search",
    "InputError": "mistlab.core.values",
    "Job": "mistlab.job.job",
    "Measurement": "mistlab.job.prediction",
    "MemoryByClass": "mistlab.job.prediction",
    "MemoryByPhase": "mistlab.job.prediction",
    "ModelSpec": "mistlab.plan.workload",
    "Node": "mistlab.machine.hardware",
    "Offload": "mistlab.plan.plan",
    "OffloadRatios": "mistlab.plan.space",
    "PeakTflops": "mistlab.machine.hardware",
    "Plan": "mistlab.plan.plan",
    "Prediction": "mistlab.job.prediction",
    "Predictor": "mistlab.job.prediction",
    "Problem": "mistlab.job.search",
    "Provenance": "mistlab.machine.hardware",
    "SearchResult": "mistlab.job.search",
    "SearchSpace": "mistlab.plan.space",
    "Searcher": "mistlab.job.search",
    "Source": "mistlab.machine.hardware",
    "StageBatch": "mistlab.stages.stage_batch",
    "StageFigures": "mistlab.stages.stage_batch",
    "StageMeasurement": "mistlab.job.prediction",
    "StagePlan": "mistlab.plan.plan",
    "StagePrediction": "mistlab.job.prediction",
    "Workload": "mistlab.plan.workload",
    "dump_job": "mistlab.job.job",
    "from_mapping": "mistlab.core.values",
    "job_from_mapping": "mistlab.job.job",
    "job_to_mapping": "mistlab.job.job",
    "load_job": "mistlab.job.job",
    "near_matches": "mistlab.core.values",
    "to_mapping": "mistlab.core.values",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(module), name)
