"""Groups of ranks: collectives, handles of running collectives, first calls that connect ranks, and
out-of-memory errors.

Starting a collective returns a ``Pending`` if the caller must wait for it. Otherwise it returns
None: the collective has ended already, or runs on a CUDA stream, whose later work comes after the
collective.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, distributed


class RankLostError(RuntimeError):
    """Another rank has terminated, or did not answer in time."""


class Pending(Protocol):
    """A collective that has been started and may still run."""

    def is_ready(self) -> bool:
        """Whether the collective has ended, so that ``finish`` would not block."""

    def wait_a_moment(self) -> None:
        """Block until the collective may have ended, or for a moment."""

    def finish(self) -> None:
        """Complete the collective once it has ended, for instance by copying its result; called
        once.
        """


class Channel(Protocol):
    """The ranks of two pipeline stages that send messages to each other."""

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Pending | None:
        """Send each tensor of ``sends`` to its rank, and receive each of ``receives`` from its
        rank.
        """


class Group(Channel, Protocol):
    """Ranks that communicate; every rank calls the same collectives in the same order."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending | None:
        """Reduce ``tensor`` over the ranks, in place; ``operation`` is ``sum`` or ``max``."""

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending | None:
        """Fill ``whole`` with the tensors ``part`` of all ranks, in the order of ranks.

        ``part`` is this rank's part, and may be a view of its position in ``whole``.
        """

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> Pending | None:
        """Sum ``whole`` over the ranks and keep this rank's part: in ``into`` if it is given,
        otherwise at the part's position in ``whole``.
        """

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> Pending | None:
        """Send each rank its consecutive rows of ``sent``, and fill ``received`` with the rows from
        each rank.

        ``to_each`` and ``from_each`` are the numbers of rows, in the order of ranks.
        """


class Alone:
    """A group of one rank, in which collectives only copy."""

    size = 1
    rank = 0

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> None:
        """All-reduce in a group of one rank: does nothing."""

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Copy ``part`` into ``whole``, unless ``part`` is a view of ``whole``'s beginning."""
        # Storages and offsets are compared because tensors without memory have no address.
        places = [(one.untyped_storage()._cdata, one.storage_offset()) for one in (part, whole)]
        if places[0] != places[1]:
            whole.copy_(part)

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> None:
        """Copy ``whole`` into ``into``, if it is given."""
        if into is not None:
            into.copy_(whole)

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> None:
        """All-to-all in a group of one rank: copy the sent rows to the received rows."""
        del from_each, to_each
        received.copy_(sent)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Raise an error for any message, since there is no other rank."""
        assert not sends
        assert not receives


# The type of a function that makes a group from its name and its ranks; it returns None if the
# calling rank is not one of them.
GroupMaker = Callable[[str, Sequence[int]], Group | None]


def own_part(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of a flat tensor that the ranks of a group divide evenly."""
    return whole.chunk(group.size)[group.rank]


class Then:
    """A running collective, and a function that is called when it has ended."""

    def __init__(self, pending: Pending, follow: Callable[[], object]) -> None:
        self._pending = pending
        self._follow = follow

    def is_ready(self) -> bool:
        """Whether the running collective has ended."""
        return self._pending.is_ready()

    def wait_a_moment(self) -> None:
        """Wait a moment for the collective."""
        self._pending.wait_a_moment()

    def finish(self) -> None:
        """Complete the collective, then call the function that follows it."""
        self._pending.finish()
        self._follow()


def finished(pending: Pending | None) -> None:
    """Wait for a collective and complete it; None stands for a collective that needs no wait."""
    if pending is not None:
        while not pending.is_ready():
            pending.wait_a_moment()
        pending.finish()


