"""Predicts and tunes the distributed training of language models: values, costs and Protocols.

A name is imported when it is first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mistlab.machine.cluster import Cluster
    from mistlab.machine.hardware import Gpu, Hardware, Node, PeakTflops, Provenance, Source
    from mistlab.schedule.slot_table import Action
    from mistlab.values.errors import FieldError, InputError, near_matches
    from mistlab.values.job import Job, dump_job, job_from_mapping, job_to_mapping, load_job
    from mistlab.values.measurement import Environment, Measurement, StageMeasurement
    from mistlab.values.model import ModelSpec
    from mistlab.values.plan import Offload, Plan, StagePlan
    from mistlab.values.prediction import (
        MemoryByClass,
        MemoryByPhase,
        Prediction,
        Predictor,
        StagePrediction,
    )
    from mistlab.values.search import Budget, Improvement, Problem, Searcher, SearchResult
    from mistlab.values.space import OffloadRatios, SearchSpace
    from mistlab.values.stages import StageBatch, StageFigures
    from mistlab.values.value import from_mapping, to_mapping
    from mistlab.values.workload import Workload

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
    "Action": "mistlab.schedule.slot_table",
    "Budget": "mistlab.values.search",
    "Cluster": "mistlab.machine.cluster",
    "Environment": "mistlab.values.measurement",
    "FieldError": "mistlab.values.errors",
    "Gpu": "mistlab.machine.hardware",
    "Hardware": "mistlab.machine.hardware",
    "Improvement": "mistlab.values.search",
    "InputError": "mistlab.values.errors",
    "Job": "mistlab.values.job",
    "Measurement": "mistlab.values.measurement",
    "MemoryByClass": "mistlab.values.prediction",
    "MemoryByPhase": "mistlab.values.prediction",
    "ModelSpec": "mistlab.values.model",
    "Node": "mistlab.machine.hardware",
    "Offload": "mistlab.values.plan",
    "OffloadRatios": "mistlab.values.space",
    "PeakTflops": "mistlab.machine.hardware",
    "Plan": "mistlab.values.plan",
    "Prediction": "mistlab.values.prediction",
    "Predictor": "mistlab.values.prediction",
    "Problem": "mistlab.values.search",
    "Provenance": "mistlab.machine.hardware",
    "SearchResult": "mistlab.values.search",
    "SearchSpace": "mistlab.values.space",
    "Searcher": "mistlab.values.search",
    "Source": "mistlab.machine.hardware",
    "StageBatch": "mistlab.values.stages",
    "StageFigures": "mistlab.values.stages",
    "StageMeasurement": "mistlab.values.measurement",
    "StagePlan": "mistlab.values.plan",
    "StagePrediction": "mistlab.values.prediction",
    "Workload": "mistlab.values.workload",
    "dump_job": "mistlab.values.job",
    "from_mapping": "mistlab.values.value",
    "job_from_mapping": "mistlab.values.job",
    "job_to_mapping": "mistlab.values.job",
    "load_job": "mistlab.values.job",
    "near_matches": "mistlab.values.errors",
    "to_mapping": "mistlab.values.value",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(module), name)
