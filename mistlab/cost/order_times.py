"""Computes the times of pipelines with any named order of passes, and on clusters with several
kinds of nodes.

Axes: C candidates or plans, S strategies, P parts of the model in order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Ints, Rows
from mistlab.core.distinct import NOTHING, Sums
from mistlab.cost.beside_sends import beside_arithmetic
from mistlab.cost.links import groups_of
from mistlab.cost.order_path import OrderPath, order_bound_s
from mistlab.cost.side_by_side import until
from mistlab.cost.slot_work import HERE, UPPER, SlotWork, are_shared, of_layers, slot_ends
from mistlab.cost.stage import StageSlots, StageTimeModel
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns, weight_gradients_s
from mistlab.engines.engine import ENGINES, Engine
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.network.shared_sends import SharedNetworks, shares_of_routes
from mistlab.network.tiers import NETWORK
from mistlab.plan.dimensions import num_gpus
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.placement import Placement
from mistlab.schedule.slots import IN_TURN, KINDS, Task
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.part_times import EndTimes, HostTimes, SlowedTimes, SplitTimes, TurnTimes
from mistlab.stages.plan_orders import order_of_plan, shortened
from mistlab.stages.played_pipeline import FEWEST_NODES_SHARED, Places
from mistlab.stages.stage_batch import LOST, StageBatch, StageSeconds, StageTimes, batch_of_parts

# Computes the times of stages on a cluster whose nodes are of several kinds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """A group of equal nodes and the other groups of the cluster, whose stages exchange data across
    the border between two groups.

    It has the ``ranks`` of the group's GPUs, the task times of all groups, and the group's own
    index ``group`` among them.
    """

    ranks: range
    group: int
    groups: tuple[TaskModel, ...]

    def met(self, seconds: TaskSeconds) -> TaskSeconds:
        """The task times of this group's stages, where a task that involves another group of nodes
        takes as long as on the slower of both.
        """
        first = seconds.columns["first_rank"].astype(np.int64)
        after = first + num_gpus(seconds.columns.__getitem__).astype(np.int64)
        if self.group > 0:
            rows = np.flatnonzero(first == self.ranks.start)
            there_s = self._there(self.group - 1, seconds, rows, lambda times: times.receive_s)
            seconds.receive_s = _slower(seconds.receive_s, rows, there_s)
        if self.group + 1 < len(self.groups):
            rows = np.flatnonzero(after == self.ranks.stop)
            there_s = self._there(self.group + 1, seconds, rows, lambda times: times.send_s)
            seconds.send_s = _slower(seconds.send_s, rows, there_s)
        if seconds.tied_s.any():
            every = np.arange(len(first))
            for other in range(len(self.groups)):
                there_s = self._there(other, seconds, every, lambda times: times.tied_s)
                seconds.tied_s = _slower(seconds.tied_s, every, there_s)
        return seconds

    def _there(
        self, group: int, seconds: TaskSeconds, rows: Rows, times: Callable[[TaskSeconds], Floats]
    ) -> Floats:
        """The task times that the strategies with these row numbers would have on another group of
        nodes.
        """
        if not len(rows):
            return np.empty(0)
        chosen = {name: column[rows] for name, column in seconds.columns.items()}
        return times(self.groups[group].seconds(chosen))


def _slower(own_s: Floats, rows: Rows, there_s: Floats) -> Floats:
    slower_s = own_s.copy()
    slower_s[rows] = np.maximum(own_s[rows], there_s)
    return slower_s


def task_models(
    workload: Workload,
    cluster: Cluster,
    engine: Engine,
    *,
    overlap_communication: bool = True,
    altered: Callable[[TaskModel], TaskModel] | None = None,
) -> tuple[TaskModel, ...]:
    """The models of task times for each group of equal nodes in a cluster.

    ``altered`` changes the task times before those that two groups share are set to the slower
    group's times. A stage has the times of its group. Only stages at a border between two groups
    depend on both: a send takes as long as on the slower side, and so does the reduction of an
    embedding table that the first and the last stage share.
    """
    alone = tuple(
        TaskModel.of(workload, group, engine, overlap_communication=overlap_communication)
        for group in cluster.of_groups
    )
    if altered is not None:
        alone = tuple(map(altered, alone))
    if len(alone) == 1:
        return alone
    return tuple(
        replace(model, meet=Borders(ranks=ranks, group=group, groups=alone).met)
        for group, (model, ranks) in enumerate(zip(alone, cluster.ranks_of_groups, strict=True))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesOnGroups:
    """Computes the times of a workload's stages on a cluster with one or more groups of equal
    nodes.
    """

    cluster: Cluster
    models: tuple[StageTimeModel, ...]

    @classmethod
    def of(cls, cluster: Cluster, tasks: tuple[TaskModel, ...]) -> Self:
        """Make the models of stage times from the task times of each group of equal nodes."""
        return cls(cluster=cluster, models=tuple(StageTimeModel(tasks=one) for one in tasks))

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate stage, computed for the group of equal nodes that its first
        rank is in.
        """
        return self._seconds(lambda model, some: model(some), batch)

    def least(self, least: StageBatch, most: StageBatch) -> StageSeconds:
        """Lower bounds of the times of all candidate stages whose offload ratios and numbers of
        recomputed blocks lie between those of ``least`` and ``most``.
        """
        return self._seconds(lambda model, *ends: model.least(*ends), least, most)

    def _seconds(self, times: Callable[..., StageSeconds], *batches: StageBatch) -> StageSeconds:
        names = [entry.name for entry in fields(StageSeconds)]

        def columns(model: StageTimeModel, *chosen: StageBatch) -> Floats:
            seconds = times(model, *chosen)
            return np.stack([getattr(seconds, name) for name in names])

        if len(self.models) == 1:
            return times(self.models[0], *batches)
        return StageSeconds(**dict(zip(names, self.by_group(columns, *batches), strict=True)))

    @property
    def tasks(self) -> TaskModel:
        """The task times of the first group of nodes; other groups have the same schedule and
        layers, but other times.
        """
        return self.models[0].tasks

    @property
    def sends_overlap(self) -> bool:
        """Whether sends run beside passes, so that those of several stages may overlap."""
        return self.tasks.template.sends not in IN_TURN

    def by_group(self, times: Callable[..., Floats], *batches: StageBatch) -> Floats:
        """Compute a table with a column for each candidate, each by the model of the nodes that the
        candidate is on.
        """
        by_models = [
            (rows, times(self.models[group], *(batch.chosen(rows) for batch in batches)))
            for group, rows in self._rows(batches[0])
        ]
        together = np.concatenate([own for _, own in by_models], axis=-1)
        order = np.argsort(np.concatenate([rows for rows, _ in by_models]), kind="stable")
        return np.asarray(together[..., order])

    def _rows(self, batch: StageBatch) -> Iterator[tuple[int, Rows]]:
        """The groups of equal nodes that have candidates, each with the candidates' indices."""
        if len(self.models) == 1:
            yield 0, np.arange(len(batch))
            return
        group_of = groups_of(self.cluster, batch.first_rank)
        for group in np.unique(group_of).tolist():
            yield group, np.flatnonzero(group_of == group)


