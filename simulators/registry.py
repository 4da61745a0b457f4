"""All predictors by name. To add one, write a class in a new file, and add a line here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mistlab.core.values import OnUse, imported

if TYPE_CHECKING:
    from mistlab.job.prediction import Predictor


# For each predictor's name, a function that makes it from a ``workload`` and a ``cluster``, whose
# plans it then predicts.
PREDICTORS: "OnUse[Callable[..., Predictor]]" = OnUse(
    {
        "symbolic": imported("simulators.symbolic:SymbolicPredictor"),
        "events": imported("simulators.events:EventSimulator"),
    }
)
