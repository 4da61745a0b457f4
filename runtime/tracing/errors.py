"""Errors of a trace that cannot go on: they name the operator and the line of the user's code."""

import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from runtime.sizes import TraceError

_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent


def refusal(operator: str, module: str, error: Exception) -> TraceError:
    """The error for an operator that failed inside ``module``."""
    inside = f" in module {module!r}" if module else ""
    reason = _reason(error)
    return TraceError(f"operator {operator}{inside} cannot be traced: {reason}{running_place()}")


def running_place() -> str:
    """The innermost running line of the user's code."""
    return _place(traceback.extract_stack())


def failure(error: Exception) -> TraceError:
    """The error for a model whose own code raised ``error``."""
    place = _place(traceback.extract_tb(error.__traceback__))
    return TraceError(f"the model cannot be traced: {_reason(error)}{place}")


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return (
            "its result depends on the values of a tensor, and a trace has only sizes: "
            "compute without .item(), a mask as an index, or an if on a tensor"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{kind}: {first}" if first else kind


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost frame that is in neither torch's code nor the tracer's."""
    for frame in reversed(list(frames)):
        path = Path(frame.filename).resolve()
        if not path.is_relative_to(_TORCH) and not path.is_relative_to(_OURS / "tracing"):
            return f", at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
