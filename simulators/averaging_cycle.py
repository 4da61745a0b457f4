"""Simulates with SimPy the training steps of replicas that average their weights every few steps,
either between steps or while further steps run.
"""

from collections.abc import Generator
from typing import Any

import simpy

from mistlab.reduction.reduction_costs import Reduction

# The number of cycles that are simulated; a cycle is the steps from one exchange of weights to the
# next. Only the last cycle is timed: the first is untypical, because no earlier exchange overlaps
# with it.
CYCLES = 3
# With an asynchronous parameter server, how many steps of each rank are simulated; only the second
# half is timed.
ROUNDS = 40


def played_asynchronous_s(step_s: float, both_s: float, busy_s: float, ranks: int) -> float:
    """The mean seconds of a step of ranks that compute, send their gradients to an asynchronous
    parameter server, and wait for its answer. The server is busy for ``busy_s`` with each message
    that it receives or sends.
    """
    env = simpy.Environment()
    server, ends = simpy.Resource(env), list[float]()

    def rank() -> Generator[simpy.Event, Any, None]:
        for _ in range(ROUNDS):
            yield env.timeout(step_s)
            with server.request() as turn:
                yield turn
                yield env.timeout(busy_s)
            # The rest of the exchange keeps only the rank waiting; the server is already free.
            yield env.timeout(max(0.0, both_s - busy_s))
            ends.append(float(env.now))

    for _ in range(ranks):
        env.process(rank())
    env.run()
    half = ROUNDS // 2 * ranks
    return (ends[-1] - ends[half - 1]) / (ROUNDS - ROUNDS // 2)


def played_cycle_s(how: Reduction, step_s: float, exchange_s: float) -> float:
    """The seconds of a cycle: the steps in which every fragment of the weights is exchanged once,
    one after another. A step without an exchange takes ``step_s``.
    """
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