# Computes the iteration times of plans in any order of passes but 1F1B.


def engine_of(plan: Plan) -> Engine:
    """The engine of a plan, as changed by the plan's order of passes."""
    engine = ENGINES[plan.engine]
    return engine if plan.order == DEFAULT_ORDER else engine.in_named_order()


def ordered_iterations_s(model: StagesOnGroups, plans: Sequence[Plan]) -> Floats:
    """The iteration times of plans that have equally many stages and the same order of passes.

    Long orders are computed with fewer micro-batches (``shortened``), and the times extrapolated.
    """
    played = shortened(plans[0])
    order = order_of_plan(played)
    batch, passes = batch_of_parts(plans, order.placement), passes_of(order)
    shape = len(plans), len(order.placement.stages)
    with_turns = model(batch)
    seconds = with_turns.without_turns
    times = StageTimes.of(seconds, *shape)
    host = None if model.tasks.host is None else HostTimes.of(times, batch.layers.reshape(shape))
    splits = any(of_stage.splits_backward for of_stage in passes)
    split, turned = _gradient_times(model, batch, with_turns.turned_s, shape, splits=splits)
    apart = ENGINES[played.engine].steps_apart
    at_end = _end_times(model, batch, shape)
    path = OrderPath(
        times=times,
        passes=passes,
        split=split,
        host=host,
        at_end=at_end,
        turned=turned,
        slowed=_slowed_times(model, batch, seconds, split, at_end.steady_s(turned), shape),
        steps_apart=apart,
    )
    iteration_s = partial(_played_s, path, _networks(model, plans, order.placement))
    few_s = iteration_s(played)
    micro_batches = np.array([plan.micro_batches for plan in plans])
    beyond = micro_batches - played.micro_batches
    if not beyond.any():
        return few_s
    stages = played.num_stages
    longer = replace(played, micro_batches=played.micro_batches + stages)
    # The extrapolated time may be too short, since with more micro-batches a host may fall behind
    # its GPU, so it is raised to a lower bound.
    least_s = order_bound_s(
        times,
        order.placement,
        micro_batches,
        issued_s=seconds.issued_s.reshape(shape),
        splits=splits,
        steps_apart=apart,
    )
    return extended_s(few_s, iteration_s(longer), beyond / stages, least_s)


