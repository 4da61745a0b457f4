"""All predictors by name. A new predictor is a class in its own file, and one line here."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mistlab.values.on_use import OnUse

if TYPE_CHECKING:
    from mistlab.values.prediction import Predictor


def _named(predictor: str) -> Any:
    """Import the file of a predictor."""
    return import_module(f"simulators.{predictor}")


# A predictor is made with a ``workload`` and a ``cluster``, and predicts plans of these.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": lambda: _named("symbolic").SymbolicPredictor,
        "events": lambda: _named("events").EventSimulator,
    }
)
