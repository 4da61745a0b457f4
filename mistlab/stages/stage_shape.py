"""Says which layers and chunks a stage has, which layer each task of a pass is for, and how
communication groups are spread over nodes and network tiers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Ints, Rows
from mistlab.core.distinct import Known
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.network.link_times import GroupSpread, TierTimes
from mistlab.network.tiers import NETWORK, NODE
from mistlab.plan.dimensions import (
    AXIS_ORDER,
    GROUPS,
    axes_of,
    counts_of_blocks,
    degrees,
    in_order,
    names_of,
    num_gpus,
    ranks_of,
)
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan, StagePlan
from mistlab.schedule.placement import Placement
from mistlab.schedule.slots import Phase, Place, Task, Template
from mistlab.schedule.stage_passes import (
    NO_PASSES,
    NO_RECEIPTS,
    StagePass,
    StagePasses,
    StageReceipts,
    receipts_of,
)
from mistlab.stages.plan_orders import ends_of_plan, passes_of_plan

# Finds the layer that each task of a pass is for, and the entry of the ring buffers that it uses. A
# time slot has the number of the layer that computes in it.


_AWAY: Mapping[Place, int] = {"ahead": 1, "here": 0, "behind": -1}


def goes_up(phase: Phase) -> bool:
    """Whether a pass of this phase visits the layers of a stage from the first to the last."""
    return "backward" not in phase


def layer_at(position: int, num_layers: int, phase: Phase) -> int:
    """The layer, counted within its stage, that a pass visits as number ``position``."""
    return position if goes_up(phase) else num_layers - 1 - position


def layers_above(at: Place, phase: Phase, depth: int) -> int:
    """How many layers a task's layer comes after the computing one; negative if before."""
    return _AWAY[at] * (depth if goes_up(phase) else -depth)


def slots_of(num_layers: int, depth: int) -> range:
    """The numbers of a pass's time slots, in which one layer after another computes."""
    return range(-depth, num_layers + depth)


def tasks_of_slot(
    rows: Sequence[Task], slot: int, num_layers: int, depth: int
) -> Iterator[tuple[Task, int]]:
    """The tasks of a time slot of a pass, each with the position of its layer in the pass.

    A pass visits the layers of a stage in order, at positions 0, 1, 2 and so on. In each time slot
    one layer computes. The slot's other tasks are for the same layer, or for the layers that
    compute ``depth`` slots later (ahead) or earlier (behind).
    """
    for row in rows:
        position = slot + _AWAY[row.place] * depth
        if 0 <= position < num_layers:
            yield row, position


def ring_entries(depth: int) -> int:
    """The number of entries in a ring buffer: for the layer that computes and ``depth`` others."""
    return depth + 1


def entry_of(layers_before: int, position: int, depth: int) -> int:
    """The entry of the ring buffers that the layer at this position of a pass uses.

    Earlier passes visited ``layers_before`` layers.
    """
    return (layers_before + position) % ring_entries(depth)


# Cuts a plan's model into parts, of which each stage holds one or more (its chunks).


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A part of the model: consecutive layers on one stage; layers are numbered through the model.

    ``treated`` counts the blocks that are run in each way other than plainly (such as recomputed).
    """

    stage: int
    chunk: int
    blocks: range
    treated: Mapping[str, int]
    has_embedding: bool
    has_head: bool

    @property
    def first_layer(self) -> int:
        """The number of the part's first layer, where the embedding is layer 0."""
        return self.blocks.start - self.has_embedding


def parts_of_plan(plan: Plan, placement: Placement) -> list[StagePart]:
    """The parts of a plan's model, in the order of the model."""
    shares = [
        placement.shares_of_blocks(stage.layers, number) for number, stage in enumerate(plan.stages)
    ]
    ways = [_ways(stage) for stage in plan.stages]
    parts: list[StagePart] = []
    begin = 1
    for stage, chunk in placement.places:
        count = shares[stage][chunk]
        treatments, ways[stage] = ways[stage][:count], ways[stage][count:]
        parts.append(
            StagePart(
                stage=stage,
                chunk=chunk,
                blocks=range(begin, begin + count),
                treated={name: treatments.count(name) for name in counts_of_blocks()},
                has_embedding=not parts,
                has_head=len(parts) == len(placement.stages) - 1,
            )
        )
        begin += count
    return parts


