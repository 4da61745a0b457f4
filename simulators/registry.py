"""All predictors by name. To add one, add a class in a file of its own, and one line here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mistlab.core.values import OnUse, imported

if TYPE_CHECKING:
    from mistlab.job.prediction import Predictor


# A predictor is made with a ``workload`` and a ``cluster``, and predicts plans of these.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": imported("simulators.symbolic:SymbolicPredictor"),
        "events": imported("simulators.events:EventSimulator"),
    }
)
