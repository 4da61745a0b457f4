"""Predicts and tunes the distributed training of language models: descriptions of jobs, cost
models, and the Protocols of predictors and searchers.

A name is imported when it is first used, so that importing the package takes no time.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

# The package's public functions are defined in ``experiments``, a higher layer, so they are named
# here and imported on demand.
_LIBRARY = "experiments.library.functions"
# The package's public names by the module that defines them; ``make stubs`` writes their types for
# type checkers.
NAMES = {
    _LIBRARY: (
        "explain",
        "from_framework",
        "names",
        "predict",
        "predict_many",
        "predict_runs",
        "serve",
        "to_framework",
        "tune",
        "will_it_fit",
    ),
    "mistlab.core.values": (
        "FieldError",
        "InputError",
        "from_mapping",
        "near_matches",
        "to_mapping",
    ),
    "mistlab.job.job": ("Job", "dump_job", "job_from_mapping", "job_to_mapping", "load_job"),
    "mistlab.job.prediction": (
        "Environment",
        "Measurement",
        "MemoryByClass",
        "MemoryByPhase",
        "Prediction",
        "Predictor",
        "StageMeasurement",
        "StagePrediction",
    ),
    "mistlab.job.search": ("Budget", "Improvement", "Problem", "Searcher", "SearchResult"),
    "mistlab.machine.cluster": ("Cluster",),
    "mistlab.machine.hardware": ("Gpu", "Hardware", "Node", "PeakTflops", "Provenance", "Source"),
    "mistlab.plan.plan": ("Offload", "Plan", "StagePlan"),
    "mistlab.plan.space": ("OffloadRatios", "SearchSpace"),
    "mistlab.plan.workload": ("ModelSpec", "Workload"),
    "mistlab.schedule.slots": ("Action",),
    "mistlab.stages.stage_batch": ("StageBatch", "StageFigures"),
}
_MODULE_OF_NAME = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF_NAME)  # noqa: PLE0605 (a list all the same)

# Packages that are installed beside this one; a user's own folders may have the same names.
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
    """Import the sibling package of this name that is installed with this one, whatever comes first
    on the path.
    """
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
