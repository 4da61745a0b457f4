"""Executes a serving schedule on one rank; the model alternates between a layout for prefill and
one for decoding.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from mistlab.plan.workload import Workload
from mistlab.serving.load import ServingLoad
from mistlab.serving.phase_schedule import (
    Action,
    Change,
    DecodeSteps,
    Drop,
    Fetch,
    Moved,
    PhaseLimits,
    PhaseSchedule,
    ReadPrompts,
    Store,
    Wait,
)
from mistlab.serving.resharding import Layout, Part, common, pieces_to, width
from runtime.comm.group import Group, GroupMaker, Pending, finished
from runtime.models.attention import Attention
from runtime.models.transformer import Block, Embedding, Head
from runtime.serving.kept_tokens import (
    BlockPool,
    CopyLane,
    KeptAttention,
    KeptPass,
    read_tokens,
    write_tokens,
)
from runtime.serving.served_weights import (
    ServedLayers,
    ServedWeights,
    Start,
    config_over,
    dtype_of,
    model_tensors,
    whole_tensors,
)

# The type of a function that allocates memory shared by all ranks of a node, by name and shape.
HostMemory = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
Layouts = tuple[Layout, Layout]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhasedJob:
    """The inputs of all ranks: requests with prompts, the model with initial weights, both layouts,
    and limits. When the layout changes, weights come from other ranks or from host memory.
    """

    workload: Workload
    layouts: Layouts
    limits: PhaseLimits
    load: ServingLoad
    prompts: Sequence[Sequence[int]]
    start: Start
    weights_from_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """The record of a rank's run: its actions, the tokens of all requests, the bytes received in
    each change of layout (weights; keys and values), the bytes copied to the host and back, and
    seconds by cause.
    """

    actions: list[Action]
    tokens: list[list[int]]
    weight_bytes: list[int]
    cache_bytes: list[int]
    stored_bytes: int
    fetched_bytes: int
    seconds: dict[str, float]


class GroupedRanks:
    """Tensor-parallel ranks of a served model, by a group of ranks; collectives block."""

    splits_tokens = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size, self.rank = group.size, group.rank

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce a tensor over the group, in place."""
        if self.size > 1:
            finished(self._group.all_reduce(tensor, operation))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        parts = tensor.new_empty(self.size * tensor.numel())
        finished(self._group.all_gather(parts, tensor.contiguous().flatten()))
        return torch.cat(parts.view(self.size, *tensor.shape).unbind(), -1)

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Return the tensor itself, since every rank has all tokens."""
        del again
        return tensor

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Return the tensor itself, since every rank keeps all tokens."""
        del of_input
        return tensor


@dataclass(slots=True, eq=False)
class _PhaseStage:
    """A rank's part of the model under one layout: its layers, its heads, the cache blocks of its
    replica's requests, and the rotary tables.
    """

    layout: Layout
    ranks: GroupedRanks
    layers: ServedLayers
    pool: BlockPool
    heads: Part
    blocks: range
    attention: list[KeptAttention] = field(default_factory=list)
    tables: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        for index, block in enumerate(self.blocks):
            module = self.layers.modules[block + 1]
            assert isinstance(module, Block)
            assert isinstance(module.attention, Attention)
            module.attention.kept = KeptAttention(module.attention, self.pool, index)
            self.attention.append(module.attention.kept)
        if self.layers.rotary is not None:
            self.tables = self.layers.rotary.cosine, self.layers.rotary.sine

    def prepare(self, of: KeptPass) -> Tensor:
        """Give the layers the tokens of the next pass, and the rotary tables of their positions."""
        places = of.places()
        for kept in self.attention:
            kept.tokens = of
        if self.layers.rotary is not None and self.tables is not None:
            self.layers.rotary.cosine, self.layers.rotary.sine = (
                one[places] for one in self.tables
            )
        embedding = self.layers.modules.get(0)
        if isinstance(embedding, Embedding):
            embedding.places = places
        return places


