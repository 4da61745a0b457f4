"""What is wrong with a plan's run on GPUs, rank by rank, found without one."""

from dataclasses import dataclass

from mistlab.values.job import Job
from runtime.checks.collectives.findings import CollectiveFinding, collective_findings
from runtime.checks.fake.device import device_findings
from runtime.checks.fake.watch import WaitFinding
from runtime.checks.races.judge import Judge, RaceFinding
from runtime.checks.races.one_rank import ITERATIONS, trace_of
from runtime.checks.small import SmallPlan, small
from runtime.checks.unlike import Unlike, unlike_ranks
from runtime.engine.training import Training
from runtime.runnable import check_runnable

# What a rank takes on a core, about: to build it, and for each pass of a layer.
SECONDS_A_RANK, SECONDS_A_PASS = 0.3, 0.012


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanitizer:
    """A job, its small plan, and the ranks of that plan that differ."""

    job: Job
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
        return cls(job=job, small=made, ranks=ranks, training=training, serialises=serialises)

    @property
    def expected_s(self) -> float:
        """About how long all ranks take."""
        plan = self.small.plan
        layers = sum(plan.stages[one.stage].layers + 1 for one in self.ranks)
        passes = layers * 2 * plan.micro_batches * ITERATIONS
        return len(self.ranks) * SECONDS_A_RANK + passes * SECONDS_A_PASS

    def collectives(self) -> tuple[CollectiveFinding, ...]:
        """Calls of all ranks of the whole plan that do not fit together."""
        return collective_findings(
            self.job.plan,
            self.job.workload,
            clips=self.training.needs_norm,
            steps_on_host=self.training.steps_on_host,
        )

    def waits(self, rank: int) -> tuple[WaitFinding, ...]:
        """Where the host of a rank would wait inside an iteration, or fail, on a GPU."""
        return device_findings(
            self.small.workload,
            self.small.plan,
            rank,
            self.training,
            serialises=self.serialises,
        )

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