def extended_s(few_s: Floats, more_s: Floats, groups: Floats, least_s: Floats) -> Floats:
    """Extrapolate iteration times to more micro-batches, and raise them to a lower bound.

    ``few_s`` and ``more_s`` are the iteration times without and with one further group of
    micro-batches. The lower bound ``least_s`` holds even if another stage becomes the slowest with
    more micro-batches.
    """
    return np.maximum(few_s + (more_s - few_s) * groups, least_s)


def _played_s(path: OrderPath, networks: SharedNetworks | None, plan: Plan) -> Floats:
    """The iteration times of pipelines as the critical path of all passes in the plan's order,
    which may have other micro-batches than ``path``.
    """
    return replace(path, passes=passes_of(order_of_plan(plan))).iteration_s(networks)


def _networks(
    model: StagesOnGroups, plans: Sequence[Plan], placement: Placement
) -> SharedNetworks | None:
    """The networks of nodes and racks that the sends of several stages share; None if no sends of
    different stages can overlap there.
    """
    if model.cluster.nodes == 1 or placement.num_stages < 3 or not model.sends_overlap:
        return None
    shape = len(plans), placement.num_stages
    units, shares = shares_of_links(model, StageBatch.of_plans(plans))
    return SharedNetworks.of(
        [
            (
                of_tier.reshape(shape),
                shares_of_routes(of_tier.reshape(shape), share.reshape(shape), placement),
            )
            for of_tier, share in zip(units, shares, strict=True)
        ]
    )


def shares_of_links(model: StagesOnGroups, batch: StageBatch) -> tuple[Sequence[Ints], Floats]:
    """The node of each candidate stage and its unit (such as a rack) of each network tier, and the
    shares (units, C) of their links that the stage's sends to the next stage take.

    A send takes the share of a link that the sending ranks of a node or unit ask for together; it
    is zero for sends that stay in a node. Ranks of neighbouring stages are assumed to be placed
    alike, as for the size of sends.
    """
    shapes = task_seconds(model.models[0], batch).shapes
    links = model.tasks.links
    nodes = batch.first_rank.astype(np.int64) // model.cluster.gpus_per_node
    units = [nodes]
    if links.tiers is not None:
        units += [links.tiers.units_of(nodes, place) for place in links.tiers.places]
    asked = np.stack([shapes.senders_of_node, np.maximum(shapes.place_to_next, NETWORK)])
    asked = np.concatenate([asked, shapes.senders[None]])
    ways, rows = np.unique(asked, axis=1, return_inverse=True)
    parts = np.zeros((len(units), ways.shape[1]))
    for column, (at_once, tier, senders) in enumerate(ways.T.tolist()):
        tier_parts = links.parts_of_links(at_once=at_once, tier=tier, senders=senders)
        parts[: len(tier_parts), column] = tier_parts
    return units, np.where(shapes.crosses_to_next, parts[:, rows.ravel()], 0.0)


def places_on_network(model: StagesOnGroups, batch: StageBatch) -> list[Places]:
    """Where each candidate stage is on the network, for its sends in 1F1B; empty if no send can
    meet another one there.
    """
    if model.cluster.nodes < FEWEST_NODES_SHARED or not model.sends_overlap:
        return [()] * len(batch)
    pairs = zip(*shares_of_links(model, batch), strict=True)
    levels = [zip(units.tolist(), shares.tolist(), strict=True) for units, shares in pairs]
    return [*zip(*levels, strict=True)]


