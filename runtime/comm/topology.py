"""Which ranks a plan's stages take, which of them form groups, and who sends what to whom.

Tensor parallel goes fastest over ranks, then data parallel, then stages. Sequences of a micro-batch
go to data-parallel ranks in order, so stages of different degrees exchange what overlaps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mistlab.plan import Plan
from runtime.comm.group import Group, Link

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is in a plan."""

    stage: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Sequences of a micro-batch, as this rank counts its own, from or to a rank of the world."""

    begin: int
    end: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of a plan."""

    plan: Plan

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        for stage, own in enumerate(self.plan.stages):
            if rank < own.num_gpus:
                data, tensor = divmod(rank, own.tensor_parallel)
                return Place(stage=stage, data=data, tensor=tensor)
            rank -= own.num_gpus
        raise AssertionError

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Who is there."""
        before = sum(one.num_gpus for one in self.plan.stages[:stage])
        return before + data * self.plan.stages[stage].tensor_parallel + tensor

    def ranks(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        first = self.rank(stage, 0, 0)
        return list(range(first, first + self.plan.stages[stage].num_gpus))

    def groups(self) -> Iterator[tuple[str, list[int]]]:
        """All groups by name, in the order in which every rank makes them."""
        last = self.plan.num_stages - 1
        yield "world", list(range(self.plan.num_gpus))
        yield "tied", sorted({*self.ranks(0), *self.ranks(last)})
        for stage, own in enumerate(self.plan.stages):
            data, tensor = range(own.data_parallel), range(own.tensor_parallel)
            for d in data:
                yield "tensor", [self.rank(stage, d, t) for t in tensor]
            for name in ("gather", "reduce"):
                for t in tensor:
                    yield name, [self.rank(stage, d, t) for d in data]
        yield from self.links()

    def links(self) -> Iterator[tuple[str, list[int]]]:
        """Of these, the ones of neighbouring stages: by direction and the lower of the two."""
        for stage in range(self.plan.num_stages - 1):
            ranks = self.ranks(stage) + self.ranks(stage + 1)
            yield f"forward {stage}", ranks
            yield f"backward {stage}", ranks

    def transfers(self, rank: int, *, to_stage: int, receives: bool) -> list[Transfer]:
        """What a rank receives from, or sends to, the ranks of a neighbouring stage."""
        place = self.place(rank)
        own, other = self.plan.stages[place.stage], self.plan.stages[to_stage]
        begin = place.data * own.micro_batch
        found = []
        for data in range(other.data_parallel):
            low = max(begin, data * other.micro_batch)
            high = min(begin + own.micro_batch, (data + 1) * other.micro_batch)
            for tensor in range(other.tensor_parallel):
                # Each receiver has one sender, whose activations are those of its tensor group.
                if receives:
                    matches = tensor == place.tensor % other.tensor_parallel
                else:
                    matches = place.tensor == tensor % own.tensor_parallel
                if low < high and matches:
                    peer = self.rank(to_stage, data, tensor)
                    found.append(Transfer(begin=low - begin, end=high - begin, peer=peer))
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Connections:
    """A rank's groups: its own tensor and data ranks, everybody, and links to its neighbours.

    ``gather`` and ``reduce`` are the same data-parallel ranks twice, so that both may be under way.
    Links are by the names that ``Topology.links`` gives.
    """

    topology: Topology
    rank: int
    tensor: Group
    gather: Group
    reduce: Group
    world: Group
    tied: Group | None
    links: dict[str, tuple[Link, list[int]]]

    @property
    def place(self) -> Place:
        """Where the rank is."""
        return self.topology.place(self.rank)


def connected(
    plan: Plan, rank: int, make: Callable[[str, Sequence[int]], Group | None]
) -> Connections:
    """Make all groups of a plan; ``make`` gives None for those that the rank is not in."""
    topology = Topology(plan=plan)
    own: dict[str, Group] = {}
    links: dict[str, tuple[Link, list[int]]] = {}
    for name, ranks in topology.groups():
        group = make(name, ranks)
        if rank not in ranks:
            continue
        assert group is not None
        own[name] = group
        if name.startswith(("forward", "backward")):
            links[name] = group, ranks
    return Connections(
        topology=topology,
        rank=rank,
        tensor=own["tensor"],
        gather=own["gather"],
        reduce=own["reduce"],
        world=own["world"],
        tied=own.get("tied"),
        links=links,
    )
