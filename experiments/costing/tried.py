"""A changed plan, tried in place of one that does not fit, and what it would cost."""

from dataclasses import dataclass

from experiments.costing.changes import Changed
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A changed plan with its prediction: which kind of try it was, and what was changed, in
    words."""

    changed: Changed
    kind: str
    words: str
    prediction: Prediction

    @property
    def job(self) -> Job:
        """The plan with what it is for."""
        return self.changed.job

    @property
    def group(self) -> str:
        """The kinds of its changes."""
        return " and ".join(change.kind for change in self.changed.changes)