def _end_times(model: StagesOnGroups, batch: StageBatch, shape: tuple[int, int]) -> EndTimes:
    """The seconds that each part of the model needs once an iteration: for gradient reductions, for
    what follows all passes, and for gathers of stepped weights.
    """
    gathers_s, reductions_s, tied_s, steps_s = model.by_group(_once_s, batch)
    return EndTimes(
        gathers_s=gathers_s.reshape(shape),
        reductions_s=reductions_s.reshape(shape),
        tied_s=tied_s.reshape(shape),
        steps_s=steps_s.reshape(shape),
    )


def _once_s(model: StageTimeModel, batch: StageBatch) -> Floats:
    """The seconds of each part's work once an iteration: the gather of a block's stepped weights
    (the mean of all blocks), the last gradient reduction, the reduction of a tied embedding table,
    and the work after all passes, a row for each.
    """
    phases = model.tasks.template.phases
    seconds, counts = task_seconds(model, batch), model.tasks.types.counts(batch.columns)

    def summed(rows: Sequence[Task]) -> Floats:
        total_s = np.zeros(len(batch))
        for row in rows:
            alone = (counts * seconds.alone(row.kind, row.direction or "")).sum(axis=0)
            total_s += np.where(batch.value("zero") >= row.from_zero, alone, 0.0)
        return total_s

    reductions = [row for row in phases["last_backward"] if row.kind == "R"][-1:]
    ties = batch.has_embedding * (1 - batch.shares_table) > batch.has_head
    tied_s = np.where(ties, seconds.tied_s, 0.0)
    steps_s = summed(phases["step"]) + seconds.averaging_s(counts, slice(None))
    gathers = [row for row in phases["first_forward"] if row.kind == "U"]
    gather_s = summed(gathers) / np.maximum(counts.sum(axis=0), 1)
    return np.stack([gather_s, summed(reductions), tied_s, steps_s])


def _slowed_times(
    model: StagesOnGroups,
    batch: StageBatch,
    seconds: StageSeconds,
    split: SplitTimes | None,
    reduced_s: Floats,
    shape: tuple[int, int],
) -> Mapping[PassKind, SlowedTimes]:
    """How much longer each kind of pass takes while its stage sends; empty if no send runs beside
    passes. Weight-gradient passes wait for reductions of ``reduced_s``, which share the link.
    """
    if not (model.sends_overlap and seconds.point_to_point_s.any()):
        return {}
    computing, *computed_s = (
        table.reshape(shape)
        for table in model.by_group(partial(_computed_s, splits=split is not None), batch)
    )
    forward_s, backward_s, left_s, *lost_s = (
        getattr(seconds, name).reshape(shape)
        for name in ("through_forward_s", "through_backward_s", "left_backward_s", *LOST)
    )
    passes_s: dict[PassKind, tuple[Floats, Floats]] = {
        "F": (forward_s, lost_s[0]),
        "B": (backward_s, lost_s[1]),
    }
    if split is not None:
        backward_s = np.maximum(backward_s + left_s - split.less_s, 0.0)
        # Reductions begin when the first layer has computed, which the send slows; that of the last
        # block is beside the next pass.
        inside_s = reduced_s * (1 - 1 / np.maximum(batch.layers, 1).reshape(shape))
        sent_s = np.maximum(seconds.sent_s, seconds.received_s).reshape(shape)
        shared_s = np.clip(sent_s - computing * split.first_s, 0.0, inside_s)
        # What a whole backward pass loses to reductions beside a send is lost by the W pass.
        lost_back_s = np.maximum(lost_s[1] - shared_s, 0.0)
        passes_s |= {"B": (backward_s, lost_back_s), "W": (split.weights_s, shared_s)}
    return {
        kind: SlowedTimes(
            share=1 - 1 / computing,
            most_s=(computing - 1) * arithmetic_s,
            hidden_s=np.maximum(pass_s - arithmetic_s, 0.0),
            beside_send_s=beside_send_s,
        )
        for (kind, (pass_s, beside_send_s)), arithmetic_s in zip(
            passes_s.items(), computed_s[: len(passes_s)], strict=True
        )
    }


