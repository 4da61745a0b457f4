"""All predictors by name. A new predictor is a class in its own file, and one line here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mistlab.values.on_use import OnUse, imported

if TYPE_CHECKING:
    from mistlab.values.prediction import Predictor


# A predictor is made with a ``workload`` and a ``cluster``, and predicts plans of these.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": imported("simulators.symbolic:SymbolicPredictor"),
        "events": imported("simulators.events:EventSimulator"),
    }
)
