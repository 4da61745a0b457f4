"""Where each rank is in a plan: its stage, its groups, and the ranks with which it exchanges
sequences.

Ranks are numbered along the axes of ``mistlab.plan.dimensions``, stage after stage. The sequences
of a micro-batch are divided over data-parallel ranks in order, so ranks of stages with different
degrees exchange the sequences that both have. Context-parallel ranks with the same index in
neighbouring stages have the same tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from mistlab.plan.dimensions import EXPERT_AXES, GROUPS, axes_of, groups_of, position_of, rank_of
from mistlab.plan.plan import Plan
from mistlab.schedule.context_ways import GATHER, HEADS
from mistlab.schedule.order_text import PassKind
from mistlab.stages.plan_orders import ends_of_plan, placement_of_plan
from mistlab.stages.stage_shape import shares_table
from runtime.comm.group import Alone, Channel, Group, GroupMaker, enter, greet, greet_all
from runtime.devices.cuda import generator_of

CPU = torch.device("cpu")
# The names of the groups that the runtime makes. The group of ranks with the same shard of states
# is left out, since the runtime has only one replica of sharded states.
GROUPS_HERE = [name for name in GROUPS if name != "state replicas"]
# Groups of ranks that all-gather weights, which are needed from ZeRO-1 on.
_GATHERING = ("gather", "gather experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The position of a rank in a plan: its stage, and its index along each mesh axis."""

    stage: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The sequences of a micro-batch that a rank exchanges with a peer: a range, in the rank's own
    numbering, and the peer's global rank.
    """

    begin: int
    end: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How a plan's ranks are arranged; ``tied`` says whether embedding and head share weights,
    ``experts`` whether the model has experts.
    """

    plan: Plan
    tied: bool = True
    experts: bool = False

    def place(self, rank: int) -> RankPosition:
        """The position of a global rank in the plan."""
        for stage, stage_plan in enumerate(self.plan.stages):
            if rank < stage_plan.num_gpus:
                return RankPosition(stage=stage, **position_of(rank, stage_plan.degree))
            rank -= stage_plan.num_gpus
        raise AssertionError

    def rank(self, stage: int, data: int, tensor: int, context: int = 0) -> int:
        """The global rank at a position in the plan: its stage, and its index along each mesh
        axis.
        """
        before = sum(one.num_gpus for one in self.plan.stages[:stage])
        stage_plan = self.plan.stages[stage]
        position = {"data": data, "context": context, "tensor": tensor}
        return before + rank_of(position, stage_plan.degree)

    def sequences(self, position: RankPosition, micro_batch: int) -> int:
        """The index in the batch of the first sequence of a micro-batch, for the rank at a
        position.
        """
        stage_plan = self.plan.stages[position.stage]
        return (micro_batch * stage_plan.data_parallel + position.data) * stage_plan.micro_batch

    def ranks(self, stage: int) -> list[int]:
        """The global ranks of a pipeline stage."""
        first = self.rank(stage, 0, 0)
        return list(range(first, first + self.plan.stages[stage].num_gpus))

    def groups(self) -> Iterator[tuple[str, list[int]]]:
        """All groups by name, in the order in which every rank creates and first calls them.

        A communicator takes memory of the device, so only groups that are called are created: none
        to gather weights below ZeRO-1, and none for the tied tables if all ranks form the same
        group.
        """
        world = list(range(self.plan.num_gpus))
        yield "world", world
        if self.exchanges_tables and (ends := self.ends()) != world:
            yield "tied", ends
        for stage, stage_plan in enumerate(self.plan.stages):
            first = self.rank(stage, 0, 0)
            for name in GROUPS_HERE:
                if name == "context" and stage_plan.token_split.ranks == 1:
                    continue
                if axes_of(name) is EXPERT_AXES and not self.experts:
                    continue
                if name not in _GATHERING or stage_plan.zero:
                    for ranks in groups_of(name, stage_plan.degree):
                        yield name, [first + rank for rank in ranks]
        yield from self.links()

    @property
    def exchanges_tables(self) -> bool:
        """Whether embedding and head, on different stages, have copies of one table whose gradients
        are summed.
        """
        return self.tied and not shares_table(self.plan)

    def ends(self) -> list[int]:
        """The ranks that hold the first or the last part of the model, with embedding or head."""
        return sorted({rank for stage in ends_of_plan(self.plan) for rank in self.ranks(stage)})

    def links(self) -> Iterator[tuple[str, list[int]]]:
        """The groups of two stages that send messages to each other, by their names
        (``link_of``).
        """
        stages = placement_of_plan(self.plan).stages
        for above, below in sorted({pair for pair in pairwise(stages) if pair[0] != pair[1]}):
            ranks = [rank for stage in sorted((above, below)) for rank in self.ranks(stage)]
            yield link_of("F", above, below), ranks
            yield link_of("B", below, above), ranks

    def neighbours(self, stage: int) -> list[int]:
        """The stages with which a stage exchanges messages."""
        pairs = pairwise(placement_of_plan(self.plan).stages)
        return sorted({one for pair in pairs if stage in pair for one in pair} - {stage})

    def transfers(self, rank: int, *, to_stage: int, receives: bool) -> list[Transfer]:
        """The sequences that a rank receives from the ranks of a neighbouring stage, or sends to
        them.
        """
        position = self.place(rank)
        stage_plan, other = self.plan.stages[position.stage], self.plan.stages[to_stage]
        begin = position.data * stage_plan.micro_batch
        transfers = []
        for data in range(other.data_parallel):
            low = max(begin, data * other.micro_batch)
            high = min(begin + stage_plan.micro_batch, (data + 1) * other.micro_batch)
            for tensor in range(other.tensor_parallel):
                # All ranks of a tensor-parallel group have the same activations, so each receiver
                # needs one sender.
                if receives:
                    matches = tensor == position.tensor % other.tensor_parallel
                else:
                    matches = position.tensor == tensor % stage_plan.tensor_parallel
                if low < high and matches:
                    peer = self.rank(to_stage, data, tensor, position.context)
                    transfers.append(Transfer(begin=low - begin, end=high - begin, peer=peer))
        return transfers

    def context_peers(self, rank: int) -> tuple[list[int], list[int]]:
        """The ranks to which a rank sends keys and values (or heads) inside attention, and the
        ranks from which it receives them; none if keys are gathered.
        """
        position = self.place(rank)
        ranks, way = self.plan.stages[position.stage].token_split
        if ranks == 1 or way == GATHER:
            return [], []
        steps = range(1, ranks) if way == HEADS else (1, -1)

        def away(step: int) -> int:
            context = (position.context + step) % ranks
            return self.rank(position.stage, position.data, position.tensor, context)

        peers = [away(step) for step in steps]
        return (peers, peers) if way == HEADS else (peers[:1], peers[1:])

    def traffic(self, rank: int, link: str) -> tuple[list[Transfer], list[Transfer]]:
        """The sequences that a rank sends over a link for each micro-batch, and the sequences that
        it receives.
        """
        sender, receiver = ends_of_link(link)
        receives = self.place(rank).stage == receiver
        other = sender if receives else receiver
        transfers = self.transfers(rank, to_stage=other, receives=receives)
        return ([], transfers) if receives else (transfers, [])


