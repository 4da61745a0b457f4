"""How long the passes of each stage took in a simulated iteration.

A pass begins when its stage is free and the micro-batch has come, and ends when the stage has
computed it. So waiting for the stage's own fetches counts, and waiting for other stages does not.
Steps before the first micro-batch comes belong to the first forward pass. Tasks after the last
backward pass belong to it.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from mistlab.schedule.placement import loop
from simulators.graph import TaskGraph
from simulators.play import Times

# Kind, chunk and micro-batch.
Pass = tuple[str, int, int]
_COMPUTING = ("F", "B", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one stage's passes, with the tasks before and after all passes.

    Micro-batches are in the order in which they first went each way. The times of a micro-batch in
    several chunks add up, and gradients of weights count as part of its backward pass.
    """

    forwards_s: tuple[float, ...]
    backwards_s: tuple[float, ...]

    @property
    def steady_s(self) -> tuple[float, float] | None:
        """A steady forward and backward pass; None where there is a single micro-batch."""
        if len(self.forwards_s) == 1:
            return None
        return median(self.forwards_s[1:]), median(self.backwards_s[:-1])


def pass_times(graph: TaskGraph, times: Times) -> list[PassTimes]:
    """The passes of each stage."""
    stages = [_Stage() for _ in range(graph.stages)]
    for task, (kind, _, _) in enumerate(graph.labels):
        stage = stages[graph.stage(task)]
        of = kind, graph.chunk(task) if kind in _COMPUTING else 0, graph.micro_batches[task]
        stage.add(of, times.starts_s[task], times.ends_s[task])
    # A micro-batch comes when it was sent, or is ready where sending takes no time.
    for ends in pairwise(graph.places or loop(graph.stages).places):
        for kind, ((source, above), (goal, below)) in (("F", ends), ("B", ends[::-1])):
            stages[goal].came_s |= {
                (kind, below, micro_batch): end_s
                for (one, chunk, micro_batch), end_s in stages[source].ends_s.items()
                if (one, chunk) == (kind, above)
            }
    for send, task in graph.sends:
        of = graph.labels[task][0], graph.chunk(task), graph.micro_batches[task]
        stages[graph.stage(task)].came_s[of] = times.ends_s[send]
    return [stage.pass_times() for stage in stages]


@dataclass(slots=True)
class _Stage:
    """Collects from one stage's tasks when its passes computed, when their micro-batches came, when
    it stepped, and when its last task except sends ended."""

    starts_s: dict[Pass, float] = field(default_factory=dict)
    ends_s: dict[Pass, float] = field(default_factory=dict)
    came_s: dict[Pass, float] = field(default_factory=dict)
    steps_s: list[tuple[float, float]] = field(default_factory=list)
    all_end_s: float = 0.0

    def add(self, of: Pass, start_s: float, end_s: float) -> None:
        """Note another task with its kind and micro-batch."""
        if of[0] in _COMPUTING:
            self.starts_s[of] = min(start_s, self.starts_s.get(of, start_s))
            self.ends_s[of] = max(end_s, self.ends_s.get(of, end_s))
        elif of[0] == "S":
            self.steps_s.append((start_s, end_s))
        if of[0] != "X":
            self.all_end_s = max(self.all_end_s, end_s)

    def pass_times(self) -> PassTimes:
        """How long passes took."""
        seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
        free_s = 0.0
        for of in sorted(self.starts_s, key=self.starts_s.__getitem__):
            kind, _, micro_batch = of
            lasts_s = self.ends_s[of] - max(free_s, self.came_s.get(of, 0.0))
            of_way = seconds[kind == "F"]
            of_way[micro_batch] = of_way.get(micro_batch, 0.0) + lasts_s
            free_s = self.ends_s[of]
        forwards, backwards = (list(of_way.values()) for of_way in seconds.values())
        forwards[0] += self._stepping_s()
        backwards[-1] += self.all_end_s - free_s
        return PassTimes(forwards_s=tuple(forwards), backwards_s=tuple(backwards))

    def _stepping_s(self) -> float:
        """How long the stage steps before its first micro-batch has come."""
        first = min(self.starts_s, key=self.starts_s.__getitem__)
        before = [end_s for start_s, end_s in self.steps_s if start_s < self.starts_s[first]]
        return min(self.came_s.get(first, 0.0), max(before, default=0.0))
