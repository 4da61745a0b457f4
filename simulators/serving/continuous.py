"""Simulates continuous batching: each step decodes all running requests and prefills waiting
prompts.

A replica is a SimPy process. Its step makes the next token of every running request and, within a
budget of tokens, prefills parts of waiting prompts in the order of arrival. A request holds cache
blocks of keys and values until it ends. When no block is free, the request that was admitted last
is preempted: its prompt and its output so far are prefilled again later. Steps in which no request
is admitted or ends are simulated together.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from mistlab.core.values import refuse
from mistlab.serving.load import ServingLoad
from simulators.serving.step_clock import StepClock

# How many steps are simulated at once at most; all of them take as long as the middle one.
MOST_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The limits of a replica's batches: prompt tokens per step (``budget``), running requests
    (``sequences``), tokens for which there is memory (``capacity``), and tokens per cache block.
    Unless it ``mixes``, a step either prefills or decodes.
    """

    budget: int = 8192
    sequences: int = 1024
    capacity: int
    block: int = 16
    mixes: bool = True


@dataclass(slots=True, kw_only=True)
class PlayedRequest:
    """A request while it is served; times are None until they are known. ``made`` counts output
    tokens; ``read`` counts prefilled tokens of the prompt and, after a preemption, of earlier
    output.
    """

    number: int
    arrival_s: float
    prompt: int
    output: int
    read: int = 0
    made: int = 0
    first_s: float | None = None
    end_s: float | None = None
    dropped: int = 0
    # The time at which the request's keys and values are back on the GPUs.
    ready_s: float = 0.0
    # The number of the step that makes the request's last token.
    until: int = 0
    # The number of the step in which the request's decoding began.
    since: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def to_read(self) -> int:
        """How many tokens must be prefilled before the request's next output token."""
        return self.prompt + self.made


