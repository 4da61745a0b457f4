"""Seesaw, played: prompts are read under one layout, answers decoded under another, on the same
GPUs (Seesaw, arXiv 2503.06433).

Keys and values of read prompts go to host memory while the next prompts are read. When that tier
is full, or no prompt is left, weights are re-sharded and the tier is decoded: requests come back as
the GPUs have room for them. Once at most a threshold of the tier is left and prompts wait, running
requests go to host memory too, and weights are re-sharded back.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from mistlab.core.values import refuse
from mistlab.serving.load import ServingLoad
from simulators.serving.continuous import PlayedRequest, played_requests
from simulators.serving.step_clock import StepClock

MOST_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """How phases change: tokens that the GPUs of all replicas hold while they decode, tokens of the
    host's tier, the share of it at which prompts are read again, seconds of a change to decoding
    and back, and seconds to copy one token's keys and values."""

    gpu_tokens: int
    host_tokens: int
    threshold: float
    to_decode_s: float
    to_prompts_s: float
    copy_s: float
    budget: int = 8192
    sequences: int = 1024
    readers: int = 1
    decoders: int = 1


@dataclass(slots=True, kw_only=True)
class PlayedPhases:
    """A played run with changing layouts: its requests, seconds in all and by what they went to,
    changes of layouts, and the fullest moments of both tiers in tokens."""

    requests: list[PlayedRequest]
    seconds: float
    changes: int
    reading_s: float
    decoding_s: float
    changing_s: float
    copying_s: float
    peak_gpu: int
    peak_host: int

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, a second."""
        return len(self.requests) / self.seconds if self.seconds else 0.0


@dataclass(slots=True, kw_only=True)
class _Changing:
    """The state of a run: prompts that wait, requests in host memory, and those that run."""

    phases: Phases
    reading: StepClock
    decoding: StepClock
    waiting: deque[PlayedRequest]
    arriving: deque[PlayedRequest]
    host: deque[PlayedRequest] = field(default_factory=deque)
    running: list[PlayedRequest] = field(default_factory=list)
    done: list[PlayedRequest] = field(default_factory=list)
    host_tokens: int = 0
    gpu_tokens: int = 0
    copied_at_s: float = 0.0
    played: PlayedPhases = field(
        default_factory=lambda: PlayedPhases(
            requests=[],
            seconds=0.0,
            changes=0,
            reading_s=0.0,
            decoding_s=0.0,
            changing_s=0.0,
            copying_s=0.0,
            peak_gpu=0,
            peak_host=0,
        )
    )
    keeps_tokens: bool = False

    def process(self, environment: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        while self.waiting or self.host or self.running or self.arriving:
            self._take_arrived(environment.now)
            if self.waiting and self._has_room(self.waiting[0]):
                yield from self._read(environment)
            if self.host or self.running:
                yield from self._change(environment, self.phases.to_decode_s)
                yield from self._decode(environment)
                if self.waiting or self.arriving:
                    yield from self._change(environment, self.phases.to_prompts_s)
            elif self.arriving and not self.waiting:
                # Some may have come while copies ended.
                ahead_s = self.arriving[0].arrival_s - environment.now
                yield environment.timeout(max(0.0, ahead_s))

    def _take_arrived(self, now_s: float) -> None:
        while self.arriving and self.arriving[0].arrival_s <= now_s + 1e-12:
            self.waiting.append(self.arriving.popleft())

    def _has_room(self, request: PlayedRequest) -> bool:
        return self.host_tokens + request.prompt <= self.phases.host_tokens

    def _change(
        self, environment: simpy.Environment, seconds: float
    ) -> Generator[simpy.Event, Any, None]:
        if seconds:
            self.played.changes += 1
            self.played.changing_s += seconds
            yield environment.timeout(seconds)

    def _read(self, environment: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """Read prompts until the host's tier is full or none is left. Passes follow one another
        through the stages; copies to the host run beside them."""
        start_s = environment.now
        yield environment.timeout(self._fill_s())
        while self.waiting and self._has_room(self.waiting[0]):
            batch: list[PlayedRequest] = []
            tokens = 0
            while self.waiting and self._has_room(self.waiting[0]):
                if batch and tokens + self.waiting[0].prompt > self.phases.budget:
                    break
                request = self.waiting.popleft()
                batch.append(request)
                tokens += request.prompt
                self.host_tokens += request.prompt
            self.played.peak_host = max(self.played.peak_host, self.host_tokens)
            yield environment.timeout(self._pass_s(batch))
            self._first_tokens(batch, environment.now)
            # A prompt's keys and values leave when they are made.
            begun_s = max(self.copied_at_s, environment.now)
            self.copied_at_s = begun_s + tokens * self.phases.copy_s
            self._take_arrived(environment.now)
        self.played.reading_s += environment.now - start_s
        if self.copied_at_s > environment.now:
            self.played.copying_s += self.copied_at_s - environment.now
            yield environment.timeout(self.copied_at_s - environment.now)

    def _fill_s(self) -> float:
        """Seconds until the last stage has its first pass."""
        if self.reading.stages == 1:
            return 0.0
        first = min(self.waiting[0].prompt, self.phases.budget)
        return self.reading.pass_s(first, 0) * (self.reading.stages - 1) / self.reading.stages

    def _pass_s(self, batch: list[PlayedRequest]) -> float:
        """Seconds of a pass over some prompts on one of the replicas, which take turns."""
        tokens = sum(request.prompt for request in batch)
        pairs = sum(request.prompt**2 / 2 for request in batch)
        return self.reading.pass_s(tokens, pairs / tokens) / self.phases.readers

    def _first_tokens(self, batch: list[PlayedRequest], now_s: float) -> None:
        for request in batch:
            request.read = request.prompt
            request.first_s = now_s
            request.made = 1
            if self.keeps_tokens:
                request.token_times.append(now_s)
            if request.output == 1:
                request.end_s = now_s
                self.host_tokens -= request.prompt
                self.done.append(request)
            else:
                self.host.append(request)

    def _decode(self, environment: simpy.Environment) -> Generator[simpy.Event, Any, None]:
        """Decode until the host's tier has at most its threshold and prompts wait."""
        start_s = environment.now
        while self.host or self.running:
            self._take_arrived(environment.now)
            if self._turns_back():
                break
            self._bring_back(environment.now)
            ready = [one for one in self.running if one.ready_s <= environment.now]
            if ready:
                yield from self._steps(environment, ready)
            else:
                next_s = min(one.ready_s for one in self.running)
                self.played.copying_s += next_s - environment.now
                yield environment.timeout(next_s - environment.now)
        self.played.decoding_s += environment.now - start_s
        sent_s = self._send_back(len(self.running)) * self.phases.copy_s
        if sent_s:
            self.played.copying_s += sent_s
            yield environment.timeout(sent_s)

    def _turns_back(self) -> bool:
        """Whether prompts are read again: they wait, little is left in the host's tier, and it has
        room for all that runs and for the next prompt."""
        if not self.waiting or self.host_tokens > self.phases.threshold * self.phases.host_tokens:
            return False
        held = self.host_tokens + self.gpu_tokens + self.waiting[0].prompt
        return held <= self.phases.host_tokens

    def _bring_back(self, now_s: float) -> None:
        """Copy requests from the host to the GPUs, as long as these have room for them and for the
        next tokens of all."""
        while self.host and len(self.running) < self.phases.sequences * self.phases.decoders:
            request = self.host[0]
            held = request.prompt + request.made - 1
            if self.gpu_tokens + held + len(self.running) + 1 > self.phases.gpu_tokens:
                break
            self.host.popleft()
            self.copied_at_s = max(self.copied_at_s, now_s) + held * self.phases.copy_s
            request.ready_s = self.copied_at_s
            self.host_tokens -= held
            self.gpu_tokens += held
            self.running.append(request)
        self.played.peak_gpu = max(self.played.peak_gpu, self.gpu_tokens)

    def _steps(
        self, environment: simpy.Environment, ready: list[PlayedRequest]
    ) -> Generator[simpy.Event, Any, None]:
        """Decode those that are on the GPUs, until one of them ends, another has come, or room
        runs out."""
        if self.gpu_tokens + len(ready) > self.phases.gpu_tokens:
            self._send_back(1)
            return
        context = sum(one.prompt + one.made for one in ready) / len(ready)
        sequences = -(-len(ready) // self.phases.decoders)
        together = min(MOST_TOGETHER, *(one.output - one.made for one in ready))
        together = min(together, (self.phases.gpu_tokens - self.gpu_tokens) // len(ready))
        coming = [one.ready_s for one in self.running if one.ready_s > environment.now]
        coming += [one.arrival_s for one in list(self.arriving)[:1]]
        if coming:
            each_s = self.decoding.decode_s(sequences, context)
            together = min(together, int((min(coming) - environment.now) / each_s) + 1)
        each_s = self.decoding.decode_s(sequences, context + (together - 1) / 2)
        start_s = environment.now
        yield environment.timeout(each_s * together)
        self.gpu_tokens += together * len(ready)
        self.played.peak_gpu = max(self.played.peak_gpu, self.gpu_tokens)
        for one in ready:
            one.made += together
            if self.keeps_tokens:
                one.token_times += [start_s + each_s * (step + 1) for step in range(together)]
            if one.made == one.output:
                one.end_s = environment.now
                self.gpu_tokens -= one.prompt + one.made - 1
                self.done.append(one)
        self.running = [one for one in self.running if one.end_s is None]

    def _send_back(self, count: int) -> int:
        """Copy the last running requests to the host, or drop them where it is full; the tokens
        copied."""
        copied = 0
        for _ in range(count):
            request = self.running.pop()
            held = request.prompt + request.made - 1
            self.gpu_tokens -= held
            self.host_tokens += held
            self.host.appendleft(request)
            copied += held
        self.played.peak_host = max(self.played.peak_host, self.host_tokens)
        return copied


def play_phases(
    load: ServingLoad,
    clocks: tuple[StepClock, StepClock],
    phases: Phases,
    *,
    keeps_tokens: bool = False,
) -> PlayedPhases:
    """Play a load on GPUs that change layouts; clocks are those for prompts and for decoding."""
    tier = min(phases.gpu_tokens, phases.host_tokens)
    for place, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True)):
        if prompt + output > tier:
            problem = f"{prompt} and {output} tokens of output, but a tier holds {tier} tokens"
            refuse(f"prompts[{place}]", f"{problem}: give larger tiers, or shorter requests")
    requests = played_requests(load)
    environment = simpy.Environment()
    reading, decoding = clocks
    run = _Changing(
        phases=phases,
        reading=reading,
        decoding=decoding,
        waiting=deque(),
        arriving=deque(requests),
        keeps_tokens=keeps_tokens,
    )
    environment.process(run.process(environment))
    environment.run()
    run.played.requests = run.done
    run.played.seconds = environment.now
    return run.played