def _computed_s(model: StageTimeModel, batch: StageBatch, *, splits: bool) -> Floats:
    """The factor by which a send lengthens arithmetic, and the seconds in which forward, backward
    and weight-gradient passes compute, for each candidate (4, C).
    """
    seconds, counts = task_seconds(model, batch), model.tasks.types.counts(batch.columns)
    of_types = _computed_by_type(seconds, splits=splits)
    computing, _ = beside_arithmetic(seconds)
    return np.stack([computing, *((counts * of_type).sum(axis=0) for of_type in of_types)])


def _computed_by_type(seconds: TaskSeconds, *, splits: bool) -> tuple[Floats, Floats, Floats]:
    """The seconds in which a layer of each type computes in a forward, a backward and a
    weight-gradient pass (types, C).

    With ``splits`` backward passes leave the gradients of weights to separate passes, and have
    nothing behind which to hide their collectives.
    """
    forward_s = seconds.alone("F", "") + seconds.tensor_s["forward"]
    backward_s = seconds.alone("B", "") + seconds.tensor_s["backward"]
    weights_s = weight_gradients_s(seconds)
    if splits:
        backward_s = backward_s + seconds.hidden_s - weights_s
    return forward_s, backward_s, weights_s


def _gradient_times(
    model: StagesOnGroups,
    batch: StageBatch,
    turned_s: Floats,
    shape: tuple[int, int],
    *,
    splits: bool,
) -> tuple[SplitTimes | None, TurnTimes | None]:
    """The times of each part's separate weight-gradient passes, None if it has none; and how much
    longer a pass takes while gradients of the stage's previous pass are still being reduced, None
    if none ever are.
    """
    reduces = bool(turned_s.any())
    if not splits and not reduces:
        return None, None
    split, turned = None, None
    parts = partial(_of_gradients, splits=splits, reduces=reduces)
    tables = iter(table.reshape(shape) for table in model.by_group(parts, batch))
    if splits:
        weights_s, less_s, first_s = islice(tables, 3)
        split = SplitTimes(
            weights_s=weights_s, less_s=less_s, first_s=np.minimum(first_s, weights_s)
        )
    if reduces:
        left_s, least_s, hidden_backward_s, hidden_weights_s, is_beside = tables
        turned_s = turned_s.reshape(shape)
        turned = TurnTimes(
            forward_s=turned_s,
            left_s=np.where(is_beside > 0, left_s, turned_s),
            least_s=np.where(is_beside > 0, least_s, turned_s),
            hidden_backward_s=hidden_backward_s,
            hidden_weights_s=hidden_weights_s,
        )
    return split, turned


def _of_gradients(
    model: StageTimeModel, batch: StageBatch, *, splits: bool, reduces: bool
) -> Floats:
    """What ``_gradient_times`` needs, a row for each time and a column for each candidate."""
    slots, rows = StageSlots.of(model.tasks, batch), []
    if splits:
        # The first reduction of a pass begins when its first layer has computed.
        first_s = _of_first_layers(slots, [weight_gradients_s(slots.seconds)])
        rows += [*split_seconds(slots), *first_s]
    if reduces:
        rows += [*reduced_beside(slots, splits=splits)]
    return np.stack(rows)


def task_seconds(model: StageTimeModel, batch: StageBatch) -> TaskSeconds:
    """The seconds of the tasks of each candidate's strategy."""
    return model.tasks.seconds({name: batch.value(name) for name in task_columns()})


# Computes backward passes without weight gradients, which are computed in separate passes.


# These kinds of tasks move from the backward pass to the separate weight-gradient pass: reducing
# and offloading gradients.
_OF_GRADIENTS = frozenset({"R", "G"})


