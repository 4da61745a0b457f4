"""Seesaw's schedule of serving that switches layouts (parallel degrees; arXiv 2503.06433): when
prompts are prefilled, where their keys and values wait, and when they are decoded.

On the same GPUs, prompts are prefilled under one layout and answers decoded under another. The keys
and values of prefilled prompts stay on the GPUs while there is room, then go to host memory. When
both are full, or no prompt is left, the layout changes and all requests are decoded; those in host
memory come back when the GPUs have room for them. When at most a threshold of host memory (or,
without it, of GPU memory) is still in use and prompts wait, the layout changes back: running
requests stay on the GPUs as far as there is room, and the others go to host memory.

The schedule does not measure time: a clock tells it which requests have arrived and which copies
have ended. A simulator or a runtime performs its actions in order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from mistlab.core.values import Checked, bounded, refuse
from mistlab.serving.load import ServingLoad

# The largest number of decode steps that one action of the schedule combines; each is timed with
# the context length of the middle step.
MOST_TOGETHER = 64
MOST_BLOCKS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimits(Checked):
    """The limits of a serving schedule: memory blocks for keys and values on replicas and in host
    memory, tokens of a prefill pass, requests that run at once, and the share of used blocks below
    which prefill resumes.
    """

    block: int = field(default=16, metadata=bounded(minimum=1))
    reading_blocks: int = field(metadata=bounded(minimum=1, most=MOST_BLOCKS))
    decoding_blocks: int = field(metadata=bounded(minimum=1, most=MOST_BLOCKS))
    host_blocks: int = field(metadata=bounded(minimum=0, most=MOST_BLOCKS))
    threshold: float = field(default=0.05, metadata=bounded(minimum=0, maximum=1))
    budget: int = field(default=8192, metadata=bounded(minimum=1))
    sequences: int = field(default=1024, metadata=bounded(minimum=1))
    readers: int = field(default=1, metadata=bounded(minimum=1))
    decoders: int = field(default=1, metadata=bounded(minimum=1))

    def blocks(self, tokens: int) -> int:
        """The number of memory blocks that hold the keys and values of ``tokens`` tokens."""
        return -(-tokens // self.block)

    def check(self, load: ServingLoad) -> None:
        """Refuse a load with a request whose keys and values exceed the memory of a replica or of
        the host, even without other requests.
        """
        tiers = [self.reading_blocks, self.decoding_blocks, *[self.host_blocks] * self.has_host]
        for number, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True)):
            if self.blocks(prompt + output) > min(tiers):
                held = min(tiers) * self.block
                refuse(
                    f"prompts[{number}]",
                    f"{prompt} tokens, with {output} of output, but a replica or the host has "
                    f"memory for {held} tokens: give more memory, or shorter requests",
                )

    @property
    def has_host(self) -> bool:
        """Whether the keys and values of requests may wait in host memory."""
        return self.host_blocks > 0


# The actions of a serving schedule, such as prefilling prompts or running decode steps, which are
# executed in order.


@dataclass(frozen=True, slots=True)
class ReadPrompts:
    """Action of a serving schedule: a replica prefills whole prompts in one pass. Requests whose
    keys and values were discarded prefill their output so far, too.
    """

    replica: int
    requests: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Action of a serving schedule: copy a request's keys and values from a replica to the host."""

    request: int
    replica: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Action of a serving schedule: copy a request's keys and values from the host to a replica."""

    request: int
    replica: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Action of a serving schedule: discard a request's keys and values, for which neither GPUs nor
    host have room; the request is prefilled again later.
    """

    request: int
    replica: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A request whose keys and values stay on the GPUs in a change of layout, with its replica
    before and after.
    """

    request: int
    tokens: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Change:
    """Action of a serving schedule: change between the parallel degrees of prefill and of decoding,
    which moves weights, keys and values between GPUs.
    """

    to: Literal["decoding", "prompts"]
    moved: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Action of a serving schedule: run some decode steps, each of which gives every running
    request one more token.
    """

    requests: tuple[tuple[int, ...], ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Action of a serving schedule: wait until a copy between GPU and host ends, or a request
    arrives.
    """


Action = ReadPrompts | Store | Fetch | Drop | Change | DecodeSteps | Wait


