"""How long the passes of each stage took in a simulated iteration.

A pass begins when its stage is free and the micro-batch has come, and ends when the stage has
computed it. So waiting for the stage's own fetches counts, and waiting for other stages does not.
Steps before the first micro-batch comes belong to the first forward pass. Tasks after the last
backward pass belong to it.
"""

from dataclasses import dataclass, field
from statistics import median

from simulators.graph import TaskGraph
from simulators.play import Times

# Kind and micro-batch.
Pass = tuple[str, int]
_COMPUTING = ("F", "B")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one stage's passes, by micro-batch, with the tasks before and after all passes."""

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
        stage.add((kind, graph.micro_batches[task]), times.starts_s[task], times.ends_s[task])
    # A micro-batch comes when it was sent, or is ready where sending takes no time.
    for number, stage in enumerate(stages):
        for kind, sender in (("F", number - 1), ("B", number + 1)):
            if 0 <= sender < len(stages):
                ends_s = stages[sender].ends_s.items()
                stage.came_s |= {of: end_s for of, end_s in ends_s if of[0] == kind}
    for send, task in graph.sends:
        of = graph.labels[task][0], graph.micro_batches[task]
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
        seconds: dict[str, dict[int, float]] = {kind: {} for kind in _COMPUTING}
        free_s = 0.0
        for of in sorted(self.starts_s, key=self.starts_s.__getitem__):
            kind, micro_batch = of
            seconds[kind][micro_batch] = self.ends_s[of] - max(free_s, self.came_s.get(of, 0.0))
            free_s = self.ends_s[of]
        forwards, backwards = ([of[m] for m in sorted(of)] for of in seconds.values())
        forwards[0] += self._stepping_s()
        backwards[-1] += self.all_end_s - free_s
        return PassTimes(forwards_s=tuple(forwards), backwards_s=tuple(backwards))

    def _stepping_s(self) -> float:
        """How long the stage steps before its first micro-batch has come."""
        first = "F", 0
        before = [end_s for start_s, end_s in self.steps_s if start_s < self.starts_s[first]]
        return min(self.came_s.get(first, 0.0), max(before, default=0.0))
