"""Small problems, and a predictor that counts what it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from mistlab.job.job import hardware_from
from mistlab.job.prediction import Prediction
from mistlab.job.search import PlanAndStagePredictor, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageBatch, StageCosts
from simulators.symbolic import SymbolicPredictor

# Plans that save no memory do not fit; those that save all they can do.
SMALL = Problem(
    workload=Workload(
        model=ModelSpec.of(family="gpt", hidden=1024, layers=4, heads=8, vocab=8192),
        sequence_length=1024,
        global_batch=4,
        attention="flash",
        precision="fp16",
    ),
    cluster=Cluster(
        hardware=hardware_from("l4-24gb", Path()), nodes=1, gpus_per_node=2, memory_gib=1.4
    ),
)
TOO_SMALL = replace(SMALL, cluster=replace(SMALL.cluster, memory_gib=0.6))


@cache
def predictor_of(problem: Problem) -> SymbolicPredictor:
    return SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)


@dataclass(slots=True)
class Counting:
    """Passes on what it is asked, counts it, and may be interrupted at a call."""

    predictor: PlanAndStagePredictor
    interrupted_at: int | None = None
    calls: int = 0
    plans: int = 0
    stages: int = 0
    fitting: dict[Plan, float] = field(default_factory=dict)

    def predict(self, plan: Plan) -> Prediction:
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        self._count()
        predictions = self.predictor.predict_many(plans)
        self.plans += len(plans)
        both = zip(plans, predictions, strict=True)
        self.fitting |= {plan: one.iteration_s for plan, one in both if one.fits}
        return predictions

    @property
    def fastest_s(self) -> float:
        return min(self.fitting.values(), default=float("inf"))

    def fastest_times(self, count: int) -> list[float]:
        return sorted(self.fitting.values())[:count]

    def stage_costs(self, batch: StageBatch, *, engine: str = "mistlab") -> StageCosts:
        self._count()
        self.stages += len(batch)
        return self.predictor.stage_costs(batch, engine=engine)

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
