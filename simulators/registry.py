"""All predictors by name. A new one is a class with its own file, and one line here."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mistlab.values.on_use import OnUse

if TYPE_CHECKING:
    from mistlab.values.prediction import Predictor


def _named(predictor: str) -> Any:
    """The file of a predictor, imported."""
    return import_module(f"simulators.{predictor}")


# Each is made with the ``workload`` and the ``cluster`` whose plans it predicts.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": lambda: _named("symbolic").SymbolicPredictor,
        "events": lambda: _named("events").EventSimulator,
    }
)
