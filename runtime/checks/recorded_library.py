"""A stand-in for ``torch.distributed`` over NCCL, as seen by a single rank.

The runtime's groups of processes (``runtime.comm.processes``) run their own code on it. It keeps
NCCL's order: a synchronous call runs on the current stream. An asynchronous call, or a batch of
messages, runs on NCCL's own stream for the group, after the work of the current stream so far, and
the current stream's later work comes after it only if ``wait`` is called. ``Ranks``, which stand
for the other ranks of the groups, determine what a call does to tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor, distributed

from runtime.comm.group import GroupMaker
from runtime.comm.library import LINK_CTAS, Work
from runtime.comm.processes import World, maker

# The timeout of ranks in seconds, never reached, since nothing waits here.
PATIENCE_S = 1.0
Messages = list[tuple[Tensor, int]]
# Numbers of rows in an all-to-all: received from each rank of a group, and sent to each.
RowsOfEach = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group as one rank sees it: its name, its global ranks, and this rank's global number."""

    name: str
    ranks: tuple[int, ...]
    seen_by: int

    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's index in the group; -1 if the rank is not in the group."""
        return self.ranks.index(self.seen_by) if self.seen_by in self.ranks else -1


class Ranks(Protocol):
    """Stand-ins for the other ranks of a rank's groups: the effect of each collective on this
    rank's tensors.
    """

    def all_reduce(self, group: RecordedGroup, tensor: Tensor, operation: str) -> None:
        """Reduce a tensor over the group, in place."""

    def all_gather(self, group: RecordedGroup, whole: Tensor, part: Tensor) -> None:
        """Fill ``whole``, the result of an all-gather, with the parts of all ranks."""

    def reduce_scatter(self, group: RecordedGroup, result: Tensor, whole: Tensor) -> None:
        """Fill ``result`` with this rank's part of the sum of a reduce-scatter."""

    def all_to_all(
        self, group: RecordedGroup, received: Tensor, sent: Tensor, rows: RowsOfEach
    ) -> None:
        """Fill ``received`` with the rows that all ranks send to this rank in an all-to-all."""

    def exchange(self, group: RecordedGroup, sends: Messages, receives: Messages) -> None:
        """Send tensors to other ranks and receive tensors from them, by global ranks."""

    def aside(self, group: RecordedGroup, call: Callable[[], None]) -> Work:
        """Make a call on NCCL's own stream for a group; returns the asynchronous work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    is_sent: bool
    tensor: Tensor
    peer: int
    group: RecordedGroup


@dataclass(slots=True, kw_only=True)
class _Config:
    max_ctas: int = 0


class LinkOptions:
    """The options of NCCL that the runtime sets for a group."""

    def __init__(self) -> None:
        self.config = _Config(max_ctas=LINK_CTAS)
        self._timeout: Any = None


@final
class RecordedLibrary:
    """Stands for ``torch.distributed`` over NCCL on rank ``rank`` of ``size`` ranks, and records
    its calls.
    """

    def __init__(self, rank: int, size: int, others: Ranks) -> None:
        self._world = RecordedGroup(name="world", ranks=tuple(range(size)), seen_by=rank)
        self._others = others
        # The groups created so far, with their timeouts and options.
        self.made: list[tuple[RecordedGroup, Any, Any]] = []

    def maker(self) -> GroupMaker:
        """Makes this rank's groups, by the runtime's own code."""
        world = self._world
        world_here = World(rank=world.seen_by, size=world.size(), local_rank=world.seen_by)
        return maker(world_here, PATIENCE_S, self)

    def new_group(
        self, ranks: Any, timeout: Any = None, *, pg_options: Any = None, group_desc: Any = None
    ) -> RecordedGroup:
        """Record and return a new communication group of the given ranks."""
        group = RecordedGroup(name=group_desc, ranks=tuple(ranks), seen_by=self._world.seen_by)
        self.made.append((group, timeout, pg_options))
        return group

    def world(self) -> RecordedGroup:
        """The group of all ranks in the run."""
        return self._world

    def link_options(self) -> LinkOptions:
        """The options for a group of neighbouring pipeline stages."""
        return LinkOptions()

    def get_process_group_ranks(self, group: RecordedGroup) -> list[int]:
        """The global ranks of a communication group."""
        return list(group.ranks)

    def get_backend(self, group: RecordedGroup) -> str:
        """The name of the backend that this object stands for, nccl."""
        return "nccl"

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Perform an all-reduce in place on this rank's tensor, with stand-ins for the other
        ranks.
        """
        operation = "max" if op == distributed.ReduceOp.MAX else "sum"
        return self._run(
            group, lambda of: self._others.all_reduce(of, tensor, operation), async_op=async_op
        )

    def all_gather_single(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        """Perform an all-gather of the ranks' tensors into one tensor, with stand-ins for the other
        ranks.
        """
        return self._run(
            group,
            lambda of: self._others.all_gather(of, output_tensor, input_tensor),
            async_op=async_op,
        )

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        op: Any = distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Perform a reduce-scatter with stand-ins for the other ranks: this rank's part of the
        sum.
        """
        assert op == distributed.ReduceOp.SUM
        return self._run(
            group, lambda of: self._others.reduce_scatter(of, output, input), async_op=async_op
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Perform an all-to-all: send each rank of a group its rows, and receive the rows that all
        ranks send to this rank.
        """
        rows = output_split_sizes, input_split_sizes
        return self._run(
            group, lambda of: self._others.all_to_all(of, output, input, rows), async_op=async_op
        )

    def message(self, *, is_sent: bool, tensor: Tensor, peer: int, group: Any) -> _Message:
        """A message (a send or a receive) for ``batch_isend_irecv``."""
        return _Message(is_sent=is_sent, tensor=tensor, peer=peer, group=group)

    def batch_isend_irecv(self, p2p_op_list: list[_Message]) -> Sequence[Work]:
        """Send and receive messages as one batch, on NCCL's own stream."""
        sends, receives = (
            [(one.tensor, one.peer) for one in p2p_op_list if one.is_sent == is_sent]
            for is_sent in (True, False)
        )
        group = p2p_op_list[0].group
        return [self._others.aside(group, lambda: self._others.exchange(group, sends, receives))]

    def _run(
        self, group: Any, call: Callable[[RecordedGroup], None], *, async_op: bool
    ) -> Work | None:
        of = self._world if group is None else group
        if async_op:
            return self._others.aside(of, lambda: call(of))
        call(of)
        return None