class PhasedRank:
    """A rank that executes a serving schedule from its first action to its last; ``prompts`` are
    the tokens of all requests' prompts.
    """

    def __init__(
        self,
        job: PhasedJob,
        *,
        world: Group,
        maker: GroupMaker,
        host_memory: HostMemory,
    ) -> None:
        workload, layouts, limits = job.workload, job.layouts, job.limits
        prompts, start = job.prompts, job.start
        self.workload, self.layouts, self.limits = workload, layouts, limits
        self.world, self.rank = world, world.rank
        self.prompts = [list(one) for one in prompts]
        self.made: list[list[int]] = [[] for _ in prompts]
        # New tokens since all ranks last exchanged tokens: request, position, and whether this rank
        # chose the token.
        self.new: list[tuple[int, int, bool]] = []
        # Batches whose tokens the last stage has sent, but this stage has not received yet.
        self.coming: deque[list[int]] = deque()
        self.unknown: dict[int, deque[int]] = {number: deque() for number in range(len(prompts))}
        self.actions: list[Action] = []
        self._arrived = False
        self.schedule = PhaseSchedule(job.load, limits, self)
        spec = workload.model
        groups = [_tensor_groups(layout, maker, self.rank) for layout in layouts]
        self.tensor_ranks = [GroupedRanks(group) for group in groups]
        whole = config_over(workload, layouts)
        tensors = model_tensors(workload, whole)
        self.dtype = dtype_of(workload)
        self.weights = ServedWeights(tensors, spec.layers, layouts[0], world, self.dtype)
        self.weights.load(whole_tensors(workload, tensors, start))
        self.host_weights: dict[str, Tensor] | None = None
        if job.weights_from_host:
            self.host_weights = {
                one.name: host_memory(one.name, one.shape, self.dtype) for one in tensors
            }
            if self.rank == 0:
                for tensor_of_model, tensor in whole_tensors(workload, tensors, start):
                    self.host_weights[tensor_of_model.name].copy_(tensor)
        shape = (spec.layers, 2, limits.block, spec.kv_heads, spec.head_dim)
        self.host = BlockPool(host_memory("tier", (limits.host_blocks, *shape), self.dtype))
        self.lane = CopyLane()
        self.sent: list[Pending] = []
        # Requests whose cache blocks become free once their copy to the host has ended.
        self.leaving: deque[tuple[int, Future[None]]] = deque()
        self.cache_bytes: list[int] = []
        self.stored_bytes = self.fetched_bytes = 0
        self.seconds = dict.fromkeys(("reading", "decoding", "changing"), 0.0)
        self.stage = self._stage(0)
        # Ranks may read host memory only after all ranks have written theirs.
        self._settle()

    # Answers the schedule's questions while its actions are planned: all requests have arrived at
    # the start, and a copy is awaited where its result is needed.

    def arrived(self) -> list[int]:
        """All requests at the first call, and none later."""
        come = [] if self._arrived else list(range(len(self.prompts)))
        self._arrived = True
        return come

    def is_fetched(self, request: int) -> bool:
        """True: a step may include any request, because the step waits for the request's copy."""
        del request
        return True

    def most_steps(self, requests: Sequence[Sequence[int]]) -> int:
        """So many decode steps that they are unlimited, since no further request arrives."""
        del requests
        return 10**9

    # Executes the actions of the serving schedule: passes, copies and changes of layout.

    def run(self) -> ServedRun:
        """Execute all actions of the serving schedule, in order."""
        try:
            with torch.no_grad():
                for action in self.schedule.actions():
                    self.actions.append(action)
                    self._perform(action)
                self._settle()
        finally:
            self.lane.close()
        return ServedRun(
            actions=self.actions,
            tokens=self.made,
            weight_bytes=self.weights.moved_bytes,
            cache_bytes=self.cache_bytes,
            stored_bytes=self.stored_bytes,
            fetched_bytes=self.fetched_bytes,
            seconds=self.seconds,
        )

    def _perform(self, action: Action) -> None:
        match action:
            case ReadPrompts():
                with self._timed("reading"):
                    self._read(action)
            case DecodeSteps():
                with self._timed("decoding"):
                    self._decode(action)
            case Store():
                self._store(action)
            case Fetch():
                self._fetch(action)
            case Change():
                with self._timed("changing"):
                    self._change(action)
            case Drop():
                if self._is_of(action.replica):
                    self.stage.pool.release(action.request)
            case Wait():
                raise AssertionError

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start_s = perf_counter()
        yield
        self.seconds[what] += perf_counter() - start_s

    def _is_of(self, replica: int) -> bool:
        return self.stage.layout.replica_of(self.rank) == replica

    def _stage(self, number: int) -> _PhaseStage:
        """This rank's layers and empty cache blocks under the layout with this number."""
        layout, spec = self.layouts[number], self.workload.model
        config = config_over(self.workload, self.layouts)
        layers = ServedLayers(
            self.workload,
            config,
            layout.layers_of(self.rank, spec.layers),
            self.tensor_ranks[number],
            self.weights,
        )
        blocks = layout.blocks_of(self.rank, spec.layers)
        heads = layout.heads_of(self.rank, spec.kv_heads)
        count = self.limits.decoding_blocks if number else self.limits.reading_blocks
        kv_heads = int(spec.kv_heads * width(heads))
        shape = (count, len(blocks), 2, self.limits.block, kv_heads, spec.head_dim)
        pool = BlockPool(torch.zeros(shape, dtype=self.dtype))
        return _PhaseStage(layout, self.tensor_ranks[number], layers, pool, heads, blocks)

    # Forward passes of prefill and decoding.

    def _read(self, action: ReadPrompts) -> None:
        if not self._is_of(action.replica):
            self._note(action.requests, None)
            return
        tokens = [self.prompts[one] + self.made[one] for one in action.requests]
        assert tuple(map(len, tokens)) == action.tokens
        for number, count in zip(action.requests, action.tokens, strict=True):
            self._take_blocks(number, count)
        self._note(action.requests, self._through(action.requests, tokens, [0] * len(tokens)))
        for number in action.requests:
            # Requests with a single output token end with their prefill.
            if self.schedule.requests[number].made == self.schedule.requests[number].output:
                self.stage.pool.release(number)

    def _decode(self, action: DecodeSteps) -> None:
        replica_here = self.stage.layout.replica_of(self.rank)
        for replica, numbers in enumerate(action.requests):
            if replica != replica_here:
                for _ in range(action.steps):
                    self._note(numbers, None)
        numbers = action.requests[replica_here]
        self.lane.wait()
        parts = _parts(numbers, self.stage.layout.pp)
        for _ in range(action.steps):
            for part in parts:
                self._step(part)
        for number in numbers:
            request = self.schedule.requests[number]
            if request.made + action.steps == request.output:
                self.stage.pool.release(number)

    def _step(self, part: Sequence[int]) -> None:
        """Decode one token for each sequence of a batch."""
        while self._is_first and any(set(part) & set(coming) for coming in self.coming):
            self._take_tokens()
        held = [len(self.prompts[one]) + len(self.made[one]) - 1 for one in part]
        for number, tokens in zip(part, held, strict=True):
            self._take_blocks(number, tokens + 1)
        last = [[self.made[one][-1]] for one in part]
        made = self._through(part, last, held)
        if self.stage.layout.pp > 1 and made is not None:
            self._send(torch.tensor(made), 1 - self.stage.layout.pp)
        elif self._is_first and made is None:
            self.coming.append(list(part))
            for number in part:
                self.unknown[number].append(len(self.made[number]))
        self._note(part, made)

    def _note(self, requests: Sequence[int], made: Sequence[int] | None) -> None:
        """Record a new token for each request; 0 if this rank does not know the token yet."""
        chose = made is not None and self._ranks.rank == 0
        for index, number in enumerate(requests):
            self.new.append((number, len(self.made[number]), chose))
            self.made[number].append(0 if made is None else made[index])

    def _take_blocks(self, request: int, tokens: int) -> None:
        """Allocate cache blocks for a request. If too few are free, wait for copies to the host,
        which free blocks.
        """
        pool = self.stage.pool
        while pool.lacks(request, tokens) and self.leaving:
            left, copied = self.leaving.popleft()
            copied.result()
            pool.release(left)
        pool.grow(request, tokens)

    @property
    def _is_first(self) -> bool:
        return self.stage.layout.stage_of(self.rank) == 0

    @property
    def _is_last(self) -> bool:
        return self.stage.layout.stage_of(self.rank) == self.stage.layout.pp - 1

    @property
    def _ranks(self) -> GroupedRanks:
        return self.stage.ranks

    def _through(
        self, requests: Sequence[int], tokens: Sequence[Sequence[int]], before: Sequence[int]
    ) -> list[int] | None:
        """Run a pass through this rank's stage; returns the next tokens on the last stage."""
        stage = self.stage
        of = KeptPass(
            [stage.pool.tables[one] for one in requests], before, [len(one) for one in tokens]
        )
        places = stage.prepare(of)
        x = self._received(len(places)) if not self._is_first else None
        for module in stage.layers.modules.values():
            if isinstance(module, Embedding):
                x = module(torch.tensor([[token for one in tokens for token in one]]))
            elif not isinstance(module, Head):
                x = module(x)
        assert x is not None
        if not self._is_last:
            self._send(x, 1)
            return None
        ends = torch.tensor(of.new).cumsum(0) - 1
        head = stage.layers.modules[self.workload.model.layers + 1]
        assert isinstance(head, Head)
        logits = self._ranks.all_gather(head.logits(x[:, ends]))
        chosen: list[int] = logits[0].argmax(-1).tolist()
        return chosen

    # Messages between pipeline stages, and between all ranks.

    def _send(self, tensor: Tensor, stages: int) -> None:
        """Send a tensor to the rank with the same tensor-parallel index in a later stage."""
        peer = self.rank + stages * self.stage.layout.tp
        pending = self.world.exchange([(tensor.contiguous(), peer)], [])
        if pending is not None:
            self.sent.append(pending)

    def _received(self, tokens: int) -> Tensor:
        """Receive activations (1, T, hidden) from the previous stage."""
        x = torch.empty(1, tokens, self.workload.model.hidden, dtype=self.dtype)
        finished(self.world.exchange([], [(x, self.rank - self.stage.layout.tp)]))
        return x

    def _take_tokens(self) -> None:
        """Receive the tokens of the oldest batch that the last stage has sent."""
        part, layout = self.coming.popleft(), self.stage.layout
        tokens = torch.empty(len(part), dtype=torch.int64)
        finished(self.world.exchange([], [(tokens, self.rank + (layout.pp - 1) * layout.tp)]))
        for number, token in zip(part, tokens.tolist(), strict=True):
            self.made[number][self.unknown[number].popleft()] = token

    def _settle(self) -> None:
        """Complete all messages and copies on all ranks; from then on all ranks know all tokens."""
        while self.coming:
            self._take_tokens()
        for pending in self.sent:
            finished(pending)
        self.sent.clear()
        self.lane.wait()
        while self.leaving:
            self.stage.pool.release(self.leaving.popleft()[0])
        self.new.sort()
        chosen = [self.made[one][place] if chose else 0 for one, place, chose in self.new]
        # A further number makes the message non-empty even without new tokens.
        tokens = torch.tensor([*chosen, 0])
        finished(self.world.all_reduce(tokens))
        for (request, index, _), token in zip(self.new, tokens.tolist(), strict=False):
            self.made[request][index] = token
        self.new.clear()

    # Copies between device and host, and changes of layout.

    def _store(self, action: Store) -> None:
        """Copy a request's keys and values to the host: while prefill passes run, or at once in
        decoding.
        """
        is_reading = self.stage.layout is self.layouts[0]
        if not is_reading:
            # Wait for all ranks: some may still read these blocks of host memory.
            self._settle()
        self.host.grow(action.request, action.tokens)
        if self._is_of(action.replica):
            table = self.stage.pool.tables[action.request]
            values = read_tokens(self.stage.pool.memory, table, action.tokens)
            self.stored_bytes += values.numel() * values.itemsize
            memory, to = self.host_part(), self.host.tables[action.request]
            copied = self.lane.submit(lambda: write_tokens(memory, to, values))
            self.leaving.append((action.request, copied))
        if not is_reading:
            self._settle()

    def _fetch(self, action: Fetch) -> None:
        """Copy a request's keys and values from the host to this rank's cache."""
        table = self.host.tables[action.request]
        if self._is_of(action.replica):
            pool, memory = self.stage.pool, self.host_part()
            self._take_blocks(action.request, action.tokens)
            to = pool.tables[action.request]
            self.lane.submit(
                lambda: write_tokens(pool.memory, to, read_tokens(memory, table, action.tokens))
            )
            each = memory[0, :, :, 0].numel() * memory.itemsize
            self.fetched_bytes += action.tokens * each
        self.host.release(action.request)

    def host_part(self) -> Tensor:
        """The part of host memory that has this rank's transformer blocks and heads."""
        return self._part_of(self.host.memory, self.stage)

    def _part_of(self, memory: Tensor, stage: _PhaseStage) -> Tensor:
        count = self.workload.model.kv_heads
        heads = slice(int(stage.heads[0] * count), int(stage.heads[1] * count))
        return memory[:, stage.blocks.start : stage.blocks.stop, :, :, heads]

    def _change(self, action: Change) -> None:
        self._settle()
        before, number = self.stage, int(action.to == "decoding")
        after = self.layouts[number]
        if after != before.layout:
            before.layers.modules.clear()
            self.weights.change(after, self.host_weights)
        self.stage = self._stage(number)
        self.cache_bytes.append(self._move(action.moved, before))

    def _move(self, moved: Sequence[Moved], before: _PhaseStage) -> int:
        """Receive the keys and values of requests that stay on devices from the ranks that hold
        them; returns the bytes received.
        """
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        places: list[tuple[Moved, range, Part]] = []
        fresh: dict[int, Tensor] = {}
        for move in moved:
            if move.target == self.stage.layout.replica_of(self.rank):
                self.stage.pool.grow(move.request, move.tokens)
                fresh[move.request] = self._room(move.tokens, self.stage)
            for source, target, blocks, part in self._pieces(move, before):
                if source == target == self.rank:
                    values = self._cut(self._held(move, before), before, blocks, part)
                    self._cut(fresh[move.request], self.stage, blocks, part).copy_(values)
                elif source == self.rank:
                    values = self._cut(self._held(move, before), before, blocks, part)
                    sends.append((values.contiguous(), target))
                elif target == self.rank:
                    view = self._cut(fresh[move.request], self.stage, blocks, part)
                    receives.append((torch.empty(view.shape, dtype=self.dtype), source))
                    places.append((move, blocks, part))
        finished(self.world.exchange(sends, receives))
        for (values, _), (move, blocks, part) in zip(receives, places, strict=True):
            self._cut(fresh[move.request], self.stage, blocks, part).copy_(values)
        for request, values in fresh.items():
            write_tokens(self.stage.pool.memory, self.stage.pool.tables[request], values)
        return sum(values.numel() * values.itemsize for values, _ in receives)

    def _room(self, tokens: int, stage: _PhaseStage) -> Tensor:
        return torch.empty(tokens, *stage.pool.memory[0, :, :, 0].shape, dtype=self.dtype)

    def _held(self, move: Moved, stage: _PhaseStage) -> Tensor:
        return read_tokens(stage.pool.memory, stage.pool.tables[move.request], move.tokens)

    def _cut(self, values: Tensor, stage: _PhaseStage, blocks: range, part: Part) -> Tensor:
        """The slice of keys and values (tokens, layers, 2, K, D) for some transformer blocks and
        heads of a stage.
        """
        count = self.workload.model.kv_heads
        first, last = (int((heads - stage.heads[0]) * count) for heads in part)
        layers = slice(blocks.start - stage.blocks.start, blocks.stop - stage.blocks.start)
        return values[:, layers, :, first:last]

    def _pieces(self, move: Moved, before: _PhaseStage) -> Iterator[tuple[int, int, range, Part]]:
        """Which transformer blocks and heads of a request go from which rank to which; parts that
        stay on a rank are listed too.
        """
        old, new, spec = before.layout, self.stage.layout, self.workload.model
        for target in range(self.world.size):
            if new.replica_of(target) != move.target:
                continue
            own_blocks, part = (
                new.blocks_of(target, spec.layers),
                new.heads_of(target, spec.kv_heads),
            )
            for stage in range(old.pp):
                holders = old.ranks_of(move.source, stage)
                had = old.blocks_of(holders[0], spec.layers)
                both = range(max(own_blocks.start, had.start), min(own_blocks.stop, had.stop))
                if not both:
                    continue
                kept = old.heads_of(target, spec.kv_heads) if target in holders else None
                if kept is not None and width(common(part, kept)):
                    yield target, target, both, common(part, kept)
                peers = [(peer, old.heads_of(peer, spec.kv_heads)) for peer in holders]
                for piece in pieces_to(target, part, kept, peers):
                    yield piece.source, target, both, piece.part


def _parts(requests: Sequence[int], stages: int) -> list[Sequence[int]]:
    """The requests divided into as many batches as there are stages, without empty batches."""
    count = min(stages, len(requests))
    return [requests[place::count] for place in range(count)]


def _tensor_groups(layout: Layout, maker: GroupMaker, rank: int) -> Group:
    """This rank's tensor-parallel group under a layout; all ranks create all of these groups."""
    own_group: Group | None = None
    for replica in range(layout.dp):
        for stage in range(layout.pp):
            ranks = layout.ranks_of(replica, stage)
            made = maker(f"tensor {layout.text}", list(ranks))
            if rank in ranks:
                own_group = made
    assert own_group is not None
    return own_group
