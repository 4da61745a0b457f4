"""Stages of a plan in words: those that follow one another and are alike share a line."""

from collections.abc import Iterator, Sequence

from experiments.comparing.explain import StageLimit
from mistlab.values.plan_words import runs_of
from mistlab.values.units import GIB_BYTES


def limits_in_words(limits: Sequence[StageLimit]) -> Iterator[str]:
    """What limits each stage; stages whose words differ in memory alone share a line."""
    words = [_limit(limit) for limit in limits]
    for run in runs_of(words):
        held = [limits[stage].memory_bytes / GIB_BYTES for stage in run]
        memory = f"{min(held):.2f}" + (f" to {max(held):.2f}" if len(run) > 1 else "")
        room = limits[run[0]].room_bytes / GIB_BYTES
        yield f"{stages_called(run)} limited by {words[run[0]]}; {memory} of {room:.2f} GiB."


def stages_called(run: range) -> str:
    """The stages of a run, as a sentence begins with them."""
    first, last = run[0], run[-1]
    return f"Stage {first} is" if first == last else f"Stages {first} to {last} are each"


def _limit(limit: StageLimit) -> str:
    steady_s = limit.compute_s + limit.exposed_communication_s
    return (
        f"{limit.limit}: {steady_s:.3f} s a micro-batch "
        f"({limit.share_of_slowest:.0%} of the slowest stage), "
        f"{limit.exposed_communication_s:.3f} of it exposed communication"
    )
