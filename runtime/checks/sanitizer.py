"""Finds races, hidden waits and hanging collectives of a plan's run on GPUs, without a GPU."""

from dataclasses import dataclass

from mistlab.values.errors import InputError
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

# Rough times for one rank on one core: to build it, and for each pass of a layer.
SECONDS_A_RANK, SECONDS_A_PASS = 0.3, 0.012


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanitizer:
    """A job, its small plan, and the ranks of the small plan that have to be checked."""

    job: Job
    small: SmallPlan
    ranks: tuple[Unlike, ...]
    training: Training
    serialises: bool = False

    @classmethod
    def of(cls, job: Job, training: Training, *, serialises: bool = False) -> "Sanitizer":
        """The sanitizer of a job; refuses a job that the runtime cannot run."""
        check_runnable(job)
        for number, stage in enumerate(job.plan.stages):
            if stage.sequence_parallel and stage.tensor_parallel > 1:
                message = (
                    f"plan.stages[{number}].sequence_parallel: 1 is trained and not yet checked: "
                    "give 0 to check the plan without"
                )
                raise InputError(message)
        made = small(job.workload, job.plan)
        ranks = tuple(unlike_ranks(made.plan))
        return cls(job=job, small=made, ranks=ranks, training=training, serialises=serialises)

    @property
    def expected_s(self) -> float:
        """Roughly how long the checks of all ranks take."""
        plan = self.small.plan
        layers = sum(plan.stages[one.stage].layers + 1 for one in self.ranks)
        passes = layers * 2 * plan.micro_batches * ITERATIONS
        return len(self.ranks) * SECONDS_A_RANK + passes * SECONDS_A_PASS

    def collectives(self) -> tuple[CollectiveFinding, ...]:
        """Collectives of the whole plan whose calls do not fit together over all ranks."""
        return collective_findings(
            self.job.plan,
            self.job.workload,
            clips=self.training.needs_norm,
            steps_on_host=self.training.steps_on_host,
        )

    def waits(self, rank: int) -> tuple[WaitFinding, ...]:
        """Places where a rank's host would wait for its GPU inside an iteration, or would fail."""
        return device_findings(
            self.small.workload,
            self.small.plan,
            rank,
            self.training,
            serialises=self.serialises,
        )

    def races(self, rank: int) -> tuple[RaceFinding, ...]:
        """Uses of memory by a rank's streams that nothing orders; repeated findings only once."""
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