def _ways(stage: StagePlan) -> list[str]:
    """For each block of a stage, the name of the choice that counts blocks run like it (recomputed
    ones, for example), or "" for plain blocks.
    """
    treated = [name for name in counts_of_blocks() for _ in range(stage.degree(name))]
    return [""] * (stage.layers - len(treated)) + treated


# Holds the choices of a plan that determine which tasks its stages have.

# What a run does with the experts that routers choose: nothing ("none"), record them ("noted"), or
# also adjust the routers by them ("corrected").
Routers = Literal["none", "noted", "corrected"]

# The number of entries in each ring buffer of a stage in the runtime.
RING = ring_entries(ENGINES["mistlab"].template().depth)
# The index of the embedding among the model's layers.
EMBEDDING = 0
# The ring buffer entries of passes are cached for at most this many stages.
_MOST_KEPT = 64


def replicas_of(stage: StagePlan) -> int:
    """The number of a stage's ranks with equal weights, which reduce gradients together."""
    return ranks_of("reduce", stage.degree)


def shares_table(plan: Plan) -> bool:
    """Whether tied embedding and head share one table: if one stage has both, and does not shard
    weights or gradients (ZeRO-2 and 3).

    Where they are sharded layer by layer, embedding and head have a table each.
    """
    first, last = ends_of_plan(plan)
    stage_plan = plan.stages[first]
    return first == last and (replicas_of(stage_plan) == 1 or stage_plan.zero <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayers:
    """The layers of a chunk, and the blocks among them, numbered through the model."""

    layers: range
    blocks: range


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What determines the tasks of a pipeline stage; ``zero`` is the ZeRO level, 0 for a single
    rank.

    ``replicas`` ranks have the same weights: data-parallel and context-parallel ranks. ``chunks``
    are in the order of the model. ``ends`` are the stages that have the embedding and the head.
    Tied embedding and head share one table (``shares_table``), or have a table each, and ``ties``
    keeps both equal. ``routers`` says what a run does with the experts that routers choose.
    """

    template: Template
    stage: int
    num_stages: int
    micro_batches: int
    ends: tuple[int, int]
    chunks: tuple[ChunkLayers, ...]
    zero: int
    replicas: int
    offload: Offload
    clips: bool
    ties: bool
    shares_table: bool
    steps_on_host: bool
    passes: StagePasses = NO_PASSES
    receipts: StageReceipts = NO_RECEIPTS
    routers: Routers = "none"

    @classmethod
    def of(
        cls,
        plan: Plan,
        stage: int,
        *,
        clips: bool = False,
        tied: bool = False,
        steps_on_host: bool = False,
        routers: Routers = "none",
    ) -> Self:
        """The shape of stage number ``stage`` of a plan."""
        stage_plan, ends = plan.stages[stage], ends_of_plan(plan)
        replicas = replicas_of(stage_plan)
        zero = stage_plan.zero if replicas > 1 else 0
        shares = tied and stage in ends and shares_table(plan)
        passes = passes_of_plan(plan)
        return cls(
            template=ENGINES[plan.engine].template(
                overlap_communication=plan.overlap_communication
            ),
            stage=stage,
            num_stages=plan.num_stages,
            micro_batches=plan.micro_batches,
            passes=passes[stage],
            receipts=receipts_of(passes, RING)[stage],
            ends=ends,
            chunks=_chunks(plan, stage, passes[stage]),
            zero=zero,
            replicas=replicas,
            offload=stage_plan.offload,
            clips=clips,
            routers=routers,
            ties=tied and stage in ends and not shares,
            shares_table=shares,
            steps_on_host=steps_on_host,
        )

    @property
    def first_layer(self) -> int:
        """The number of the stage's first layer in the model."""
        return self.chunks[0].layers.start

    @property
    def last_layer(self) -> int:
        """The number of the stage's last layer in the model."""
        return self.chunks[-1].layers[-1]

    @property
    def layers(self) -> list[int]:
        """The numbers of the stage's layers in the model."""
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def blocks(self) -> list[int]:
        """The numbers of the stage's blocks among the model's layers."""
        return [layer for chunk in self.chunks for layer in chunk.blocks]

    def has_block(self, layer: int) -> bool:
        """Whether a layer is one of the stage's blocks."""
        return any(layer in chunk.blocks for chunk in self.chunks)

    def layer_at(self, position: int, stage_pass: StagePass) -> int:
        """The number, in the model, of the layer that a pass visits as number ``position``."""
        layers = self.chunks[stage_pass.chunk].layers
        return layers[layer_at(position, len(layers), stage_pass.phase)]

    def entry_at(self, position: int, stage_pass: StagePass, depth: int = RING - 1) -> int:
        """The entry of the ring buffers that the layer at ``position`` of a pass uses."""
        sizes = tuple(len(chunk.layers) for chunk in self.chunks)
        before = _layers_before(self.passes, sizes)[stage_pass.number]
        return entry_of(before, position, depth)

    def entry_at_step(self, layer: int) -> int:
        """The entry of the ring buffers that a layer uses during its optimizer step."""
        for stage_pass in self.passes:
            layers = self.chunks[stage_pass.chunk].layers
            if stage_pass.phase == "first_forward" and layer in layers:
                return self.entry_at(layers.index(layer), stage_pass)
        raise AssertionError(layer)

    @property
    def has_head(self) -> bool:
        """Whether the stage has the model's head, which computes the loss."""
        return self.stage == self.ends[1]

    @property
    def rooms(self) -> int:
        """The number of buffers for inputs received from other stages."""
        return max(RING, self.receipts.rooms)

    def offload_of(self, layer: int) -> Offload:
        """The offload ratios that apply to a layer; zero for embedding and head."""
        return self.offload if self.has_block(layer) else NO_OFFLOAD

    def borrows_table(self, layer: int) -> bool:
        """Whether a layer is a head that uses the embedding's table (tied weights)."""
        return self.shares_table and layer == self.last_layer

    def adds_table_in_b(self, layer: int) -> bool:
        """Whether a layer is a head that adds to the gradient of a table shared with the embedding
        in its backward pass (B) rather than in its weight-gradient pass (W).

        It does unless W passes begin with the head's chunk and end with the embedding's.
        """
        splits = self.passes.splits_backward
        return splits and self.borrows_table(layer) and not _ends_with_embedding(self.passes)

    def rings_weights(self, layer: int) -> bool:
        """Whether a layer's weights are gathered from ranks or fetched from the host into a ring
        buffer.
        """
        return self.zero >= 3 or self.offload_of(layer).weights > 0

    def rings_gradients(self, layer: int) -> bool:
        """Whether a layer's gradients are sharded or offloaded, so that passes write them to a ring
        buffer.
        """
        return self.zero >= 2 or self.offload_of(layer).gradients > 0

    def steps_tail(self, layer: int) -> bool:
        """Whether the host takes the optimizer step for some of a layer's parameters."""
        return self.steps_on_host and self.offload_of(layer).optimizer > 0

    def stages_tail(self, layer: int) -> bool:
        """Whether some of a layer's optimizer states are fetched to the GPU for the step."""
        return not self.steps_on_host and self.offload_of(layer).optimizer > 0

    def has(self, row: Task, layer: int) -> bool:
        """Whether a stage runs a kind of task for one of its layers, such as an all-gather of
        weights.
        """
        if row.kind in ("U", "R"):
            return self.replicas > 1 and self.zero >= row.from_zero
        if row.direction is None:
            return True
        offload = self.offload_of(layer)
        ratios = {
            "P": offload.weights,
            "G": offload.gradients,
            "O": offload.optimizer,
            "A": offload.activations,
        }
        return ratios[row.kind] > 0


def _chunks(plan: Plan, stage: int, passes: StagePasses) -> tuple[ChunkLayers, ...]:
    """The layers of each chunk of a stage, where the embedding is layer 0 and the head the last."""
    return tuple(
        ChunkLayers(
            layers=range(part.first_layer, part.blocks.stop + part.has_head), blocks=part.blocks
        )
        for part in parts_of_plan(plan, passes.placement)
        if part.stage == stage
    )


@lru_cache(maxsize=_MOST_KEPT)
def _ends_with_embedding(passes: StagePasses) -> bool:
    """Whether a stage's weight-gradient passes begin with the chunk of the head and end with that
    of the embedding.
    """
    chunks = [one.chunk for one in passes if one.kind == "W"]
    embedding, head = 0, passes.chunks - 1
    begins = chunks.index(head) <= chunks.index(embedding)
    return begins and chunks[::-1].index(embedding) <= chunks[::-1].index(head)


@lru_cache(maxsize=_MOST_KEPT)
def _layers_before(passes: StagePasses, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The number of layers that earlier passes visited, for each pass of a stage.

    ``sizes`` are the numbers of layers of the stage's chunks.
    """
    return tuple(accumulate((sizes[one.chunk] for one in passes), initial=0))


# A mask of strategies (combinations of a stage's choices), and the shape that their communication
# groups share: how ranks are spread over nodes.
OfShape = tuple[Bools, GroupSpread]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """How each communication group is spread over nodes and network tiers, for each strategy (a
    combination of a stage's choices).

    ``groups`` has for each group by name its ranks in a node, its nodes and its units (racks, pods)
    of each higher network tier; ``ranks`` has its number of ranks.

    ``place_to_next`` and ``place_from_previous`` say which tier sends to the next stage and from
    the previous one go through. Neighbouring stages are taken to be as large as the stage itself.
    """

    groups: Mapping[str, tuple[Ints, ...]]
    ranks: Mapping[str, Ints]
    place_to_next: Ints
    place_from_previous: Ints
    senders_of_node: Ints
    senders: Ints
    _several: dict[str, Sequence[OfShape]] = field(default_factory=dict, init=False, repr=False)

    def of_several(self, group: str) -> Sequence[OfShape]:
        """Each shape of this group with several ranks (ranks in a node, nodes, units), with a mask
        of the strategies whose groups have it.
        """
        if group not in self._several:
            several = (one for one in self.by_shape(group) if one[1].ranks > 1)
            self._several[group] = tuple(several)
        return self._several[group]

    @property
    def crosses_to_next(self) -> Bools:
        """Whether sends to the next stage leave the node, for each strategy."""
        return np.asarray(self.place_to_next != NODE)

    def by_shape(self, group: str) -> Iterator[OfShape]:
        """Each shape of this group (ranks in a node, nodes, units), with a mask of its
        strategies.
        """
        yield from by_shape(self.groups[group])

    def chosen(self, rows: Rows) -> Self:
        """Select the strategies with these indices."""
        groups = self.groups.items()
        return type(self)(
            groups={name: tuple(one[rows] for one in shape) for name, shape in groups},
            ranks={name: ranks[rows] for name, ranks in self.ranks.items()},
            place_to_next=self.place_to_next[rows],
            place_from_previous=self.place_from_previous[rows],
            senders_of_node=self.senders_of_node[rows],
            senders=self.senders[rows],
        )


def by_shape(columns: tuple[Ints, ...]) -> Iterator[OfShape]:
    """Each distinct shape (ranks in a node, nodes, units) in these columns, with a mask of the
    strategies that have it.
    """
    for shape in sorted({*zip(*(one.tolist() for one in columns), strict=True)}):
        rows = np.logical_and.reduce(
            [one == number for one, number in zip(columns, shape, strict=True)]
        )
        in_node, nodes, *units = shape
        yield rows, GroupSpread(in_node, nodes, tuple(units))


def shape_on_nodes(
    group: str, value: Callable[[str], NDArray[Any]], first_rank: Ints, gpus_per_node: int
) -> tuple[Ints, Ints]:
    """The largest number of ranks that a communication group has in a node, and the number of nodes
    that it spans.

    The stage begins at ``first_rank``, and ranks fill nodes in order. If groups of a stage lie
    differently, as with five GPUs a node, the group on the most nodes counts: the others wait for
    it.
    """
    order = np.broadcast_to(value(AXIS_ORDER), first_rank.shape)
    nodes = _nodes(group, value, first_rank, gpus_per_node, 0)
    if order.any():
        nodes = np.where(order == 0, nodes, _nodes(group, value, first_rank, gpus_per_node, 1))
    return -(-ranks_of(group, value).astype(np.int64) // nodes), nodes


def _nodes(
    group: str,
    value: Callable[[str], NDArray[Any]],
    first_rank: Ints,
    gpus_per_node: int,
    order: int,
) -> Ints:
    """The number of nodes that a communication group spans, for one value of ``axis_order``."""
    reach, apart = np.zeros_like(first_rank), np.ones_like(first_rank)
    step, are_alike = np.ones_like(first_rank), np.ones(first_rank.shape, dtype=bool)
    along = in_order(degrees(axes_of(group), value), order)
    for name, ranks in along.items():
        degree = ranks.astype(np.int64)
        if name in GROUPS[group]:
            # Ranks that are at least a node apart are all in different nodes.
            is_inside = step < gpus_per_node
            reach = reach + np.where(is_inside, (degree - 1) * step, 0)
            apart = apart * np.where(is_inside, 1, degree)
        step = step * degree
        are_alike &= (gpus_per_node % step == 0) | (step % gpus_per_node == 0)
    are_alike &= first_rank % np.minimum(step, gpus_per_node) == 0
    inside = (first_rank + reach) // gpus_per_node - first_rank // gpus_per_node + 1
    nodes = inside * apart
    for row in np.flatnonzero(~are_alike).tolist():
        axes = {name: int(ranks[row]) for name, ranks in along.items()}
        nodes[row] = _most_apart(group, axes, first_rank[row], lambda rank: rank // gpus_per_node)
    return np.asarray(nodes)


def _most_apart(
    group: str, axes: Mapping[str, int], first_rank: int, place_of: Callable[[Ints], Ints]
) -> int:
    """The largest number of units (nodes, racks, ...) that any communication group of a stage
    spans; the ranks of all groups are enumerated.

    ``place_of`` maps ranks to units.
    """
    # The innermost mesh axis comes first in a table of axes, but last in a NumPy array.
    names = [*axes][::-1]
    shape = [axes[name] for name in names]
    nodes = place_of(first_rank + np.arange(math.prod(shape)).reshape(shape))
    members = [place for place, name in enumerate(names) if name in GROUPS[group]]
    rows = np.moveaxis(nodes, members, range(-len(members), 0))
    in_order = np.sort(rows.reshape(-1, math.prod(shape[place] for place in members)))
    return int((np.diff(in_order) > 0).sum(axis=1).max()) + 1


def shapes_of(
    known: Known[Shapes], columns: Mapping[str, NDArray[Any]], cluster: Cluster
) -> Shapes:
    """How each communication group is spread over nodes and network tiers, for each strategy.

    ``known`` caches results by mesh and first rank.
    """
    names = (*names_of("mesh"), "first_rank")
    shapes, rows = known(
        [columns[name] for name in names],
        lambda distinct: _shapes(dict(zip(names, distinct, strict=True)), cluster),
    )
    return shapes.chosen(rows)


def _shapes(columns: Mapping[str, NDArray[Any]], cluster: Cluster) -> Shapes:
    """How each communication group is spread over nodes, and which network tiers sends cross, for
    each strategy.
    """
    gpus, tiers = cluster.gpus_per_node, cluster.tiers
    value = columns.__getitem__
    first, ranks = columns["first_rank"].astype(np.int64), num_gpus(value).astype(np.int64)

    def tier_between(before: Ints) -> Ints:
        """The highest network tier between a rank of the stage that begins at rank ``before`` and
        the same rank of the next stage.
        """
        apart = (before + 2 * ranks - 1) // gpus != before // gpus
        crosses = (cluster.nodes > 1) & ((ranks >= gpus) | apart)
        if tiers is None:
            return np.where(crosses, NETWORK, NODE)
        return np.where(crosses, np.maximum(tiers.sends_through(before, ranks), NETWORK), NODE)

    def shape(group: str) -> tuple[Ints, ...]:
        """How a group is spread over the cluster: ranks in a node, nodes, units of higher tiers."""
        on_nodes = shape_on_nodes(group, value, first, gpus)
        if tiers is None:
            return on_nodes
        return *on_nodes, *(_units(group, value, first, tiers, one) for one in tiers.places)

    return Shapes(
        groups={group: shape(group) for group in GROUPS},
        ranks={group: ranks_of(group, value).astype(np.int64) for group in GROUPS},
        place_to_next=tier_between(first),
        place_from_previous=tier_between(first - ranks),
        senders_of_node=np.minimum(ranks, gpus),
        senders=ranks,
    )


def _units(
    group: str, value: Callable[[str], NDArray[Any]], first: Ints, tiers: TierTimes, index: int
) -> Ints:
    """The largest number of units (racks, pods) of a network tier that a group spans."""
    network, gpus = tiers.network, tiers.gpus_per_node
    if not any(tier.scattered for tier in network.tiers[index:]):
        return shape_on_nodes(group, value, first, network.nodes_below(index) * gpus)[1]
    along, order = degrees(axes_of(group), value), value(AXIS_ORDER)
    units = np.ones_like(first)
    for row, begin in enumerate(first.tolist()):
        axes = {name: int(ranks[row]) for name, ranks in along.items()}
        axes = in_order(axes, int(order[row]))
        units[row] = _most_apart(
            group, axes, begin, lambda rank: tiers.units_of(rank // gpus, index)
        )
    return units
