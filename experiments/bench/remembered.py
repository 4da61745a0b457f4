"""Processes many items in parallel, and caches the answers of a predictor."""

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

# Processes many items in parallel processes, and yields the answers in order.


Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Fewer items than this are processed without starting a process, which takes two seconds.
FEW = 4
# The most processes at a time: more would need much memory and save little time.
MOST = 8


def answers(
    study: Study,
    call: Callable[[Item], Answer],
    items: Sequence[Item],
    what: str,
    *,
    side_by_side: bool = True,
) -> Iterator[tuple[Item, Answer]]:
    """Yields each item with its answer, in order, and reports progress on standard error. If there
    are only a few items, this process answers them, which takes less CPU time than starting the
    parallel processes of ``side_by_side``.
    """
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


# Caches a predictor's answers about stages, for searches that ask the same questions again.
#
# A search asks about many candidates at once, and the search of a larger space often asks about the
# same candidates in the same order. The cached answer is the one that the predictor would give, so
# results do not change.


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A predictor that caches its answers about stages; the key is the question and the candidates'
    columns.
    """

    predictor: SymbolicPredictor
    answers: dict[Any, Any] = field(default_factory=dict)

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan."""
        return self.predictor.predict(plan)

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """The predicted cost of each plan, in order."""
        return self.predictor.predict_many(plans)

    def stage_costs(self, batch: StageBatch, *, engine: str = "mistlab") -> StageCosts:
        """The predicted costs of each candidate for a stage."""
        return self._answer(self.predictor.stage_costs, batch, engine=engine)

    def stage_bounds(
        self, least: StageBatch, most: StageBatch, *, engine: str = "mistlab"
    ) -> StageCosts | None:
        """Lower bounds of the costs of all candidate stages whose choices lie between those of two
        given batches; None if the predictor cannot bound them.
        """
        return self._answer(self.predictor.stage_bounds, least, most, engine=engine)

    def part_seconds(
        self, least: StageBatch, most: StageBatch | None = None, *, engine: str = "mistlab"
    ) -> StageSeconds:
        """The seconds of each part of a model (embedding, block, head), for a pipeline schedule
        without a closed form.
        """
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
        """Whether each candidate stage fits into its GPUs' memory."""
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
    """A hash of all columns of a question; it is kept in place of the columns, which would take
    more memory than the answers.
    """
    parts = []
    for batch in batches:
        # The character code of the dtype is used, since NumPy takes longer to format a dtype's name
        # than for everything else here.
        kinds = [(name, column.dtype.char) for name, column in batch.columns.items()]
        parts.append(f"{len(batch)} {kinds}".encode())
        parts += [column.tobytes() for column in batch.columns.values()]
    return sha256(b"".join(parts)).digest()
