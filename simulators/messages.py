"""Simulates with SimPy one reduction of gradients over data-parallel ranks, message by message.

A rank sends one message at a time and receives one at a time. A message takes its link's latency
plus its bytes divided by the link's rate.
"""

from collections.abc import Generator
from typing import Any

import simpy

from mistlab.reduction.reduction_costs import RankLink, Reduction

# With an asynchronous parameter server, how many steps of each rank are simulated; only the second
# half is timed.
ROUNDS = 40
Steps = Generator[simpy.Event, Any, None]


def played_exchange_s(how: Reduction, values: int, ranks: int, link: RankLink) -> float:
    """The seconds until every rank has the result of one reduction of gradients."""
    if ranks == 1:
        return 0.0
    env = simpy.Environment()
    size = how.message_bytes(values)
    if how.kind == "server":
        answer_s = link.message_s(how.answer_bytes(values, ranks) / how.shards)
        _serve(env, ranks, how.shards, (link.message_s(size / how.shards), answer_s))
    elif how.trimmed:
        # Each rank sends a part of its gradients to each other rank; then the mean of each part is
        # sent to all ranks.
        part_s = link.message_s(size / ranks)
        _rounds(env, ranks, [*range(1, ranks)], part_s)
        env.run()
        _rounds(env, ranks, [1] * (ranks - 1), part_s, waits=True)
    elif how.kind == "gossip":
        _rounds(env, ranks, list(how.neighbours(ranks)), link.message_s(size))
    elif how.compressor.is_summable or how.kind == "outer":
        _rounds(env, ranks, [1] * (2 * (ranks - 1)), link.message_s(size / ranks), waits=True)
    else:
        _rounds(env, ranks, [1] * (ranks - 1), link.message_s(size), waits=True)
    env.run()
    return float(env.now)


def played_step_s(
    how: Reduction, compute_s: float, values: int, ranks: int, link: RankLink
) -> float:
    """The mean seconds in which an asynchronous parameter server applies one gradient of every
    rank, if ranks compute for ``compute_s`` between their messages.
    """
    sizes = how.message_bytes(values), how.answer_bytes(values, ranks)
    sent_s, answer_s = (link.message_s(size / how.shards) for size in sizes)
    env = simpy.Environment()
    lanes = [(simpy.Resource(env), simpy.Resource(env)) for _ in range(how.shards)]
    ends: list[float] = []

    def rank(number: int) -> Steps:
        for _ in range(ROUNDS):
            yield env.timeout(compute_s)
            for turn in range(how.shards):
                receiving, sending = lanes[(number + turn) % how.shards]
                yield from _through(env, receiving, sent_s)
                yield from _through(env, sending, answer_s)
            ends.append(float(env.now))

    for number in range(ranks):
        env.process(rank(number))
    env.run()
    # At first all ranks queue because they start together, so the first half of the steps is not
    # timed.
    half = ROUNDS // 2 * ranks
    return (ends[-1] - ends[half - 1]) / (ROUNDS - ROUNDS // 2)


def _rounds(
    env: simpy.Environment, ranks: int, offsets: list[int], message_s: float, *, waits: bool = False
) -> None:
    """Simulate rounds in each of which every rank sends a message to the rank a given offset away;
    with ``waits``, a rank sends only after it has received the previous round's message.
    """
    inboxes = [simpy.Store(env) for _ in range(ranks)]
    receiving = [simpy.Resource(env) for _ in range(ranks)]

    def rank(number: int) -> Steps:
        for offset in offsets:
            to = (number + offset) % ranks
            with receiving[to].request() as lane:
                yield lane
                yield env.timeout(message_s)
            inboxes[to].put(number)
            if waits:
                yield inboxes[number].get()

    for number in range(ranks):
        env.process(rank(number))


def _serve(env: simpy.Environment, ranks: int, shards: int, seconds: tuple[float, float]) -> None:
    """Simulate parameter servers: each rank sends a part of its gradients to each server, which
    answers all ranks once it has that part from each of them.
    """
    message_s, answer_s = seconds
    for _ in range(shards):
        lane = simpy.Resource(env)
        sent = [env.process(_through(env, lane, message_s)) for _ in range(ranks)]
        env.process(_answers(env, simpy.AllOf(env, sent), ranks, answer_s))


def _through(env: simpy.Environment, lane: simpy.Resource, message_s: float) -> Steps:
    with lane.request() as turn:
        yield turn
        yield env.timeout(message_s)


def _answers(env: simpy.Environment, sent: simpy.Event, ranks: int, message_s: float) -> Steps:
    yield sent
    for _ in range(ranks):
        yield env.timeout(message_s)