@dataclass(slots=True, kw_only=True)
class PlayedLoad:
    """The result of a simulated load: its requests, its seconds, and the most tokens for which
    memory was allocated.
    """

    requests: list[PlayedRequest]
    seconds: float
    peak_tokens: int
    steps: int

    @property
    def requests_per_s(self) -> float:
        """The number of completed requests per second."""
        return len(self.requests) / self.seconds if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One replica of the model: its waiting, prefilling and decoding requests, and the blocks of
    keys and values that they occupy.
    """

    clock: StepClock
    batching: Batching
    ended: Callable[[PlayedRequest, float], PlayedRequest | None]
    keeps_tokens: bool = False
    waiting: deque[PlayedRequest] = field(default_factory=deque)
    running: dict[int, PlayedRequest] = field(default_factory=dict)
    finishing: list[tuple[int, int]] = field(default_factory=list)
    # Entry i counts the running requests that need another block of keys and values in steps whose
    # number leaves the remainder i when divided by the block size.
    phases: list[int] = field(default_factory=list)
    blocks: int = 0
    context: int = 0
    step: int = 0
    steps: int = 0
    peak_blocks: int = 0
    arriving: deque[PlayedRequest] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.phases = [0] * self.batching.block

    @property
    def most_blocks(self) -> int:
        """The number of blocks of keys and values that fit in the replica's memory."""
        return self.batching.capacity // self.batching.block

    def process(self, environment: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """Serve requests until none is left."""
        while self.waiting or self.running or self.arriving:
            self._take_arrived(environment.now)
            if not self.waiting and not self.running:
                yield environment.timeout(self.arriving[0].arrival_s - environment.now)
                continue
            yield from self._step(environment)

    def _take_arrived(self, now_s: float) -> None:
        while self.arriving and self.arriving[0].arrival_s <= now_s + 1e-12:
            self.waiting.append(self.arriving.popleft())

    def _step(self, environment: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        read = self._admit()
        sequences = 0 if read and not self.batching.mixes else len(self.running)
        context = self.context / len(self.running) if self.running else 0.0
        if read:
            seconds = self.clock.step_s(sequences, context, _passes(read, self.clock.batches))
            together = 1
        else:
            together = self._together(environment.now)
            middle = context + (together - 1) / 2
            seconds = together * self.clock.decode_s(sequences, middle)
        start_s = environment.now
        yield environment.timeout(seconds)
        if sequences:
            self._decoded(start_s, seconds / together, together)
        self._read(read, environment.now)
        self.steps += 1

    def _admit(self) -> list[tuple[PlayedRequest, int]]:
        """The prompts that this step prefills, each with the number of its tokens to prefill."""
        if self.batching.mixes:
            self._make_room(1)
        read = self._read_next()
        if not read and not self.running:
            # Partly prefilled prompts occupy blocks that the first of them needs, so all of these
            # prompts are evicted and prefilled again later.
            for request in self.waiting:
                self.blocks -= self._blocks_for(request.read)
                request.read = 0
            read = self._read_next()
        if not read and not self.batching.mixes:
            self._make_room(1)
        self.peak_blocks = max(self.peak_blocks, self.blocks)
        return read

    def _read_next(self) -> list[tuple[PlayedRequest, int]]:
        # Each of a pipeline's batches in flight has its own budget of prompt tokens.
        budget = self.batching.budget * self.clock.batches
        budget -= len(self.running) if self.batching.mixes else 0
        read: list[tuple[PlayedRequest, int]] = []
        # How many more blocks the partly prefilled prompts need to be completed.
        unread = 0
        for request in self.waiting:
            if budget <= 0 or len(self.running) + len(read) >= self.batching.sequences:
                break
            # The chunks of one prompt run in successive steps, one chunk in each step.
            count = min(budget, self.batching.budget, request.to_read - request.read)
            held = self._blocks_for(request.read)
            more = self._blocks_for(request.read + count) - held
            # Free blocks go first to the next tokens of running requests, then to the rest of
            # partly prefilled prompts, and only then to new requests.
            if self.blocks + more + self._next_blocks() + unread > self.most_blocks:
                break
            unread += self._blocks_for(request.to_read) - held - more
            self.blocks += more
            budget -= count
            read.append((request, count))
        return read

    def _next_blocks(self) -> int:
        return self.phases[self.step % self.batching.block]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.batching.block)

    def _make_room(self, steps: int) -> None:
        """Preempt requests, the last admitted one first, until enough blocks are free for the next
        ``steps`` steps.
        """
        while self.running and self.blocks + self._needed(steps) > self.most_blocks:
            half_read = [request for request in self.waiting if request.read]
            if half_read:
                self.blocks -= self._blocks_for(half_read[-1].read)
                half_read[-1].read = 0
                continue
            self._drop(next(reversed(self.running)))

    def _needed(self, steps: int) -> int:
        block = self.batching.block
        whole, rest = divmod(steps, block)
        partial_blocks = sum(self.phases[(self.step + ahead) % block] for ahead in range(rest))
        return whole * len(self.running) + partial_blocks

    def _drop(self, number: int) -> None:
        request = self.running.pop(number)
        made = request.made + self.step - request.since
        # The last output token has no keys and values yet, since the next step would have computed
        # them.
        held = request.prompt + made - 1
        self.blocks -= self._blocks_for(held)
        self.context -= held
        self.phases[self._phase_of(held)] -= 1
        request.made = made
        request.read = 0
        request.dropped += 1
        self.waiting.appendleft(request)

    def _phase_of(self, held: int) -> int:
        """The remainder, modulo the block size, of the steps in which a request with ``held``
        tokens needs another block.
        """
        return (self.step - held) % self.batching.block

    def _together(self, now_s: float) -> int:
        """How many steps can be simulated at once: until a request is admitted or ends, or blocks
        run out.
        """
        while self.finishing and self._is_stale(self.finishing[0]):
            heapq.heappop(self.finishing)
        most = min(MOST_TOGETHER, self.finishing[0][0] - self.step)
        if self.arriving:
            context = self.context / len(self.running)
            each_s = self.clock.decode_s(len(self.running), context)
            most = min(most, int((self.arriving[0].arrival_s - now_s) / each_s) + 1)
        while most > 1 and self.blocks + self._needed(most) > self.most_blocks:
            most //= 2
        return max(1, most)

    def _is_stale(self, entry: tuple[int, int]) -> bool:
        request = self.running.get(entry[1])
        return request is None or request.until != entry[0]

    def _decoded(self, start_s: float, each_s: float, together: int) -> None:
        if self.keeps_tokens:
            for sequence in self.running.values():
                sequence.token_times += [start_s + each_s * (one + 1) for one in range(together)]
        self.blocks += self._needed(together)
        self.peak_blocks = max(self.peak_blocks, self.blocks)
        self.step += together
        self.context += together * len(self.running)
        end_s = start_s + each_s * together
        while self.finishing and self.finishing[0][0] <= self.step:
            until, number = heapq.heappop(self.finishing)
            request = self.running.get(number)
            if request is not None and request.until == until:
                self._end(request, end_s)

    def _end(self, request: PlayedRequest, end_s: float) -> None:
        del self.running[request.number]
        held = request.prompt + request.output - 1
        self.blocks -= self._blocks_for(held)
        self.context -= held
        self.phases[self._phase_of(held)] -= 1
        request.made = request.output
        self._finish(request, end_s)

    def _finish(self, request: PlayedRequest, end_s: float) -> None:
        request.end_s = end_s
        follower = self.ended(request, end_s)
        if follower is not None:
            self.waiting.append(follower)

    def _read(self, read: Sequence[tuple[PlayedRequest, int]], now_s: float) -> None:
        for request, count in read:
            request.read += count
            if request.read < request.to_read:
                continue
            self.waiting.remove(request)
            if request.first_s is None:
                request.first_s = now_s
            request.made += 1
            if self.keeps_tokens:
                request.token_times.append(now_s)
            if request.made == request.output:
                self.blocks -= self._blocks_for(request.read)
                self._finish(request, now_s)
                continue
            self._begin(request)

    def _begin(self, request: PlayedRequest) -> None:
        request.since = self.step
        request.until = self.step + request.output - request.made
        self.running[request.number] = request
        heapq.heappush(self.finishing, (request.until, request.number))
        self.context += request.read
        self.phases[self._phase_of(request.read)] += 1


def _passes(read: Sequence[tuple[PlayedRequest, int]], batches: int) -> list[tuple[int, float]]:
    """Distribute a step's prompts over the batches in flight, each to the batch with the fewest
    tokens so far; returns each batch's tokens and their mean context length.
    """
    tokens, pairs = [0] * batches, [0.0] * batches
    for request, count in read:
        fewest = tokens.index(min(tokens))
        tokens[fewest] += count
        pairs[fewest] += count * (request.read + count / 2)
    return [(count, looks / max(count, 1)) for count, looks in zip(tokens, pairs, strict=True)]


def played_requests(load: ServingLoad) -> list[PlayedRequest]:
    """The requests of a load, before any of them is served."""
    return [
        PlayedRequest(number=number, arrival_s=arrival_s, prompt=prompt, output=output)
        for number, (arrival_s, prompt, output) in enumerate(
            zip(load.arrivals_s, load.prompts, load.outputs, strict=True)
        )
    ]


def check_room(load: ServingLoad, batching: Batching) -> None:
    """Refuse a load with a request that needs more blocks of keys and values than fit in memory."""
    room = batching.capacity // batching.block * batching.block
    for request, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True)):
        if prompt + output > room:
            refuse(
                f"prompts[{request}]",
                f"{prompt} and {output} tokens of output, but memory holds {room} tokens: give "
                "more GPUs, or shorter requests",
            )


def play_continuous(
    load: ServingLoad,
    clock: StepClock,
    batching: Batching,
    *,
    replicas: int = 1,
    keeps_tokens: bool = False,
) -> PlayedLoad:
    """Simulate a load on equal replicas, which receive the requests in turn."""
    check_room(load, batching)
    requests = played_requests(load)
    left = deque(requests)
    environment = simpy.Environment()
    done: list[PlayedRequest] = []

    def ended(request: PlayedRequest, end_s: float) -> PlayedRequest | None:
        done.append(request)
        if load.in_flight is None or not left:
            return None
        follower = left.popleft()
        follower.arrival_s = end_s
        return follower

    each = [
        Replica(clock=clock, batching=batching, ended=ended, keeps_tokens=keeps_tokens)
        for _ in range(replicas)
    ]
    first = len(requests) if load.in_flight is None else min(load.in_flight, len(requests))
    for number in range(first):
        each[number % replicas].arriving.append(left.popleft())
    for replica in each:
        environment.process(replica.process(environment))
    environment.run()
    return PlayedLoad(
        requests=done,
        seconds=environment.now,
        peak_tokens=max(one.peak_blocks for one in each) * batching.block,
        steps=sum(one.steps for one in each),
    )
