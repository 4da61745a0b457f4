"""All predictors by name. A new one is a class with its own file, and one line here."""

from collections.abc import Callable, Mapping

from mistlab.values.prediction import Predictor
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

# Each is made with the ``workload`` and the ``cluster`` whose plans it predicts.
PREDICTORS: Mapping[str, Callable[..., Predictor]] = {
    "symbolic": SymbolicPredictor,
    "events": EventSimulator,
}