def link_of(kind: PassKind, sender: int, receiver: int) -> str:
    """The name of the link from one stage to another, for outputs of forward or of backward passes.

    A link between neighbouring stages is numbered by the earlier of them.

    >>> link_of("F", 1, 2), link_of("B", 2, 1), link_of("F", 2, 0), link_of("B", 0, 2)
    ('forward 1', 'backward 1', 'forward 2 to 0', 'backward 0 to 2')
    """
    direction, above, below = (
        ("forward", sender, receiver) if kind == "F" else ("backward", receiver, sender)
    )
    return f"{direction} {above}" if below == above + 1 else f"{direction} {sender} to {receiver}"


def ends_of_link(link: str) -> tuple[int, int]:
    """The sending and the receiving stage of a link, by its name.

    >>> ends_of_link("backward 1"), ends_of_link("forward 2 to 0")
    ((2, 1), (2, 0))
    """
    direction, _, stages = link.partition(" ")
    sender, goes_elsewhere, receiver = stages.partition(" to ")
    if goes_elsewhere:
        return int(sender), int(receiver)
    above = int(sender)
    return (above, above + 1) if direction == "forward" else (above + 1, above)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharers:
    """The ranks with the same parameters as a rank, which may shard their states. They ``gather``
    weights and ``reduce`` gradients in separate groups, so that both can run at the same time.

    ``splitters`` are the ranks that hold other parts of the same tensors.
    """

    gather: Group
    reduce: Group
    splitters: Group

    @property
    def replica(self) -> int:
        """The rank's index among the ranks with the same parameters."""
        return self.reduce.rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Connections:
    """The groups in which a rank communicates: tensor- and context-parallel ranks, ranks with other
    experts and with parts of the same experts, all ranks, and other stages. In a run of several
    replicas these are groups inside the replica, and ``peers`` hold the same part of the weights in
    other replicas.

    ``sharers`` are the ranks with the same weights: first for all weights but experts, then for
    experts. ``links`` are named as in ``Topology.links``.
    """

    topology: Topology
    rank: int
    tensor: Group
    context: Group
    experts: Group
    expert_tensor: Group
    sharers: tuple[Sharers, Sharers]
    world: Group
    tied: Group | None
    links: dict[str, tuple[Channel, list[int]]]
    peers: Group = field(default_factory=Alone)

    @property
    def is_first(self) -> bool:
        """Whether the rank is the first rank of the whole run."""
        return self.rank == 0 and self.peers.rank == 0

    @property
    def place(self) -> RankPosition:
        """The position of this rank in the plan: its stage, and its index along each mesh axis."""
        return self.topology.place(self.rank)

    @property
    def replica(self) -> int:
        """The rank's index among the ranks with the same weights (other than experts)."""
        return self.sharers[0].replica


