"""The collective calls of all ranks, as values: tasks on lanes (queues of work), groups, and
messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mistlab.schedule.stage_passes import Lane

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a collective of ``group``; ``what`` names its tensor, which must be the same on all
    ranks.

    A call ``beside`` its task runs on the tensor-parallel lane, and the task waits for it.
    Exchanges of a group between different senders and receivers have different ``routes``.
    """

    group: str
    kind: Kind
    what: str
    beside: bool = False
    route: str = ""

    @property
    def link(self) -> str:
        """The name of the link that a message takes: its group, and the route of the exchange."""
        return f"{self.group} {self.route}" if self.route else self.group

    def __str__(self) -> str:
        return f"{self.kind} of {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A task on its lane (queue of work), with its calls. ``waits`` has, for each task that it
    waits for, how many tasks back in the list that task is.
    """

    task: str
    lane: Lane = "compute"
    waits: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()


# The groups of a run: the name and the global ranks of each.
Groups = tuple[tuple[str, tuple[int, ...]], ...]
# The sizes of messages to, or from, each rank: by link, then by global rank.
Messages = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The tasks of a rank in order, and the sizes of its messages (in sequences or elements).

    ``parts`` has, for each group of ranks, the name of the data that the group reduces or gathers,
    such as a part of the weights. A group must have exactly the ranks with the same name.
    """

    rank: int
    steps: tuple[Step, ...]
    sends: Messages
    receives: Messages
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCalls:
    """The calls of all ranks while connecting and in training, and the groups of several ranks;
    ``made`` has for each rank its groups in the order of creation.
    """

    groups: Groups
    made: tuple[Groups, ...]
    connecting: tuple[RankCalls, ...]
    training: tuple[RankCalls, ...]
