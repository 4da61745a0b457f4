"""Fitted constants of serving engines: factors on parts of a step's time, and times that no kernel
explains.

Each constant is a product over levels: its default, and factors of the engine, of the engine on a
GPU, of a model in a precision, and of both. A level without a fit has the factor 1, so a GPU or a
model without measured runs gets the constant of the wider levels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.units import NANOSECONDS
from mistlab.serving.gpu_facts import constants_data, is_native, serving_data

# The value of each fitted constant of serving engines before any fit.
DEFAULTS: Mapping[str, float] = {
    # Factors on the seconds of GEMMs, experts, attention, communication and the minimum times of
    # kernels; then on those of a whole decode step and of a whole prefill pass.
    "products": 1.0,
    "experts": 1.0,
    "attention": 1.0,
    "links": 1.0,
    "floors": 0.5,
    "decode": 1.0,
    "prefill": 1.2,
    # Seconds of a small kernel inside a CUDA graph with the gaps around it; seconds of the host's
    # work per step, and per sequence in a step, that the GPU has to wait for.
    "kernels": 6e-6,
    "host": 3e-4,
    "sequence": 1e-5,
    # Constants of the time to first token: seconds of HTTP and tokenising, a factor on prefill
    # time, the number of steps waited, and the share of all other prompts that arrive at the same
    # time.
    "first": 0.04,
    "prompt": 1.0,
    "steps": 1.5,
    "burst": 0.1,
    # The share of other prompts' prefill time by which output tokens of decoding requests are
    # delayed.
    "stall": 1.0,
    # A factor on the whole time to first token of a request.
    "wait": 1.0,
    # The share of a GPU's memory that weights and key-value caches may take.
    "memory": 0.88,
}

# Seconds to serialise and to read one token id, in engine versions whose driver sends the token ids
# of all running requests to each worker in every step. They are measured, not fitted; for other
# versions they are 0.
MESSAGES = ("written", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What determines the fitted constants of a measured serving run: engine, version, GPU, model,
    precision, and the kind of measurement.
    """

    engine: str
    version: str
    gpu: str
    model: str
    weights: str
    kind: str = "closed loop"
    mode: str = "aggregated"


# The fitted factors of a serving run: some hold for its engine, others only for its GPU, model, and
# so on. This finds the key of each such factor.
def keys_of(run: ServedRun) -> dict[str, str]:
    """For each level at which factors are fitted (engine, GPU, model, ...), the key of a serving
    run's factors in the fitted table.
    """
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
    """The fitted factors of serving engines' constants, from factors of a whole engine to those of
    a single GPU or model.
    """

    factors: Mapping[str, Mapping[str, Mapping[str, float]]]

    def of(self, runs: Sequence[ServedRun]) -> dict[str, Floats]:
        """The constants of some serving runs: for each constant, an array with a value per run."""
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
    """The fitted constants of serving engines that the catalogue holds."""
    return EngineConstants(factors=constants_data()["constants"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeBounds:
    """Bounds on the measured over the predicted value of an outcome, such as time to first token:
    the 5 % and 95 % quantiles over serving runs that were left out of the fit.
    """

    low: float
    high: float


def bounds_of(run: ServedRun, outcome: str) -> OutcomeBounds:
    """The bounds of an outcome for a serving run: from runs that were left out of the fit by
    configuration, by GPU or by model, depending on whether the fit knows the run's GPU and model.
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
    """Every fitted factor of serving engines as a row: its level (engine, GPU, ...), its key at
    that level, its constant and its value.
    """
    for level, keys in factors.items():
        for key, names in keys.items():
            for name in names:
                yield level, key, name
