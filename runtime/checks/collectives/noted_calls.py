"""Records the collective calls that the runtime's own code makes on one rank, whose groups are
replaced by stand-ins.
"""

from collections.abc import Callable, Iterable
from typing import Self

from torch import Tensor

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from runtime.checks.collectives.world_calls import Call, Groups, Kind, RankCalls, Step
from runtime.checks.recorded_library import Messages, RecordedGroup, RecordedLibrary, RowsOfEach
from runtime.comm.library import Work
from runtime.comm.replicas import connected_replicas
from runtime.comm.topology import Connections


class NotedCalls:
    """Stand-ins for the other ranks of a rank's groups: they record the rank's calls, and answer
    with zeros.

    If ``route`` is empty, messages are counted in elements. Otherwise they are counted in bytes,
    and each exchange has a route of its own.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.route = rank, ""
        self.sends: dict[str, dict[int, int]] = {}
        self.receives: dict[str, dict[int, int]] = {}
        self._calls: list[Call] = []

    @classmethod
    def connecting(
        cls, plan: Plan, workload: Workload, rank: int
    ) -> tuple[Self, Connections, Groups, RankCalls]:
        """Connect a rank as in a run; returns its connections, its groups and the calls that it
        made.
        """
        notes = cls(rank)
        library = RecordedLibrary(rank, plan.num_gpus, notes)
        connections = connected_replicas(plan, workload, rank, library.maker())
        made = tuple((group.name, group.ranks) for group, _, _ in library.made)
        world = (("world", tuple(range(plan.num_gpus))),) if plan.num_gpus > 1 else ()
        steps = tuple(Step(task="connecting", calls=(call,)) for call in notes.taken())
        calls = RankCalls(rank=rank, steps=steps, sends=notes.sends, receives=notes.receives)
        notes.sends, notes.receives = {}, {}
        return notes, connections, (*world, *made), calls

    def taken(self) -> tuple[Call, ...]:
        """The calls recorded since this method was last called."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def all_reduce(self, group: RecordedGroup, tensor: Tensor, operation: str) -> None:
        """Record an all-reduce of a stand-in group, which changes no tensor."""
        self._note(group, "all_reduce", f"{tensor.numel()} ({operation})")

    def all_gather(self, group: RecordedGroup, whole: Tensor, part: Tensor) -> None:
        """Record an all-gather; the result repeats this rank's part."""
        whole.view(group.size(), -1).copy_(part.flatten().clone())
        self._note(group, "all_gather", f"{whole.numel()} of {part.numel()}")

    def reduce_scatter(self, group: RecordedGroup, result: Tensor, whole: Tensor) -> None:
        """Record a reduce-scatter of a stand-in group."""
        self._note(group, "reduce_scatter", f"{whole.numel()}")

    def all_to_all(
        self, group: RecordedGroup, received: Tensor, sent: Tensor, rows: RowsOfEach
    ) -> None:
        """Record an all-to-all; the numbers of rows, which depend on values, are not compared."""
        del sent, rows
        received.zero_()
        self._note(group, "all_to_all", "rows")

    def exchange(self, group: RecordedGroup, sends: Messages, receives: Messages) -> None:
        """Record a batch of point-to-point messages."""
        route = self.route and f"{self.route}, {self._exchanges(group) + 1}"
        call = Call(group=group.name, kind="exchange", what="messages", route=route)
        for noted, messages in ((self.sends, sends), (self.receives, receives)):
            noted[call.link] = {peer: self._size(tensor) for tensor, peer in messages}
        for tensor, _ in receives:
            tensor.zero_()
        self._calls.append(call)

    def aside(self, group: RecordedGroup, call: Callable[[], None]) -> Work:
        """Make a call at once, since recording needs no second stream."""
        call()
        return self

    def wait(self) -> None:
        """Return at once, since no recorded call is running."""

    def _exchanges(self, group: RecordedGroup) -> int:
        return sum(call.kind == "exchange" and call.group == group.name for call in self._calls)

    def _size(self, tensor: Tensor) -> int:
        return tensor.nbytes if self.route else tensor.numel()

    def _note(self, group: RecordedGroup, kind: Kind, what: str) -> None:
        self._calls.append(Call(group=group.name, kind=kind, what=what))


def one_of_each(groups: Iterable[Groups]) -> tuple[Groups, ...]:
    """The groups that each rank creates, where equal lists are made one object to save memory."""
    known: dict[Groups, Groups] = {}
    return tuple(known.setdefault(one, one) for one in groups)
