"""Fitted constants of serving engines: factors on parts of a step, and times that kernels do not
explain.

Each constant is a product over levels: its default, and factors of the engine, of the engine on a
GPU, of a model in a precision, and of both. A level without a fit has the factor 1, so that a GPU
or a model that no run has takes what the wider levels say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.units import NANOSECONDS
from mistlab.serving.gpu_facts import constants_data, is_native, serving_data

# The default of each constant, before any fit.
DEFAULTS: Mapping[str, float] = {
    # Factors on parts of a step: GEMMs, experts, attention, communication, and minimum times of
    # kernels, which tables measure outside of CUDA graphs. Then factors on a whole decode step and
    # prefill pass.
    "products": 1.0,
    "experts": 1.0,
    "attention": 1.0,
    "links": 1.0,
    "floors": 0.5,
    "decode": 1.0,
    "prefill": 1.2,
    # Seconds: of a small kernel inside a CUDA graph with the gaps around it, of the host that
    # nothing hides in a step, and of the host for each sequence in a step.
    "kernels": 6e-6,
    "host": 3e-4,
    "sequence": 1e-5,
    # For the time to first token: seconds of HTTP and tokenising, a factor on prefill, steps
    # waited, and the share of all other prompts that arrive at the same time.
    "first": 0.04,
    "prompt": 1.0,
    "steps": 1.5,
    "burst": 0.1,
    # The share of other prompts' prefill time that delays the steps of decoding requests.
    "stall": 1.0,
    # A factor on the whole time to first token.
    "wait": 1.0,
    # The share of a GPU's memory that weights and caches may take.
    "memory": 0.88,
}

# Seconds to serialise and to read a token id, in versions whose driver sends those of all running
# requests to each worker in every step. They are facts, not fitted; elsewhere they are 0.
MESSAGES = ("written", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What identifies a measured run's constants: engine, version, GPU, model, precision, and the
    kind of measurement.
    """

    engine: str
    version: str
    gpu: str
    model: str
    weights: str
    kind: str = "closed loop"
    mode: str = "aggregated"


# The levels of constants, from general to specific: each has a name, and gives a run's key at that
# level.
def keys_of(run: ServedRun) -> dict[str, str]:
    """For each level of constants, the key by which a run finds its factors there."""
    weights = run.weights if is_native(run.weights, run.gpu) else f"{run.weights} unpacked"
    return {
        "engine": run.engine,
        "mode": f"{run.engine} {run.mode}",
        "gpu": f"{run.engine} on {run.gpu}",
        "version": f"{run.engine} {run.version}",
        "kind": f"{run.engine} {run.kind}",
        "machine": run.gpu,
        "precision": f"{run.engine} in {weights}",
        "model": f"{run.model} in {weights}",
        "engine and model": f"{run.engine}: {run.model} in {weights}",
        "all": f"{run.engine} on {run.gpu}: {run.model} in {weights}",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """Fitted factors on the constants, by level, by key at that level, and by constant."""

    factors: Mapping[str, Mapping[str, Mapping[str, float]]]

    def of(self, runs: Sequence[ServedRun]) -> dict[str, Floats]:
        """The constants for each of these runs, as a column for each constant."""
        known = {run: self._one(run) for run in dict.fromkeys(runs)}
        names = (*DEFAULTS, *MESSAGES)
        return {name: np.array([known[run][name] for run in runs]) for name in names}

    def _one(self, run: ServedRun) -> dict[str, float]:
        values = dict(DEFAULTS)
        for level, key in keys_of(run).items():
            for name, factor in self.factors.get(level, {}).get(key, {}).items():
                values[name] *= factor
        values["memory"] = min(values["memory"], 0.97)
        facts = serving_data()["versions"].get(f"{run.engine} {run.version}", {})
        return values | {name: facts.get(f"{name}_ns", 0.0) * NANOSECONDS for name in MESSAGES}


def fitted_constants() -> EngineConstants:
    """The fitted constants that the catalogue holds."""
    return EngineConstants(factors=constants_data()["constants"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeBounds:
    """Bounds on measured over predicted for an outcome: the 5 % and 95 % quantiles over runs that
    were left out of the fit.
    """

    low: float
    high: float


def bounds_of(run: ServedRun, outcome: str) -> OutcomeBounds:
    """The bounds of an outcome: over runs left out by configuration, by GPU or by model, whichever
    matches what the fit knows of the run's GPU and model.
    """
    data = constants_data()
    known = data["known"]
    is_known = f"{run.engine} on {run.gpu}" in known["gpu"], run.model in known["model"]
    left_out = {
        (True, True): "configuration",
        (False, True): "gpu",
        (True, False): "model",
        (False, False): "model",
    }[is_known]
    low, high = data["sureness"][left_out][outcome]
    return OutcomeBounds(low=low, high=high)


def flat(factors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[tuple[str, ...]]:
    """The level, the key and the constant of each fitted factor."""
    for level, keys in factors.items():
        for key, names in keys.items():
            for name in names:
                yield level, key, name
