"""Predicts and tunes the distributed training of language models: values, costs and Protocols.

A name is imported when it is first used, so that importing the package takes no time.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.library.functions import (
        explain,
        from_framework,
        names,
        predict,
        predict_many,
        predict_runs,
        serve,
        to_framework,
        tune,
        will_it_fit,
    )
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
    "explain",
    "from_framework",
    "from_mapping",
    "job_from_mapping",
    "job_to_mapping",
    "load_job",
    "names",
    "near_matches",
    "predict",
    "predict_many",
    "predict_runs",
    "serve",
    "to_framework",
    "to_mapping",
    "tune",
    "will_it_fit",
]

# The functions stand above all rooms, so they are named here and not imported.
_LIBRARY = "experiments.library.functions"
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
    "explain": _LIBRARY,
    "from_framework": _LIBRARY,
    "names": _LIBRARY,
    "predict": _LIBRARY,
    "predict_many": _LIBRARY,
    "predict_runs": _LIBRARY,
    "serve": _LIBRARY,
    "to_framework": _LIBRARY,
    "tune": _LIBRARY,
    "will_it_fit": _LIBRARY,
    "near_matches": "mistlab.core.values",
    "to_mapping": "mistlab.core.values",
}


# Packages that stand beside this one, whose names a user's own folders may have, too.
_BESIDE = ("experiments", "runtime", "searchers", "simulators")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("mistlab")
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    if module == _LIBRARY:
        for package in _BESIDE:
            _bind(package)
    return getattr(import_module(module), name)


def _bind(package: str) -> None:
    """Import the package of this name that stands beside this one, whatever comes first on the
    path."""
    root = str(Path(__file__).parents[1])
    spec = PathFinder.find_spec(package, [root])
    there = sys.modules.get(package)
    if there is not None and spec is not None and there.__file__ != spec.origin:
        message = (
            f"{package} is {there.__file__} in this process, not mistlab's package of that name: "
            f"ask before you import it, rename it, or start the mistlab command"
        )
        raise ImportError(message)
    if there is None and spec is not None and spec.loader is not None:
        sys.modules[package] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