def split_slots(work: SlotWork, weights_s: Floats, unhidden_s: Floats) -> Floats:
    """The seconds of each layer in a whole backward pass, in its input-gradient part and in its
    weight-gradient part, and of waits that weight-gradient GEMMs hide in a whole pass.

    The result is (4, K, S); the arguments are those of ``split_pass_seconds``.
    """
    here = work.kinds[:, HERE]
    products, waits = (of_layers(one, here) for one in (weights_s, unhidden_s))
    (whole,) = work.alone(("backward",)).swapaxes(0, 1)
    (inputs,) = work.alone(("backward",), without=_OF_GRADIENTS).swapaxes(0, 1)
    inputs[COMPUTE] += waits - products
    (weights,) = work.alone(("backward",), without={*KINDS} - _OF_GRADIENTS).swapaxes(0, 1)
    weights[COMPUTE] = products
    (fetched_s,) = work.fetched_s(("backward",)).sum(axis=0)
    whole_s, inputs_s, own_s = (_lasting(work, one) for one in (whole, inputs, weights))
    whole_s, inputs_s = np.maximum(whole_s, fetched_s), np.maximum(inputs_s, fetched_s)
    if len(work.evicts):
        for alone, lasting in ((whole, whole_s), (weights, own_s)):
            evicting_s = work.evicting_s(alone[:, :, work.evicts])
            lasting[:, work.evicts] = np.maximum(lasting[:, work.evicts], evicting_s)
    return np.stack([whole_s, inputs_s, own_s, waits])


def split_pass_seconds(
    seconds: TaskSeconds, kinds: Ints, summed: Sums, *, weights_s: Floats, unhidden_s: Floats
) -> tuple[Floats, Floats]:
    """The seconds of separate weight-gradient passes with their gradient reductions, and how much
    shorter backward passes are without them.

    The weight-gradient GEMMs take ``weights_s`` (T, S). For ``unhidden_s`` tensor-parallel ranks
    wait for collectives that these GEMMs hide in a whole backward pass. Both passes together are
    never shorter than one.
    """
    is_inside = kinds[:, HERE] != NOTHING
    split = split_slots(SlotWork(seconds, kinds[is_inside]), weights_s, unhidden_s)
    whole_s, inputs_s, weights_s, waits_s = summed([(split, is_inside)])
    less_s = whole_s - inputs_s
    return np.maximum(weights_s, less_s + waits_s), less_s


def _lasting(work: SlotWork, alone: Floats) -> Floats:
    """The seconds of tasks that overlap, given the seconds of each stream alone."""
    alone = np.maximum(alone, 0.0)
    return until(STREAMS, slot_ends(work.seconds, alone, is_least=False), alone)


def split_seconds(slots: StageSlots) -> Floats:
    """The seconds of weight-gradient passes, and how much shorter they make backward passes."""
    split_s = split_pass_seconds(
        slots.seconds,
        slots.kinds,
        slots.summed,
        weights_s=weight_gradients_s(slots.seconds),
        unhidden_s=slots.seconds.hidden_s,
    )
    return np.stack(split_s)


def _of_first_layers(slots: StageSlots, of_types: Sequence[Floats]) -> Floats:
    """The seconds of the layer that the backward pass of each candidate stage computes first, one
    row for each table of seconds by type of layer.
    """
    is_first = (slots.kinds[:, HERE] != NOTHING) & (slots.kinds[:, UPPER] == NOTHING)
    layers = slots.kinds[is_first, HERE]
    return slots.summed([(np.stack([of_layers(one, layers) for one in of_types]), is_first)])


def reduced_beside(slots: StageSlots, *, splits: bool) -> Floats:
    """What a backward pass leaves to be reduced beside the first layer of the next pass, for each
    candidate (5, C).

    The rows are the seconds of what is left, and those by which it lengthens the next pass at
    least; the seconds of it that the first layer of a backward pass and of a weight-gradient pass
    hides; and whether it does run beside that layer. With ``splits`` weight gradients have separate
    passes.
    """
    seconds, kinds = slots.seconds, slots.kinds
    is_below = (kinds[:, HERE] == NOTHING) & (kinds[:, UPPER] != NOTHING)
    (alone,) = SlotWork(seconds, kinds[is_below]).alone(("backward",)).swapaxes(0, 1)
    left_s = until(STREAMS, slot_ends(seconds, alone, is_least=False), alone)
    (left_s,) = slots.summed([(left_s[None], is_below)])
    _, *computed_s = _computed_by_type(seconds, splits=splits)
    strategy = slots.strategies.index
    computing, linking = (one[strategy] for one in beside_arithmetic(seconds))
    hidden_s = _of_first_layers(slots, computed_s)
    return np.stack(
        [
            left_s,
            left_s * linking * (1 - 1 / computing),
            *hidden_s * (1 - computing + computing / linking),
            are_shared(seconds)[strategy],
        ]
    )
