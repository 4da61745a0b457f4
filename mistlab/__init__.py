"""Values, catalogues, costs and Protocols for tuning the distributed training of language models.

Names are imported when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mistlab.cluster import Cluster
    from mistlab.errors import FieldError, InputError, near_matches
    from mistlab.hardware import Gpu, Hardware, Node, PeakTflops, Provenance, Source
    from mistlab.job import Job, dump_job, job_from_mapping, job_to_mapping, load_job
    from mistlab.measurement import Environment, Measurement, StageMeasurement
    from mistlab.model import ModelSpec
    from mistlab.plan import Offload, Plan, StagePlan
    from mistlab.predict import (
        MemoryByClass,
        MemoryByPhase,
        Prediction,
        Predictor,
        StagePrediction,
    )
    from mistlab.schedule import Action
    from mistlab.search import Budget, Improvement, Problem, Searcher, SearchResult
    from mistlab.space import OffloadRatios, SearchSpace
    from mistlab.stages import StageBatch, StageFigures
    from mistlab.value import from_mapping, to_mapping
    from mistlab.workload import Workload

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
    "cluster": ("Cluster",),
    "errors": ("FieldError", "InputError", "near_matches"),
    "hardware": ("Gpu", "Hardware", "Node", "PeakTflops", "Provenance", "Source"),
    "job": ("Job", "dump_job", "job_from_mapping", "job_to_mapping", "load_job"),
    "measurement": ("Environment", "Measurement", "StageMeasurement"),
    "model": ("ModelSpec",),
    "plan": ("Offload", "Plan", "StagePlan"),
    "predict": (
        "MemoryByClass",
        "MemoryByPhase",
        "Prediction",
        "Predictor",
        "StagePrediction",
    ),
    "schedule": ("Action",),
    "search": ("Budget", "Improvement", "Problem", "SearchResult", "Searcher"),
    "space": ("OffloadRatios", "SearchSpace"),
    "stages": ("StageBatch", "StageFigures"),
    "value": ("from_mapping", "to_mapping"),
    "workload": ("Workload",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"{__name__}.{module}"), name)
