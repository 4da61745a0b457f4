"""All predictors by name. A new one is a class with its own file, and one line here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import simulators
from mistlab.values.on_use import OnUse

if TYPE_CHECKING:
    from mistlab.values.prediction import Predictor

# Each is made with the ``workload`` and the ``cluster`` whose plans it predicts.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": lambda: simulators.symbolic.SymbolicPredictor,
        "events": lambda: simulators.events.EventSimulator,
    }
)
