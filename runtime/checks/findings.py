"""What is wrong with a plan's run on GPUs, rank by rank, found without one."""

from dataclasses import dataclass

from mistlab.job import Job
from runtime.checks.judge import Judge, RaceFinding
from runtime.checks.one_rank import ITERATIONS, trace_of
from runtime.checks.small import SmallPlan, small
from runtime.checks.unlike import Unlike, unlike_ranks
from runtime.engine.training import Training
from runtime.runnable import check_runnable

# What a pass of a layer takes to run and to judge on a core, about.
SECONDS_A_PASS = 0.006


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanitizer:
    """A job's small plan, and the ranks of it that differ."""

    small: SmallPlan
    ranks: tuple[Unlike, ...]
    training: Training
    serialises: bool = False

    @classmethod
    def of(cls, job: Job, training: Training, *, serialises: bool = False) -> "Sanitizer":
        """Refuses a job that the runtime cannot run."""
        check_runnable(job)
        made = small(job.workload, job.plan)
        ranks = tuple(unlike_ranks(made.plan))
        return cls(small=made, ranks=ranks, training=training, serialises=serialises)

    @property
    def expected_s(self) -> float:
        """About how long all ranks take."""
        plan = self.small.plan
        layers = sum(plan.stages[one.stage].layers + 1 for one in self.ranks)
        return layers * 2 * plan.micro_batches * ITERATIONS * SECONDS_A_PASS

    def races(self, rank: int) -> tuple[RaceFinding, ...]:
        """What a rank's streams do in no order; of findings that repeat themselves the first."""
        trace = trace_of(
            self.small.workload,
            self.small.plan,
            rank,
            self.training,
            serialises=self.serialises,
        )
        first: dict[object, RaceFinding] = {}
        for finding in Judge(trace).findings():
            deeds = (finding.first, finding.second)
            first.setdefault((finding.kind, *((d.task, d.actor) for d in deeds)), finding)
        return tuple(first.values())
