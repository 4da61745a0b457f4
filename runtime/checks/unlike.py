"""Sorts the ranks of a plan by the work that they do, and picks one rank of each kind."""

from collections import Counter
from dataclasses import dataclass

from mistlab.values.plan import Plan
from runtime.comm.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A rank, its place, and the number of ranks of its kind, itself included."""

    rank: int
    stage: int
    data: int
    tensor: int
    stands_for: int

    def __str__(self) -> str:
        place = f"stage {self.stage}, data {self.data}, tensor {self.tensor}"
        return f"rank {self.rank} ({place})"


def unlike_ranks(plan: Plan) -> list[Unlike]:
    """One rank of each kind.

    Two ranks are of one kind if they agree in four things: their stage, whether they are first in
    their tensor group, whether they are first in their data group, and which sequences they
    exchange with their neighbours.
    """
    topology = Topology(plan=plan)
    first: dict[object, int] = {}
    counts = Counter[object]()
    for stage in range(plan.num_stages):
        neighbours = topology.neighbours(stage)
        for rank in topology.ranks(stage):
            place = topology.place(rank)
            exchanged = tuple(
                tuple((t.begin, t.end) for t in topology.transfers(rank, to_stage=n, receives=way))
                for n in neighbours
                for way in (False, True)
            )
            kind = (stage, place.data == 0, place.tensor == 0, exchanged)
            first.setdefault(kind, rank)
            counts[kind] += 1
    return [_unlike(topology, rank, counts[kind]) for kind, rank in first.items()]


def _unlike(topology: Topology, rank: int, count: int) -> Unlike:
    place = topology.place(rank)
    return Unlike(
        rank=rank, stage=place.stage, data=place.data, tensor=place.tensor, stands_for=count
    )
