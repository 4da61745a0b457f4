"""The passes of each stage in an iteration, with everything that follows from the order.

A pass's phase and its neighbours are derived only here. The event simulator and the runtime both
use them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mistlab.schedule.order_text import OrderedPass, PassKind, PipelineOrder, splits_backward
from mistlab.schedule.placement import Placement, StageChunk, loop
from mistlab.schedule.slot_table import Phase

# Stage, kind, chunk and micro-batch of a pass.
PassKey = tuple[int, PassKind, int, int]
# The most pipelines whose passes are kept in memory.
_MOST_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """One pass of a micro-batch through a chunk of a stage; ``number`` counts the stage's passes.

    ``phase`` is ``first_forward`` for the first F of a chunk. It is ``last_backward`` for the
    chunk's last B, or for its last W if the stage has W (then all its B are ``backward``).
    ``is_first`` marks the first pass of its kind in its chunk, with which sums of gradients begin.
    ``comes_from`` and ``goes_to`` are None at the model's ends and for W.
    """

    stage: int
    number: int
    kind: PassKind
    chunk: int
    micro_batch: int
    phase: Phase
    is_first: bool
    comes_from: StageChunk | None
    goes_to: StageChunk | None

    @property
    def key(self) -> PassKey:
        """The key of the pass: no other pass of the pipeline has it."""
        return self.stage, self.kind, self.chunk, self.micro_batch

    @property
    def is_received(self) -> bool:
        """Whether another stage sends its input."""
        return self.comes_from is not None and self.comes_from.stage != self.stage

    @property
    def is_sent(self) -> bool:
        """Whether its outcome is sent to another stage."""
        return self.goes_to is not None and self.goes_to.stage != self.stage

    @property
    def needs(self) -> PassKey | None:
        """The pass of another part that makes its input; None if there is none."""
        source = self.comes_from
        if source is None:
            return None
        return source.stage, self.kind, source.chunk, self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePasses:
    """A stage's passes in order; ``most_held`` is the most micro-batches of all chunks at once,
    each from F to the last pass that needs its activations.

    ``placement`` says where the parts of all stages lie.
    """

    passes: tuple[StagePass, ...]
    placement: Placement
    most_held: int
    splits_backward: bool

    def __iter__(self) -> Iterator[StagePass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def chunks(self) -> int:
        """Number of chunks of the stage."""
        return self.placement.chunks


# Those of a stage whose passes nobody asks for.
NO_PASSES = StagePasses(passes=(), placement=loop(1), most_held=0, splits_backward=False)


@lru_cache(maxsize=_MOST_KEPT)
def passes_of(order: PipelineOrder) -> tuple[StagePasses, ...]:
    """The passes of each stage of a pipeline."""
    return tuple(_of_stage(order, stage) for stage in range(order.num_stages))


@lru_cache(maxsize=_MOST_KEPT)
def in_turn(passes: tuple[StagePasses, ...]) -> tuple[StagePass, ...]:
    """All passes of a pipeline that can run, each after the passes that it needs."""
    ran: list[StagePass] = []
    ended: set[PassKey] = set()
    done = [0] * len(passes)
    waiting: dict[PassKey, int] = {}
    ready = list(range(len(passes)))
    while ready:
        stage = ready.pop()
        for one in passes[stage].passes[done[stage] :]:
            needs = one.needs
            if needs is not None and needs not in ended:
                waiting[needs] = stage
                break
            key = one.key
            ran.append(one)
            ended.add(key)
            done[stage] += 1
            if key in waiting:
                ready.append(waiting.pop(key))
    return tuple(ran)


def _of_stage(order: PipelineOrder, stage: int) -> StagePasses:
    actions = order.stages[stage]
    splits = splits_backward(actions)
    first: dict[tuple[PassKind, int], int] = {}
    last: dict[tuple[PassKind, int], int] = {}
    # Ends and neighbours are those of a kind of pass of a chunk.
    for number, one in enumerate(actions):
        first.setdefault((one.kind, one.chunk), number)
        last[one.kind, one.chunk] = number
    ways = {
        (one.kind, one.chunk): (order.source(stage, one), order.destination(stage, one))
        for one in (actions[number] for number in first.values())
    }
    passes = []
    for number, one in enumerate(actions):
        key = one.kind, one.chunk
        is_first, is_last = first[key] == number, last[key] == number
        passes.append(
            StagePass(
                stage=stage,
                number=number,
                kind=one.kind,
                chunk=one.chunk,
                micro_batch=one.micro_batch,
                phase=_phase(one.kind, is_first=is_first, is_last=is_last, splits=splits),
                is_first=is_first,
                comes_from=ways[key][0],
                goes_to=ways[key][1],
            )
        )
    return StagePasses(
        passes=tuple(passes),
        placement=order.placement,
        most_held=_most_held(actions, frees="W" if splits else "B"),
        splits_backward=splits,
    )


def _phase(kind: PassKind, *, is_first: bool, is_last: bool, splits: bool) -> Phase:
    if kind == "F":
        return "first_forward" if is_first else "forward"
    return "last_backward" if is_last and (kind == "W" or not splits) else "backward"


def _most_held(actions: Sequence[OrderedPass], *, frees: PassKind) -> int:
    """The most micro-batches of all chunks that a stage holds at once, each from its F to its pass
    of kind ``frees``."""
    held = most = 0
    for one in actions:
        held += {"F": 1, frees: -1}.get(one.kind, 0)
        most = max(most, held)
    return most
