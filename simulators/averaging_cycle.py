"""Plays cycles of steps on SimPy in which ranks average weights, after a step or beside further
ones."""

from collections.abc import Generator
from typing import Any

import simpy

from mistlab.reduction.reduction_costs import Reduction

# The last cycle counts: in the first one no exchange is on its way from before.
CYCLES = 3


def played_cycle_s(how: Reduction, step_s: float, exchange_s: float) -> float:
    """The seconds of a cycle of steps that take so long without an exchange; of each fragment in
    turn the weights are exchanged."""
    env = simpy.Environment()
    schedule, ends = how.schedule, [0.0]
    under_way: dict[int, simpy.Event] = {}

    def train() -> Generator[simpy.Event, Any, None]:
        for step in range(1, CYCLES * how.every + 1):
            yield env.timeout(step_s)
            starting, due = schedule.starting(step), schedule.due(step)
            if starting is not None:
                under_way[starting] = env.timeout(exchange_s)
            if due in under_way:
                yield under_way.pop(due)
            if step % how.every == 0:
                ends.append(float(env.now))

    env.process(train())
    env.run()
    return ends[-1] - ends[-2]
