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

_NAMES_OF_MODULE = {
    "mistlab.machine.cluster": ("Cluster",),
    "mistlab.values.errors": ("FieldError", "InputError", "near_matches"),
    "mistlab.machine.hardware": ("Gpu", "Hardware", "Node", "PeakTflops", "Provenance", "Source"),
    "mistlab.values.job": ("Job", "dump_job", "job_from_mapping", "job_to_mapping", "load_job"),
    "mistlab.values.measurement": ("Environment", "Measurement", "StageMeasurement"),
    "mistlab.values.model": ("ModelSpec",),
    "mistlab.values.plan": ("Offload", "Plan", "StagePlan"),
    "mistlab.values.prediction": (
        "MemoryByClass",
        "MemoryByPhase",
        "Prediction",
        "Predictor",
        "StagePrediction",
    ),
    "mistlab.schedule.slot_table": ("Action",),
    "mistlab.values.search": ("Budget", "Improvement", "Problem", "SearchResult", "Searcher"),
    "mistlab.values.space": ("OffloadRatios", "SearchSpace"),
    "mistlab.values.stages": ("StageBatch", "StageFigures"),
    "mistlab.values.value": ("from_mapping", "to_mapping"),
    "mistlab.values.workload": ("Workload",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(module), name)
