"""Simulates with SimPy training steps in which replicas average their weights every few steps,
after a step or while further steps run.
"""

from collections.abc import Generator
from typing import Any

import simpy

from mistlab.reduction.reduction_costs import Reduction

# The number of cycles that are simulated (a cycle is the steps from one exchange of weights to the
# next). Only the last is timed, since during the first no exchange of an earlier cycle is under
# way.
CYCLES = 3
# With an asynchronous server, the number of steps of each rank that are simulated; only the second
# half is timed.
ROUNDS = 40


def played_asynchronous_s(step_s: float, both_s: float, busy_s: float, ranks: int) -> float:
    """The mean seconds of a step if each rank computes, then sends its gradients to an asynchronous
    server and gets its answer. The server is busy for ``busy_s`` with each message, in either
    direction.
    """
    env = simpy.Environment()
    server, ends = simpy.Resource(env), list[float]()

    def rank() -> Generator[simpy.Event, Any, None]:
        for _ in range(ROUNDS):
            yield env.timeout(step_s)
            with server.request() as turn:
                yield turn
                yield env.timeout(busy_s)
            # For the rest of the exchange only the rank waits; the server is already free.
            yield env.timeout(max(0.0, both_s - busy_s))
            ends.append(float(env.now))

    for _ in range(ranks):
        env.process(rank())
    env.run()
    half = ROUNDS // 2 * ranks
    return (ends[-1] - ends[half - 1]) / (ROUNDS - ROUNDS // 2)


def played_cycle_s(how: Reduction, step_s: float, exchange_s: float) -> float:
    """The seconds of a cycle, the steps in which every fragment of the weights is exchanged once,
    one after another; ``step_s`` is the time of a step without exchanges.
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