def connected(
    plan: Plan,
    rank: int,
    make: GroupMaker,
    *,
    tied: bool = True,
    experts: bool = False,
    device: torch.device = CPU,
) -> Connections:
    """Create all groups of a plan, and call each for the first time on all its ranks.

    ``make`` returns None for groups without this rank. ``tied`` says whether the model's embedding
    and head share weights, ``experts`` whether it has experts. ``device`` is the device of all
    later messages.
    """
    topology = Topology(plan=plan, tied=tied, experts=experts)
    groups: dict[str, Group] = {}
    links: dict[str, tuple[Channel, list[int]]] = {}
    of_context: list[int] = []
    for name, ranks in topology.groups():
        group = make(name, ranks)
        if rank not in ranks:
            continue
        assert group is not None
        groups[name] = group
        if name.startswith(("forward", "backward")):
            links[name] = group, ranks
        if name == "context":
            of_context = ranks
    enter(groups.values(), device)
    for name, (link, ranks) in links.items():
        sent, received = topology.traffic(rank, name)
        to, by = ([ranks.index(one.peer) for one in way] for way in (sent, received))
        greet(link, to, by, device)
    if "context" in groups:
        to, by = ([of_context.index(one) for one in way] for way in topology.context_peers(rank))
        greet(groups["context"], to, by, device)
    for name in ("experts", "expert tensor"):
        if name in groups:
            greet_all(groups[name], device)
    table = groups["world"] if topology.exchanges_tables and rank in topology.ends() else None
    return Connections(
        topology=topology,
        rank=rank,
        tensor=groups["tensor"],
        context=groups.get("context", Alone()),
        experts=groups.get("experts", Alone()),
        expert_tensor=groups.get("expert tensor", Alone()),
        sharers=(
            _sharers(groups, "gather", "reduce", "tensor"),
            _sharers(groups, "gather experts", "reduce experts", "expert tensor"),
        ),
        world=groups["world"],
        tied=groups.get("tied", table),
        links=links,
    )


def _sharers(groups: Mapping[str, Group], gather: str, reduce: str, splitters: str) -> Sharers:
    gatherers, reducers, others = (
        groups.get(name, Alone()) for name in (gather, reduce, splitters)
    )
    return Sharers(gather=gatherers, reduce=reducers, splitters=others)


# Runs one pipeline stage alone, with random tensors in place of messages from its neighbours.
#
# The random values are written to the buffers that would receive the messages, so the stage's peaks
# of memory equal its peaks in the whole pipeline.


# The standard deviation of the random tensors, equal to that of an untrained embedding's output.
STD = 0.02


class Neighbour:
    """A stand-in for the stage at the other end of a link: messages to it are dropped, and messages
    from it are random.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = generator_of(device).manual_seed(seed)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Drop all tensors that are sent, and fill all tensors that are received with random
        values.
        """
        for tensor, _ in receives:
            tensor.normal_(std=STD, generator=self._generator)


def isolated(plan: Plan, stage: int, device: torch.device, seed: int) -> Connections:
    """The connections of one stage that runs alone on one rank; ``seed`` determines the random
    messages from its neighbours.
    """
    assert plan.stages[stage].num_gpus == 1
    topology, alone = Topology(plan=plan), Alone()
    rank = topology.rank(stage, 0, 0)
    return Connections(
        topology=topology,
        rank=rank,
        tensor=alone,
        context=alone,
        experts=alone,
        expert_tensor=alone,
        sharers=(_sharers({}, "gather", "reduce", "tensor"),) * 2,
        world=alone,
        tied=alone,
        links={
            name: (Neighbour(device, seed + number), ranks)
            for number, (name, ranks) in enumerate(topology.links())
            if rank in ranks
        },
    )