class PhaseClock(Protocol):
    """What a serving schedule asks while it is simulated or run: which requests have arrived, and
    which copies have ended.
    """

    def arrived(self) -> Sequence[int]:
        """The requests that have arrived since this function was last called, in order of
        arrival.
        """

    def is_fetched(self, request: int) -> bool:
        """Whether the copy of a request's keys and values from the host has ended."""

    def most_steps(self, requests: Sequence[Sequence[int]]) -> int:
        """For each replica, the most decode steps that can end before the next request arrives."""


@dataclass(slots=True)
class PhasedRequest:
    """A request that is being served: its prompt and output lengths, and how many output tokens it
    has so far.
    """

    number: int
    prompt: int
    output: int
    made: int = 0

    @property
    def to_read(self) -> int:
        """The number of a request's tokens that must be prefilled (again) before its next output
        token.
        """
        return self.prompt + self.made

    @property
    def held(self) -> int:
        """The number of a request's tokens whose keys and values are stored: all but the last
        output token.
        """
        return self.prompt + self.made - 1


class _Residents:
    """The requests on the GPUs of one layout (parallel degrees), listed by replica."""

    def __init__(self, limits: PhaseLimits, blocks: int, replicas: int) -> None:
        self.limits, self.blocks = limits, blocks
        self.replicas: list[dict[int, PhasedRequest]] = [{} for _ in range(replicas)]
        # For each replica, the blocks of keys and values in use now, and those in use once each
        # request has another token.
        self.used, self.used_next = [0] * replicas, [0] * replicas

    def add(self, request: PhasedRequest, replica: int) -> None:
        self.replicas[replica][request.number] = request
        self._count(request, replica, 1)

    def remove(self, request: PhasedRequest, replica: int) -> None:
        del self.replicas[replica][request.number]
        self._count(request, replica, -1)

    def _count(self, request: PhasedRequest, replica: int, sign: int) -> None:
        self.used[replica] += sign * self.limits.blocks(request.held)
        self.used_next[replica] += sign * self.limits.blocks(request.held + 1)

    def grown(self, replica: int) -> None:
        """Recount the memory blocks in use after requests have produced tokens."""
        held = [one.held for one in self.replicas[replica].values()]
        self.used[replica] = sum(map(self.limits.blocks, held))
        self.used_next[replica] = sum(self.limits.blocks(one + 1) for one in held)

    def place(
        self, tokens: int, *, ahead: bool = False, near: tuple[int, int] | None = None
    ) -> int | None:
        """The replica with the most free blocks, if they suffice for another request of ``tokens``
        tokens; otherwise None. With ``ahead``, one more token of every request must have room, too.
        Replicas on the same GPUs as ``near``, a replica of the other layout, are preferred.
        """
        needed, used = self.limits.blocks(tokens + ahead), self.used_next if ahead else self.used
        near_replicas: range | tuple[()] = ()
        if near is not None:
            first, count = near[0] * len(used) // near[1], len(used) // near[1]
            near_replicas = range(first, first + max(1, count))
        best = max(
            (
                (replica in near_replicas, self.blocks - taken - needed, -replica)
                for replica, taken in enumerate(used)
                if taken + needed <= self.blocks
                and len(self.replicas[replica]) < self.limits.sequences
            ),
            default=None,
        )
        return None if best is None else -best[2]

    def all(self) -> list[tuple[int, PhasedRequest]]:
        """All requests on the GPUs of the layout, each with its replica, in the order of
        replicas.
        """
        return [(place, one) for place, each in enumerate(self.replicas) for one in each.values()]

    def __bool__(self) -> bool:
        return any(self.replicas)


