"""The distribution of a plan's iteration times if stages, links or clocks are slow and task times
vary at random.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from experiments.cli.commandline import Countdown
from mistlab.core.values import (
    FieldError,
    InputError,
    check_field,
    from_mapping,
    near_matches,
    reject,
    to_mapping,
)
from mistlab.job.job import Job
from simulators.events import DisturbedIteration, EventSimulator
from simulators.variability import Quantiles, Variability

SAMPLES = 100
# Limits on simulated iterations: the largest number of tasks in all of them (about ten seconds'
# worth), and the least number of iterations. Iterations with many tasks are sampled less often,
# since their times hardly vary and each takes longer.
MOST_TASKS, FEWEST = 2_000_000, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """A disturbance of a plan (such as slow links), and the iterations that were simulated under
    it.
    """

    by: Variability
    played: Quantiles

    @classmethod
    def of(cls, job: Job, by: Variability, samples: int | None) -> Self:
        """Simulate iterations of a plan, each with its own random task times. The default number of
        iterations depends on their number of tasks; if task times are not random, it is one.
        """
        simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
        try:
            iteration = simulator.disturbed(job.plan, by)
            count = 1 if not by.jitter else samples or samples_of(len(iteration))
            played = Quantiles.of(_played_s(iteration, count), by.seed)
        except FieldError as error:
            raise _refused(error) from None
        return cls(by=by, played=played)

    def mapping(self) -> Mapping[str, Any]:
        """The quantiles of iteration times and the disturbance, as plain data."""
        return {"by": to_mapping(self.by, omit_defaults=True), **to_mapping(self.played)}

    def words(self, undisturbed_s: float) -> str:
        """By how much iteration times increase over an undisturbed iteration, as text."""
        played, by = self.played, to_mapping(self.by, omit_defaults=True)
        causes = ", ".join(f"{name} {value:g}" for name, value in by.items() if name != "seed")
        spread = f"; 90 % of {played.samples} take {played.q05_s:.3f} to {played.q95_s:.3f} s"
        return (
            f"disturbed by {causes or 'nothing'}: {played.mean_s:.3f} s an iteration, "
            f"{played.mean_s / undisturbed_s - 1:+.1%}{spread if played.samples > 1 else ''}"
        )


def samples_of(tasks: int) -> int:
    """How many iterations are simulated by default, given the number of tasks in one."""
    return max(FEWEST, min(SAMPLES, MOST_TASKS // tasks))


def _played_s(iteration: DisturbedIteration, count: int) -> Iterator[float]:
    """The seconds of each simulated iteration; progress is printed on standard error."""
    countdown = Countdown(what="iterations played", total=count)
    for sample in range(count):
        yield iteration.played_s(sample)
        if count > 1:
            countdown.step()


def variability_of(text: str) -> tuple[Variability, int | None]:
    """The disturbance that a text such as ``jitter=0.1,slow_links_factor=2`` describes, and the
    number of samples if the text gives it.
    """
    known = [entry.name for entry in fields(Variability)]
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (own.strip() for own in part.partition("="))
        if name not in (*known, "samples"):
            reject(f"--variability {name!r} is unknown{near_matches(name, [*known, 'samples'])}")
        try:
            given[name] = int(number) if number.isdecimal() else float(number)
        except ValueError:
            reject(f"--variability {part!r} gives no number to {name}: write it as {name}=0.1")
    try:
        samples = given.pop("samples", None)
        if samples is not None:
            samples = check_field(Quantiles, "samples", samples)
        return from_mapping(Variability, given), samples
    except FieldError as error:
        raise _refused(error) from None


def _refused(error: FieldError) -> InputError:
    return InputError(f"--variability {error}")
