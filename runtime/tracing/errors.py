"""What a trace says when it cannot go on: which operator, and where in the user's code."""

import traceback
from pathlib import Path

import torch

from runtime.sizes import TraceError

_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent


def refusal(operator: str, module: str, error: Exception) -> TraceError:
    """The error for an operator that failed inside ``module``."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "data-dependent" in type(error).__name__.lower() or "DataDependent" in type(error).__name__:
        reason = "its result depends on the values of a tensor, and a trace has only sizes"
    place = user_place()
    inside = f" in module {module!r}" if module else ""
    return TraceError(f"operator {operator}{inside} cannot be traced: {reason}{place}")


def user_place() -> str:
    """The innermost line of the running code that is neither torch's nor the tracer's."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        if not path.is_relative_to(_TORCH) and not path.is_relative_to(_OURS / "tracing"):
            return f", at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