class PhaseSchedule:
    """The actions by which a prefill and a decode layout serve a load alternately; ``peak_gpu`` and
    ``peak_host`` are the most blocks of keys and values in use on a replica and in host memory.
    """

    def __init__(self, load: ServingLoad, limits: PhaseLimits, clock: PhaseClock) -> None:
        limits.check(load)
        self.limits, self._clock = limits, clock
        self.requests = [
            PhasedRequest(number, prompt, output)
            for number, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True))
        ]
        self._coming = len(self.requests)
        self._waiting: deque[PhasedRequest] = deque()
        self._host: deque[PhasedRequest] = deque()
        self._host_used = self._turn = 0
        # A prefill pass also needs blocks on the GPUs for keys and values that will go to the host,
        # until they are copied.
        whole = map(sum, zip(load.prompts, load.outputs, strict=True))
        longest = max(limits.budget, *whole)
        self._passing = min(limits.reading_blocks, limits.blocks(longest)) * limits.has_host
        self._readers = self._none_read()
        self._decoders = _Residents(limits, limits.decoding_blocks, limits.decoders)
        self.peak_gpu = self.peak_host = 0

    def _none_read(self) -> _Residents:
        of = self.limits
        return _Residents(of, of.reading_blocks - self._passing, of.readers)

    def actions(self) -> Iterator[Action]:
        """All actions of the schedule in order, until every request has ended."""
        while True:
            self._arrive()
            yield from self._read()
            if self._readers or self._host:
                yield self._to_decoding()
                yield from self._decode()
                yield from self._to_prompts()
            elif self._coming and not self._waiting:
                yield Wait()
            if not (self._coming or self._waiting or self._host or self._readers):
                return

    def _arrive(self) -> None:
        come = self._clock.arrived()
        self._coming -= len(come)
        self._waiting.extend(self.requests[number] for number in come)

    # Chooses which of the waiting prompts are prefilled in the next pass.

    def _read(self) -> Iterator[Action]:
        while self._waiting:
            replica = self._turn % self.limits.readers
            batch = self._batch(replica)
            if not batch:
                return
            self._turn += 1
            numbers = tuple(one.number for one, _ in batch)
            yield ReadPrompts(replica, numbers, tuple(one.held for one, _ in batch))
            yield from self._has_read(replica, batch)
            self._arrive()

    def _batch(self, replica: int) -> list[tuple[PhasedRequest, bool]]:
        """The requests of the next prefill pass, each with whether its keys and values go to the
        host; from now on they count as prefilled.
        """
        batch: list[tuple[PhasedRequest, bool]] = []
        tokens = passing = 0
        while self._waiting:
            request = self._waiting[0]
            if batch and tokens + request.to_read > self.limits.budget:
                break
            source = self._place_of(request, replica, passing)
            if source is None:
                break
            self._waiting.popleft()
            tokens += request.to_read
            request.made += 1
            batch.append((request, source == "host"))
            if source == "host":
                passing += self.limits.blocks(request.held)
                self._host_used += self.limits.blocks(request.held)
                self.peak_host = max(self.peak_host, self._host_used)
            else:
                self._readers.add(request, replica)
                near = replica, self.limits.readers
                target = self._decoders.place(request.held, ahead=True, near=near)
                assert target is not None
                self._decoders.add(request, target)
        self.peak_gpu = max(self.peak_gpu, self._readers.used[replica] + passing)
        return batch

    def _place_of(
        self, request: PhasedRequest, replica: int, passing: int
    ) -> Literal["gpu", "host"] | None:
        """Where the keys and values of a request can wait for decoding: on the GPUs if there is
        room under both layouts, otherwise on the host; None if there is no room.
        """
        of, needed = self.limits, self.limits.blocks(request.to_read)
        is_free = self._readers.used[replica] + needed <= self._readers.blocks
        if is_free and self._decoders.place(request.to_read, ahead=True) is not None:
            return "gpu"
        if self._host_used + needed <= of.host_blocks and passing + needed <= self._passing:
            return "host"
        return None

    def _has_read(self, replica: int, batch: list[tuple[PhasedRequest, bool]]) -> Iterator[Action]:
        for request, goes in batch:
            if request.made < request.output:
                if goes:
                    self._host.append(request)
                    yield Store(request.number, replica, request.held)
            elif goes:
                self._host_used -= self.limits.blocks(request.held)
            else:
                self._readers.remove(request, replica)
                for decoder, decoding in self._decoders.all():
                    if decoding is request:
                        self._decoders.remove(request, decoder)

    # Assigns requests to new replicas when GPUs change from one layout (parallel degrees) to the
    # other.

    def _to_decoding(self) -> Change:
        sources = {one.number: replica for replica, one in self._readers.all()}
        moved = [
            Moved(request.number, request.held, sources[request.number], target)
            for target, request in self._decoders.all()
        ]
        self._readers = self._none_read()
        return Change("decoding", tuple(moved))

    def _to_prompts(self) -> Iterator[Action]:
        """Assign running requests to replicas of the prefill layout; those for which there is no
        room go to the host.
        """
        if not (self._waiting or self._coming):
            return
        moved = []
        for source, request in self._decoders.all():
            target = self._readers.place(request.held, near=(source, self.limits.decoders))
            if target is None:
                yield self._let_go(request, source)
            else:
                self._readers.add(request, target)
                moved.append(Moved(request.number, request.held, source, target))
        yield Change("prompts", tuple(moved))

    def _let_go(self, request: PhasedRequest, replica: int) -> Store | Drop:
        """Move a request's keys and values from a decode replica to the host, or discard them if
        the host is full.
        """
        self._decoders.remove(request, replica)
        blocks = self.limits.blocks(request.held)
        if self._host_used + blocks > self.limits.host_blocks:
            self._waiting.appendleft(request)
            return Drop(request.number, replica)
        self._host.appendleft(request)
        self._host_used += blocks
        self.peak_host = max(self.peak_host, self._host_used)
        return Store(request.number, replica, request.held)

    # Chooses how many decode steps run before GPUs change to prefill or fetch requests.

    def _decode(self) -> Iterator[Action]:
        while self._host or self._decoders:
            self._arrive()
            if self._turns_back():
                return
            yield from self._fetch()
            ready = tuple(
                tuple(number for number in each if self._clock.is_fetched(number))
                for each in self._decoders.replicas
            )
            if not any(ready):
                yield Wait()
                continue
            steps, crowded = self._steps(ready)
            if crowded is None:
                yield DecodeSteps(ready, steps)
                self._stepped(ready, steps)
            else:
                last = next(reversed(self._decoders.replicas[crowded].values()))
                yield self._let_go(last, crowded)

    def _turns_back(self) -> bool:
        """Whether to change to prefill now: prompts wait, few memory blocks are in use, and the
        next prompt fits.
        """
        if not self._waiting:
            return False
        of = self.limits
        if of.has_host:
            is_low = self._host_used <= of.threshold * of.host_blocks
        else:
            is_low = sum(self._decoders.used) <= of.threshold * of.decoding_blocks * of.decoders
        return is_low and self._has_room()

    def _has_room(self) -> bool:
        """Whether the next prompt fits once all running requests have moved to the prefill layout
        or to the host.
        """
        of, after, over = self.limits, self._none_read(), self._host_used
        for source, request in self._decoders.all():
            target = after.place(request.held, near=(source, of.decoders))
            if target is None:
                over += of.blocks(request.held)
            else:
                after.add(request, target)
        needed = of.blocks(self._waiting[0].to_read)
        if over + needed <= of.host_blocks:
            return True
        replica = self._turn % of.readers
        is_free = after.used[replica] + needed <= after.blocks
        has_place = self._decoders.place(self._waiting[0].to_read, ahead=True) is not None
        return over <= of.host_blocks and is_free and has_place

    def _fetch(self) -> Iterator[Action]:
        """Copy waiting requests' keys and values from the host to the GPUs while there is room for
        them and for every request's next tokens.
        """
        while self._host:
            request = self._host[0]
            target = self._decoders.place(request.held, ahead=True)
            if target is None:
                return
            self._host.popleft()
            self._host_used -= self.limits.blocks(request.held)
            self._decoders.add(request, target)
            yield Fetch(request.number, target, request.held)

    def _steps(self, ready: Sequence[Sequence[int]]) -> tuple[int, int | None]:
        """The number of decode steps until a request ends, another one arrives or is fetched, or
        memory is full; and a replica whose memory is full before even one step.
        """
        most = min(MOST_TOGETHER, self._clock.most_steps(ready))
        for replica, numbers in enumerate(ready):
            if not numbers:
                continue
            running = [self.requests[number] for number in numbers]
            most = min(most, *[one.output - one.made for one in running])
            held = np.array([one.held for one in running])
            idle = 0
            if len(numbers) < len(self._decoders.replicas[replica]):
                idle = self._decoders.used[replica] - self._blocks(held, 0)
            room = self._decoders.blocks - idle
            if self._blocks(held, 1) > room:
                return 0, replica
            # Bisection for the most steps that fit; ``low`` steps are known to fit.
            low = 1
            while low < most:
                if self._blocks(held, most) <= room:
                    break
                middle = (low + most) // 2
                if self._blocks(held, middle) <= room:
                    low, most = middle, most - 1
                else:
                    most = middle - 1
        return most, None

    def _blocks(self, held: "np.ndarray[tuple[int], np.dtype[np.int64]]", ahead: int) -> int:
        return int(np.sum(-(-(held + ahead) // self.limits.block)))

    def _stepped(self, ready: Sequence[Sequence[int]], steps: int) -> None:
        for replica, numbers in enumerate(ready):
            for number in numbers:
                self.requests[number].made += steps
            self._decoders.grown(replica)
            self.peak_gpu = max(self.peak_gpu, self._decoders.used[replica])
            for number in numbers:
                if self.requests[number].made == self.requests[number].output:
                    self._decoders.remove(self.requests[number], replica)
