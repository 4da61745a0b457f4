"""Fits the constants of serving engines to measured runs: products of factors for the engine, the
GPU, the model, ..., each with a prior.

A constant of a run is the product of a factor for each level (``engine_constants``), such as its
engine, GPU or model. The logarithm of each factor has a prior of mean 0, so a factor of a model on
a GPU, for instance, differs from 1 only where several runs ask for it. Predicted and measured
outcomes are compared in logarithms; outliers get less weight (iteratively reweighted Gauss-Newton).

Array axes: C is the number of runs, J of constants, F of factors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from mistlab.core.arrays import Floats, Rows
from mistlab.serving.engine_constants import DEFAULTS, EngineConstants, ServedRun, keys_of

# How far a fitted factor of a serving engine is expected to lie from 1: the standard deviation of
# its logarithm, by level (engine, GPU, ...) and constant.
PRIORS: Mapping[str, Mapping[str, float]] = {
    "engine": {
        "products": 0.08,
        "experts": 0.15,
        "attention": 0.15,
        "links": 0.2,
        "floors": 0.5,
        "prefill": 0.2,
        "kernels": 0.8,
        "host": 0.6,
        "sequence": 0.6,
        "first": 1.0,
        "prompt": 0.4,
        "steps": 0.5,
        "burst": 1.0,
        "stall": 0.4,
        "memory": 0.03,
    },
    "mode": {"decode": 0.2, "first": 0.5, "prompt": 0.5, "burst": 0.7, "host": 0.5},
    "gpu": {
        "decode": 0.04,
        "prefill": 0.12,
        "kernels": 0.15,
        "host": 0.2,
        "links": 0.15,
        "experts": 0.1,
        "attention": 0.1,
        "first": 0.2,
        "burst": 0.2,
        "stall": 0.08,
    },
    "machine": {"decode": 0.05, "prefill": 0.06, "attention": 0.2},
    "version": {"decode": 0.04, "prefill": 0.03, "first": 0.4, "burst": 0.3, "host": 0.2},
    "kind": {"decode": 0.3, "prefill": 0.3, "host": 0.5, "attention": 0.3, "memory": 0.03},
    "precision": {"products": 0.12, "experts": 0.12, "floors": 0.2, "prefill": 0.15},
    "model": {"decode": 0.15, "prefill": 0.2, "experts": 0.2, "attention": 0.2, "wait": 0.2},
    "engine and model": {
        "decode": 0.12,
        "prefill": 0.2,
        "experts": 0.2,
        "host": 0.2,
        "burst": 0.5,
        "wait": 0.3,
    },
    "all": {"decode": 0.15, "prefill": 0.15, "host": 0.2, "first": 0.3, "wait": 0.3},
}
# How far single serving runs scatter around a good fit: the standard deviation of the logarithm of
# each outcome.
SPREADS: Mapping[str, float] = {"token_s": 0.1, "first_s": 0.3, "output_per_s": 0.12}
# A residual of this many standard deviations gets half the weight of a small one in the fit.
_HALF = 2.0
_STEP = 1e-3
_LONGEST = 0.7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredRuns:
    """Measured serving runs: arrays of their outcomes, such as time per output token, with NaN
    where one was not measured; and a function that predicts the outcomes.
    """

    runs: Sequence[ServedRun]
    measured: Mapping[str, Floats]
    times: Callable[[Mapping[str, Floats]], Mapping[str, Floats]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Factors:
    """The factors of serving constants that are fitted: names, priors, the constant that each
    multiplies, and the runs that each affects.
    """

    names: Sequence[tuple[str, str, str]]
    spreads: Floats
    constant: Sequence[int]
    members: Sequence[Rows]


def fitted_constants_of(runs: MeasuredRuns, *, rounds: int = 25) -> EngineConstants:
    """The most likely constants of serving engines, given measured runs and the priors of their
    factors.
    """
    factors = _factors_of(runs.runs)
    logs = np.zeros(len(factors.names))
    cost = np.inf
    damping = 1.0
    for _ in range(rounds):
        residuals, slopes = _linear(runs, factors, logs)
        weights = 1 / (1 + (residuals / _HALF) ** 2)
        now = _cost(residuals, logs, factors)
        if abs(cost - now) < 1e-4 * now:
            break
        cost = now
        step = _newton(residuals, slopes, weights, factors, logs)
        step = np.clip(step, -_LONGEST, _LONGEST)
        for _ in range(6):
            tried = logs + damping * step
            if _cost(_residuals(runs, _constants(runs, factors, tried)), tried, factors) < now:
                logs, damping = tried, min(1.0, damping * 2)
                break
            damping /= 2
        else:
            break
    return _as_constants(factors, logs)


def _factors_of(runs: Sequence[ServedRun]) -> _Factors:
    names, spreads, constant, members = [], [], [], []
    order = list(DEFAULTS)
    keys = [keys_of(run) for run in runs]
    for level, priors in PRIORS.items():
        of_level = np.array([one[level] for one in keys])
        for key in dict.fromkeys(of_level.tolist()):
            rows = np.flatnonzero(of_level == key)
            for name, spread in priors.items():
                names.append((level, key, name))
                spreads.append(spread)
                constant.append(order.index(name))
                members.append(rows)
    return _Factors(names=names, spreads=np.array(spreads), constant=constant, members=members)


def _constants(runs: MeasuredRuns, factors: _Factors, logs: Floats) -> dict[str, Floats]:
    table = np.zeros((len(DEFAULTS), len(runs.runs)))
    for log, constant, rows in zip(logs, factors.constant, factors.members, strict=True):
        table[constant, rows] += log
    columns = {
        name: default * np.exp(table[number])
        for number, (name, default) in enumerate(DEFAULTS.items())
    }
    columns["memory"] = np.minimum(columns["memory"], 0.97)
    return columns


def _residuals(runs: MeasuredRuns, constants: Mapping[str, Floats]) -> Floats:
    """The logarithms of predicted over measured outcomes of serving runs, in standard deviations; 0
    where an outcome was not measured.
    """
    times = runs.times(constants)
    parts = [
        np.nan_to_num(np.log(times[name] / measured) / SPREADS[name])
        for name, measured in runs.measured.items()
    ]
    return np.concatenate(parts)


def _linear(runs: MeasuredRuns, factors: _Factors, logs: Floats) -> tuple[Floats, Floats]:
    """The residuals of all serving runs, and their derivatives with respect to the logarithm of
    each constant.
    """
    constants = _constants(runs, factors, logs)
    residuals = _residuals(runs, constants)
    slopes = []
    for name in DEFAULTS:
        moved = {**constants, name: constants[name] * np.exp(_STEP)}
        slopes.append((_residuals(runs, moved) - residuals) / _STEP)
    return residuals, np.array(slopes)


def _newton(
    residuals: Floats, slopes: Floats, weights: Floats, factors: _Factors, logs: Floats
) -> Floats:
    """One Gauss-Newton step of the factors' logarithms; its Jacobian is sparse, since each run
    depends on few factors.
    """
    runs = 1 + max(int(rows.max()) for rows in factors.members)
    outcomes = [np.arange(first, first + runs) for first in range(0, len(residuals), runs)]
    places, columns, values = [], [], []
    for number, (constant, rows) in enumerate(zip(factors.constant, factors.members, strict=True)):
        for outcome in outcomes:
            places.append(outcome[rows])
            columns.append(np.full(len(rows), number))
            values.append(slopes[constant, outcome[rows]])
    jacobian = csr_array(
        (np.concatenate(values), (np.concatenate(places), np.concatenate(columns))),
        shape=(len(residuals), len(logs)),
    )
    weighted = jacobian.multiply(weights[:, None]).tocsr()
    normal = (jacobian.T @ weighted).toarray() + np.diag(1 / factors.spreads**2)
    gradient = weighted.T @ residuals + logs / factors.spreads**2
    return np.asarray(-np.linalg.solve(normal, gradient))


def _cost(residuals: Floats, logs: Floats, factors: _Factors) -> float:
    robust = _HALF**2 * np.log1p((residuals / _HALF) ** 2)
    return float(robust.sum() + ((logs / factors.spreads) ** 2).sum())


def _as_constants(factors: _Factors, logs: Floats) -> EngineConstants:
    factors_by_level: dict[str, dict[str, dict[str, float]]] = {}
    for (level, key, name), log in zip(factors.names, logs, strict=True):
        value = round(float(np.exp(log)), 4)
        if abs(log) > 1e-3:
            factors_by_level.setdefault(level, {}).setdefault(key, {})[name] = value
    return EngineConstants(factors=factors_by_level)