class Together:
    """Several running collectives, handled as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def is_ready(self) -> bool:
        """Whether all of the joined collectives have ended."""
        return all(one.is_ready() for one in self._pending)

    def wait_a_moment(self) -> None:
        """Wait a moment for one of the collectives that still run."""
        next((one for one in self._pending if not one.is_ready()), self._pending[0]).wait_a_moment()

    def finish(self) -> None:
        """Complete all collectives, in order."""
        for pending in self._pending:
            pending.finish()


def together(started: Iterable[Pending | None]) -> Pending | None:
    """Several running collectives as one; None if none of them needs a wait."""
    pending = [one for one in started if one is not None]
    return Together(pending) if pending else None


class InTurn:
    """Collectives that are started one after another, handled as one."""

    def __init__(self, steps: Iterator[Pending | None]) -> None:
        self._steps = steps
        self._current = self._next()

    @property
    def is_done(self) -> bool:
        """Whether the last of the collectives has been completed."""
        return self._current is None

    def is_ready(self) -> bool:
        """Whether all collectives have ended; starts the next one if the current one has ended."""
        while self._current is not None:
            if not self._current.is_ready():
                return False
            self._current.finish()
            self._current = self._next()
        return True

    def wait_a_moment(self) -> None:
        """Wait a moment for the collective that is running."""
        if self._current is not None:
            self._current.wait_a_moment()

    def finish(self) -> None:
        """Does nothing: each collective was completed when it ended."""
        assert self.is_done

    def _next(self) -> Pending | None:
        """Start collectives until one needs a wait, and return that collective."""
        return next((one for one in self._steps if one is not None), None)


def in_turn(steps: Iterator[Pending | None]) -> Pending | None:
    """The given collectives as one that runs them one after another; None if none of them needs a
    wait.
    """
    turns = InTurn(steps)
    return None if turns.is_done else turns


def then(pending: Pending | None, follow: Callable[[], object]) -> Pending | None:
    """Call ``follow`` once a collective has ended; at once if there is nothing to wait for
    (None).
    """
    if pending is None:
        follow()
        return None
    return Then(pending, follow)


# First calls of every group of ranks before training, so that all ranks connect in the same order.
#
# NCCL creates a group's communicator at the group's first call, and blocks each rank there until
# all ranks of the group have called. A batch of messages can be the first call only if every rank
# of the group sends or receives in it. The first message between two ranks creates their channels,
# and blocks each until the other calls. So every group is called, and ranks of neighbouring stages
# exchange a message, before ranks issue anything else. From then on no rank waits for connections,
# and all memory of communicators is allocated.


def enter(groups: Iterable[Group], device: torch.device) -> None:
    """Call each group once; every rank must pass its groups in the same order."""
    for group in groups:
        if group.size > 1:
            finished(group.all_reduce(_smallest(device)))


def greet(
    link: Channel, receivers: Sequence[int], senders: Sequence[int], device: torch.device
) -> None:
    """Send one message to each receiver, and receive one from each sender (indices in the
    group).
    """
    if receivers or senders:
        sends = [(_smallest(device), rank) for rank in receivers]
        receives = [(_smallest(device), rank) for rank in senders]
        finished(link.exchange(sends, receives))


def greet_all(group: Group, device: torch.device) -> None:
    """Exchange one number with each rank of a group."""
    if group.size > 1:
        each = [1] * group.size
        sent, received = (torch.zeros(group.size, device=device) for _ in range(2))
        finished(group.all_to_all(received, sent, each, each))


def _smallest(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)


# Out-of-memory errors that name the stage, the task and the bytes allocated.


# Texts by which out-of-memory errors of other allocators than torch's are recognised: texts of the
# host; of CUDA, also in its libraries; of NCCL (src/include/alloc.h); of cuBLAS and cuDNN.
_WORDS = (
    "can't allocate memory",
    "out of memory",
    "failed to cuda malloc",
    "failed to cuda calloc",
    "failed to cuda host alloc",
    "status_alloc_failed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Where memory ran out: the stage, the task and the bytes allocated.

    ``held_bytes`` has the bytes of each class of memory, by the names of predictions.
    ``outside_bytes`` are bytes of the device outside torch's allocator (0 on a CPU). ``reason`` is
    the allocator's message.
    """

    stage: int
    doing: str
    held_bytes: Mapping[str, int]
    outside_bytes: int = 0
    reason: str


class ShortageError(RuntimeError):
    """Memory of a device or of the host ran out."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(f"stage {shortage.stage} is out of memory at {shortage.doing}")
        self.shortage = shortage


@contextmanager
def refusals() -> Iterator[None]:
    """Within the ``with`` block, turn out-of-memory errors of all allocators into
    ``MemoryError``.
    """
    try:
        yield
    except RuntimeError as error:
        reason = refusal_in(error)
        if reason is None:
            raise
        raise MemoryError(reason) from error


def refusal_in(error: BaseException) -> str | None:
    """The line of an error's message that reports lack of memory; None for other errors, and for
    this project's own errors about lack of memory on any rank.
    """
    lines = str(error).strip().splitlines()
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return lines[0] if lines else type(error).__name__
    if not isinstance(error, RuntimeError) or isinstance(error, ShortageError | RankLostError):
        return None
    refusing = next((line for line in lines if any(word in line.lower() for word in _WORDS)), None)
    if refusing is not None and isinstance(error, distributed.DistBackendError):
        refusing = f"NCCL: {refusing}"
    return refusing
