"""Many items worked on in processes side by side, with a predictor's answers remembered."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

from experiments.pages.study import Study
from mistlab.core.arrays import Bools
from mistlab.job.prediction import Prediction
from mistlab.plan.plan import Plan
from mistlab.stages.stage_batch import StageBatch, StageCosts, StageSeconds, StagesInOrder
from simulators.symbolic import SymbolicPredictor

# Works on many items in processes side by side, and takes the answers in order.


Item = TypeVar("Item")
Answer = TypeVar("Answer")

# For fewer items than this no process is started: it takes two seconds to begin.
FEW = 4
# More processes than this need more memory than they save time.
MOST = 8


def answers(
    study: Study,
    call: Callable[[Item], Answer],
    items: Sequence[Item],
    what: str,
    *,
    side_by_side: bool = True,
) -> Iterator[tuple[Item, Answer]]:
    """Each item with its answer, in order; standard error hears how many are done. Small items take
    less processor time in this process than ``side_by_side``."""
    processes = min(MOST, os.cpu_count() or 1, len(items)) if side_by_side else 1
    if processes == 1 or len(items) < FEW:
        for item in study.counted(items, what):
            yield item, call(item)
        return
    from joblib import Parallel, delayed  # noqa: PLC0415 (takes long to import)

    outcomes = Parallel(n_jobs=processes, return_as="generator")(
        delayed(call)(one) for one in items
    )
    yield from zip(study.counted(items, what), outcomes, strict=True)


# Remembers what a predictor said of stages, for searches that ask about the same stages again.
#
# A search asks about many candidates at once, and one of a larger space often asks about the same
# candidates in the same order. The answer is the same, so no search ends otherwise.


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A predictor and its answers about stages, by the question and the columns of candidates."""

    predictor: SymbolicPredictor
    answers: dict[Any, Any] = field(default_factory=dict)

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan."""
        return self.predictor.predict(plan)

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """The predicted cost of each plan, in order."""
        return self.predictor.predict_many(plans)

    def stage_costs(self, batch: StageBatch, *, engine: str = "mistlab") -> StageCosts:
        """The costs of each candidate."""
        return self._answer(self.predictor.stage_costs, batch, engine=engine)

    def stage_bounds(
        self, least: StageBatch, most: StageBatch, *, engine: str = "mistlab"
    ) -> StageCosts | None:
        """Costs that no candidate between the two undercuts."""
        return self._answer(self.predictor.stage_bounds, least, most, engine=engine)

    def part_seconds(
        self, least: StageBatch, most: StageBatch | None = None, *, engine: str = "mistlab"
    ) -> StageSeconds:
        """The times of parts of a model in an order of passes without a formula."""
        batches = (least,) if most is None else (least, most)
        return self._answer(self.predictor.part_seconds, *batches, engine=engine)

    def stage_fits(
        self,
        batch: StageBatch,
        in_order: StagesInOrder | None = None,
        *,
        engine: str = "mistlab",
        of_others: bool = False,
    ) -> Bools:
        """Whether each candidate fits on its GPUs."""
        batches = (batch,) if in_order is None else (batch, in_order)
        return self._answer(self.predictor.stage_fits, *batches, engine=engine, of_others=of_others)

    def _answer(
        self,
        ask: Callable[..., Answer],
        *batches: StageBatch | StagesInOrder,
        **options: str | bool,
    ) -> Answer:
        question = ask.__name__, *options.items(), _digest(batches)
        if question not in self.answers:
            self.answers[question] = ask(*batches, **options)
        answer: Answer = self.answers[question]
        return answer


def _digest(batches: Sequence[StageBatch | StagesInOrder]) -> bytes:
    """A short text for all columns: the columns themselves would take more room than answers."""
    parts = []
    for batch in batches:
        # The letter of a type, since NumPy takes longer to write its name than all else here does.
        kinds = [(name, column.dtype.char) for name, column in batch.columns.items()]
        parts.append(f"{len(batch)} {kinds}".encode())
        parts += [column.tobytes() for column in batch.columns.values()]
    return sha256(b"".join(parts)).digest()
