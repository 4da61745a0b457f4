"""Plays cycles of steps on SimPy in which ranks average weights, after a step or beside further
ones."""

from collections.abc import Generator
from typing import Any

import simpy

from mistlab.reduction.reduction_costs import Reduction

# The last cycle counts: in the first one no exchange is on its way from before.
CYCLES = 3
# Steps of each rank that are played with an asynchronous server; the second half of them counts.
ROUNDS = 40


def played_asynchronous_s(step_s: float, both_s: float, busy_s: float, ranks: int) -> float:
    """The mean seconds in which each of the ranks computes a step and exchanges it with a server
    that waits for none, and is busy for so long with each message, there or back."""
    env = simpy.Environment()
    server, ends = simpy.Resource(env), list[float]()

    def rank() -> Generator[simpy.Event, Any, None]:
        for _ in range(ROUNDS):
            yield env.timeout(step_s)
            with server.request() as turn:
                yield turn
                yield env.timeout(busy_s)
            # What is left of the exchange occupies the rank alone.
            yield env.timeout(max(0.0, both_s - busy_s))
            ends.append(float(env.now))

    for _ in range(ranks):
        env.process(rank())
    env.run()
    half = ROUNDS // 2 * ranks
    return (ends[-1] - ends[half - 1]) / (ROUNDS - ROUNDS // 2)


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
