"""Computes the times of passes layer by layer: of layers whose weights are copied from the host and
gathered, of first forward passes with optimizer steps, of passes from which activations or
gradients leave (and their lower bounds), and of first and last passes whose collectives queue.

Axes: C candidates or cases, S strategies, J sets of layers, R rows of equal layers, L layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Cases, Distinct, distinct_rows, numbered
from mistlab.cost.side_by_side import (
    AHEAD,
    AWAY,
    BEFORE,
    COMPUTED,
    COPIED,
    FETCHED,
    GATHERED,
    LEAVES,
    LEFT,
    LINK,
    LINK_BIT,
    MEASURED,
    NONE_ENDED,
    ONE_MORE,
    REDUCED,
    ROWS,
    SLOT_WORK,
    STEPPED_AHEAD,
    Lanes,
    SlowedBy,
    ends_of_several,
    ends_of_streams,
    lanes_of,
    largest_weights,
    played,
    prices_of,
    sets_of,
    slot_after,
    until,
)
from mistlab.cost.slot_work import (
    LOWER,
    NOTHING,
    SIMULATED,
    UPPER,
    WORK_OF_TASKS,
    gathers_each_pass,
    keep_all,
    leave_passes,
    of_layers,
    of_pass,
    reduced_inside,
    reduces_each_pass,
    stay_reduced,
    steps_in_turn,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.graph.layer_types import EMBEDDING
from mistlab.machine.slowdowns import COMPUTE, STREAMS

# Computes the time of layers whose weights are copied from the host and then gathered from ranks.


_FROM_HOST = STREAMS.index("host_to_device")


def ends_if_gathered(alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats) -> Floats:
    """The time at which each stream ends if weights are gathered only after they were copied from
    the host.

    All work would take ``alone`` (4, C). The gather is the last ``gathered`` seconds (C) of the
    link's work, the copy the first ``copied`` seconds (C) of the host's; both are positive. Until
    both the copy and the link's other work have ended, the host copy slows the other streams, and
    afterwards the link does.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK], left[_FROM_HOST] = np.maximum(alone[LINK] - gathered, 0.0), copied
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    for _ in STREAMS:
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * factors, np.inf)
        step = np.where(busy[_FROM_HOST], ahead.min(axis=0), 0.0)
        is_done = busy & (ahead <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        elapsed += step
        ends += is_done * elapsed
    left[LINK] += gathered
    left[_FROM_HOST] = np.maximum(alone[_FROM_HOST] - copied, 0.0)
    return np.maximum(ends, np.where(left > 0, ends_of_several(left, slowed) + elapsed, 0.0))


def least_ends_if_gathered(
    alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats
) -> Floats:
    """Lower bounds of the time at which each stream ends if weights are gathered only after they
    were copied from the host, for this work and for any with longer copies.

    The slowdown factors are ``lowered`` (docs/decisions/0035-searches-that-prove.md).

    If the copies are longer, the gather may come at any later time. So in the bound no gather slows
    the copies, and arithmetic is slowed only as much as by a gather, whatever else runs.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK] = np.maximum(alone[LINK] - gathered, 0.0)
    copying, gathering = copied.copy(), gathered.copy()
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    # At most six events follow: the ends of the four streams, of the copy and of the gather.
    for _ in range(len(STREAMS) + 2):
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        on_link = slowed.table[LINK].take(offset + (sets_of(busy) | LINK_BIT))
        gathers = ~busy[LINK] & (copying <= 0) & (gathering > 0)
        ahead = np.where(busy, left * factors, np.inf)
        copied_s = np.where(copying > 0, copying * factors[_FROM_HOST], np.inf)
        gathered_s = np.where(gathers, gathering * on_link, np.inf)
        step = np.minimum(ahead.min(axis=0), np.minimum(copied_s, gathered_s))
        step = np.where(np.isfinite(step), step, 0.0)
        is_done, is_gathered = busy & (ahead <= step), gathers & (gathered_s <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        copying = np.where(copied_s <= step, 0.0, copying - step / factors[_FROM_HOST])
        gathering -= np.where(gathers, step / on_link, 0.0)
        gathering[is_gathered] = 0.0
        elapsed += step
        ends += is_done * elapsed
        ends[LINK] = np.where(is_gathered, elapsed, ends[LINK])
    slower = slowed.table[COMPUTE].take(offset + (1 << COMPUTE) + LINK_BIT)
    slowed_s = alone[COMPUTE] + gathered * (1 - 1 / slower)
    computes = alone[COMPUTE] > 0
    ends[COMPUTE] = np.where(computes, np.maximum(ends[COMPUTE], slowed_s), 0.0)
    return ends


# Computes the first forward pass of first stages, and of stages whose micro-batch comes late.
# When a micro-batch comes late, two blocks have run their optimizer steps and the states of a third
# block have been fetched; the buffers have no room for more. The other blocks run their steps while
# the micro-batch passes through. Of a long row of equal layers only some are simulated: the others
# take as long as the mean of these.


# The most layers that are simulated in a row of equal layers, and in a whole stage. In a longer
# row, the mean time of ``MEASURED`` layers stands for each layer that is left out; the last ones
# are not measured, since they may have run their optimizer steps before the others.
_OF_RUN, _OF_STAGE = 20, 60
# Cases are simulated so many at a time, which keeps intermediate results in the CPU's cache.
_AT_ONCE = 8192
# The ways of cases: twice whether activations stay on the GPU, plus whether weights are gathered.
_WAYS = (*product(("", "A>"), (False, True)),)
_GATHERS = np.array([gathers for _, gathers in _WAYS])


def first_pass_s(
    seconds: TaskSeconds, strategies: Distinct, stages: Distinct, kept: Kept
) -> Floats:
    """The seconds until a stage has computed its first forward pass (2, C), for each candidate that
    offloads weights: from the beginning of the iteration for first stages, which wait for no
    micro-batch, and from the arrival of a micro-batch that comes late for others.

    Zero for other candidates, and for stages with very many different layers; infinite for such
    first stages, and negative for lower bounds of first stages.
    """
    types, strategy, stage = seconds.model.types, strategies.index, stages.index
    columns = dict(zip(types.columns, stages.columns, strict=True))
    sizes, of_runs = types.runs(columns)
    simulated = np.minimum(sizes, _OF_RUN).astype(np.int64)
    layers = simulated.sum(axis=0)
    is_simulated = (layers > 0) & (layers <= _OF_STAGE)
    offloads: Bools = np.logical_or.reduce(seconds.alone("P", ">") > 0) & steps_in_turn(seconds)
    is_first = offloads[strategy] & (columns["has_embedding"][stage] > 0)
    passed_s = np.where(is_first, -1.0 if kept == "least" else np.inf, 0.0)
    rows = np.flatnonzero(offloads[strategy] & is_simulated[stage])
    if not len(rows) or kept == "least":
        return np.stack([passed_s, np.zeros(len(strategy))])
    of_tasks, slowed = of_pass(seconds, "first_forward", ROWS), seconds.slowed_by()
    # Where activations stay on the GPU, the task that offloads them (A>) is left out.
    keeps = ~np.logical_or.reduce(seconds.alone("A", ">") > 0)
    # Many layers have the same work in their first passes, and so have many strategies.
    way, of_types = 2 * keeps + gathers_each_pass(seconds), np.arange(of_tasks.shape[1])
    layers_of = distinct_rows(
        [
            *of_tasks.reshape(len(of_tasks), -1),
            *(np.tile(of_strategy, len(of_types)) for of_strategy in (way, slowed.first)),
            np.repeat(of_types == types.names.index(EMBEDDING), len(way)),
        ]
    )
    alike = distinct_rows([*layers_of.index.reshape(len(of_types), -1)])
    cases = Cases.of((sizes, of_runs), alike.index[strategy[rows]], stage[rows], _OF_RUN)
    passed_s[rows] = cases.of_rows(*_first_s(cases, np.array(alike.columns), layers_of, slowed))
    return np.asarray(np.where([is_first, ~is_first], passed_s, 0.0))


def _first_s(
    cases: Cases, layers_of: Ints, layers: Distinct, slowed: SlowedBy
) -> tuple[Floats, Floats]:
    """The seconds of the first pass of each case (C), and those of a further layer in each row of
    equal layers (R, C).

    Each type of layers and strategy has its row of ``layers`` in ``layers_of``: the seconds of its
    tasks, its way, the place of its slowdown factors and whether it is an embedding.
    """
    *tasks, way, first, opens = layers.columns
    of_tasks, types = np.array(tasks), np.broadcast_to(cases.types, cases.sizes.shape)
    of_rows = layers_of[types[:, cases.stage], cases.strategy]
    passes = distinct_rows([*np.concatenate(_joined(cases.simulated, of_rows))])
    case = np.empty(len(passes.columns[0]), dtype=np.intp)
    case[passes.index] = np.arange(len(passes.index))
    ends_s = np.empty((int(cases.layers.max()), len(case)))
    # Passes are simulated together if their stages have about equally many layers, since these take
    # about equally many steps of the simulation.
    in_order = np.argsort(cases.layers[case], kind="stable")
    for begin in range(0, len(in_order), _AT_ONCE):
        chosen = in_order[begin : begin + _AT_ONCE]
        part = cases.chosen(case[chosen])
        rows, last = layers_of[part.kinds(NOTHING), part.strategy], part.layers - 1
        lanes, of_part = lanes_of(len(rows), len(rows), _WAYS), way[rows[0]]
        begun = _starts(lanes, of_part, opens[rows[0]], _GATHERS[of_part] & (last > 0))
        of_passes = of_tasks[:, rows], replace(slowed, first=first[rows[0]])
        played_s = played(*of_passes, lanes, of_part, begun, last, part.layers)
        ends_s[: len(rows), chosen] = played_s[1]
    stops = np.maximum(cases.simulated.cumsum(axis=0) - 1 - AHEAD, 0)
    measured_s = ends_s[stops, passes.index] - ends_s[np.maximum(stops - MEASURED, 0), passes.index]
    return ends_s[cases.layers - 1, passes.index], measured_s / MEASURED


def _joined(sizes: Ints, kinds: Ints) -> tuple[Ints, Ints]:
    """The numbers of layers in rows of equal layers, and their kinds (R, C); a row without layers,
    and one before more of the same kind, is joined to the next.
    """
    sizes, kinds = sizes.copy(), np.where(sizes > 0, kinds, NOTHING)
    for row in range(1, len(sizes)):
        joins = (sizes[row] == 0) | (kinds[row] == kinds[row - 1])
        kinds[row] = np.where(joins, kinds[row - 1], kinds[row])
        sizes[row] += sizes[row - 1] * joins
        sizes[row - 1, joins], kinds[row - 1, joins] = 0, NOTHING
    return sizes, kinds


def _starts(lanes: Lanes, way: Ints, is_first: Bools, gathers: Bools) -> tuple[Ints, Ints]:
    """Each stream's first task (4, C) and the tasks that have ended (C), at the beginning of an
    iteration for first stages, else at the arrival of a late micro-batch.
    """
    at = np.where(is_first, lanes.first[:, way], lanes.late[:, way])
    # Sharded weights of the second layer are gathered when the first one computes.
    at[LINK] -= gathers & ~is_first
    ended = STEPPED_AHEAD - ONE_MORE["U"] * gathers
    return at, np.where(is_first, NONE_ENDED, ended)


# Computes passes from which activations or gradients leave, layer by layer.
# A gradient leaves as soon as it is computed and reduced, while the next layer's data is fetched.
# No layer waits for it before the layer after the next one (``mistlab.stages.pass_tasks``), so what
# is left of it goes on in the next layer's slot, or in the slot between two passes. A pass's output
# is sent when the last layer has computed.


_OF_NEXT_LAYER = [GATHERED, COPIED, FETCHED]
_OF_OWN_LAYER = [COMPUTED, REDUCED, LEAVES]
# If what a layer leaves to the next slot changes by less than this share of the slot, all further
# slots of equal layers take as long.
_ALIKE = 1e-10


def leaving_s(seconds: TaskSeconds, strategies: Distinct, stages: Distinct) -> Floats | None:
    """The seconds of passes of stages from which activations or gradients leave, for each candidate
    (C); zero for other candidates, None if no pass is simulated.

    The result is (9, C): a forward, a steady backward and the last backward pass that find their
    stage idle, until their layers have computed; the last one until its gradients have left, and
    the seconds in which its reductions go on; a forward pass after a backward pass, a backward pass
    after a forward pass, and either after a pass of its own kind.
    """
    types, chosen = seconds.model.types, np.logical_or.reduce(leave_passes(seconds))
    rows = np.flatnonzero(chosen[strategies.index])
    if not len(rows):
        return None
    sizes, of_runs = types.runs(dict(zip(types.columns, stages.columns, strict=True)))
    of_passes = np.stack([of_pass(seconds, phase, WORK_OF_TASKS) for phase in SIMULATED], axis=2)
    # Many strategies have the same work in some of their passes.
    shared = reduces_each_pass(seconds), seconds.slowed_by().first
    ways = distinct_rows(
        [
            *of_passes[..., chosen].reshape(SLOT_WORK * of_passes.shape[1], -1),
            *(np.tile(of_strategy[chosen], len(SIMULATED)) for of_strategy in shared),
            np.repeat([0, 1, 1], np.count_nonzero(chosen)),
        ]
    )
    *columns, holds, first, is_back = ways.columns
    alike = distinct_rows([*ways.index.reshape(len(SIMULATED), -1)])
    of_rows = alike.index[(chosen.cumsum() - 1)[strategies.index[rows]]], stages.index[rows]
    cases = Cases.of((sizes, of_runs), *of_rows, int(sizes.max(initial=0)))
    # Layers of a backward pass come in the opposite order.
    in_order = (
        _not_empty(cases.sizes[::step], cases.types[::step], len(types.names)) for step in (1, -1)
    )
    lengths, kinds = (np.concatenate(each, axis=1) for each in zip(*in_order, strict=True))
    every = np.array(alike.columns)[:, cases.strategy] * cases.sizes.shape[1] + cases.stage
    at, of_cases = numbered(every.ravel())
    way, stage = np.divmod(every.ravel()[at], cases.sizes.shape[1])
    stage += is_back[way] * cases.sizes.shape[1]
    passes = _Passes(
        np.reshape(columns, (SLOT_WORK, -1)),
        kinds[:, stage] * len(first) + way,
        lengths[:, stage],
        replace(seconds.slowed_by(), first=first[way]),
        holds[way],
    )
    passed_s = _after_another(passes, of_cases.reshape(len(SIMULATED), -1))
    of_all = np.zeros((len(passed_s), len(strategies.index)))
    of_all[:, rows] = passed_s[:, cases.index]
    return of_all


@dataclass(frozen=True, slots=True, eq=False)
class _Passes:
    """Passes that differ (C), in rows of ``sizes`` equal layers (R, C), of which ``slots`` (R, C)
    are the columns of ``alone`` with the seconds of each work alone.
    """

    alone: Floats
    slots: Ints
    sizes: Ints
    slowed: SlowedBy
    holds: Bools

    def chosen(self, rows: Rows) -> Self:
        """Select the passes with these indices."""
        of_layers = self.slots[:, rows], self.sizes[:, rows]
        return type(self)(self.alone, *of_layers, self.slowed.chosen(rows), self.holds[rows])


def _after_another(passes: _Passes, of_cases: Rows) -> Floats:
    """The seconds of each case's passes (9, C) as in ``leaving_s``; ``of_cases`` (3, C) are the
    indices of its forward, steady and last backward pass among the ``passes``.
    """
    (forward, back, last), begun = of_cases, np.zeros(len(passes.holds), dtype=np.intp)
    idle_s, idle_rests, of_idle = _in_slots(passes, np.zeros((2, 1)), begun)
    at, of_last = numbered(of_idle[last])
    rests, slowed = idle_rests[:, of_idle[last[at]]], passes.slowed.chosen(last[at])
    left_s, reducing_s = (of_rest[of_last] for of_rest in _leaving_s(rests, slowed))

    def after(rests: Floats, before: Rows, number: Rows) -> tuple[Floats, Floats, Rows]:
        """The seconds of the passes of these numbers (C), each after one of whose last slot a
        column of ``rests`` was left, the one ``before`` (C); what they leave, and its columns.
        """
        at, opened = numbered(before * passes.alone.shape[1] + passes.slots[0, number])
        opened_s, left = _opened(passes.chosen(number[at]), rests[:, before[at]])
        passed_s, of_rests = idle_s[number], of_idle[number]
        # Mostly nothing is left when the first layer of the next pass computes.
        rows = np.flatnonzero(np.logical_or.reduce(left > 0)[opened])
        at, index = numbered(opened[rows] * len(idle_s) + number[rows])
        again = passes.chosen(number[rows[at]])
        again_s, rests, of_again = _in_slots(again, left, opened[rows[at]])
        passed_s[rows], of_rests[rows] = again_s[index], of_again[index] + idle_rests.shape[1]
        return opened_s[opened] + passed_s, np.concatenate([idle_rests, rests], axis=1), of_rests

    # Passes are alike from the second one on, since what one leaves is gone before the next leaves.
    both, count = np.concatenate([forward, back]), len(back)
    first_s, rests, of_rests = after(idle_rests, np.tile(of_idle[forward], 2), both)
    next_s, *_ = after(rests, np.tile(of_rests[count:], 2), both)
    # Steady passes count what sends take from the reductions of each pass.
    reducing_s = np.where(back != last, reducing_s, 0.0)
    alone_s = *idle_s[of_cases], idle_s[last] + left_s, reducing_s
    in_turn = next_s[:count], first_s[count:], first_s[:count], next_s[count:]
    return np.stack([*alone_s, *in_turn])


def _opened(passes: _Passes, rest: Floats) -> tuple[Floats, Floats]:
    """The seconds of the slot before a pass (C), in which its first layer is fetched, and what is
    left afterwards of the reductions and offloads of the pass before (2, C), of whose last slot
    ``rest`` (8, C) was left.
    """
    work = rest.copy()
    work[COMPUTED] = 0.0
    work[_OF_NEXT_LAYER] = passes.alone[_OF_NEXT_LAYER].take(passes.slots[0], axis=1)
    opened_s = slot_after(work, passes.slowed, holds=passes.holds)
    return opened_s, np.stack([work[BEFORE] + work[REDUCED], work[LEAVES]])


def _not_empty(sizes: Ints, types: Ints, nothing: int) -> tuple[Ints, Ints]:
    """The numbers of layers in the rows of equal layers of each case, empty rows last, and their
    types; ``nothing`` stands for an empty row, of which each case has one at least.
    """
    sizes = np.concatenate([sizes, np.zeros_like(sizes[:1])])
    types = np.concatenate([types, np.zeros_like(types[:1])])
    order = np.argsort(sizes == 0, axis=0, kind="stable")
    sizes = np.take_along_axis(sizes, order, axis=0)
    types = np.take_along_axis(np.broadcast_to(types, sizes.shape), order, axis=0)
    return sizes, np.where(sizes > 0, types, nothing)


def _in_slots(passes: _Passes, left: Floats, same: Rows) -> tuple[Floats, Floats, Rows]:
    """The seconds until all layers of each pass have computed (C), what is left of the work of a
    last slot (8, different ones), and of which one in each pass (C). The pass before a pass has
    left a column of ``left`` to reduce and offload (2, different ones), the one in ``same`` (C).
    """
    alone, slots, sizes = passes.alone, passes.slots, passes.sizes
    of_own, of_next = alone[_OF_OWN_LAYER], alone[_OF_NEXT_LAYER]
    taken_s, rests, of_rests = np.zeros(len(same)), [np.empty((SLOT_WORK, 0))], np.zeros_like(same)
    going = np.flatnonzero(sizes[0])
    row, layers, same, ended = np.zeros_like(going), sizes[0, going], same[going], 0
    # Slots with the same work before them and in them are simulated once.
    while len(going):
        here, is_last = slots[row, going], layers == 1
        after = np.where(is_last, slots[row + 1, going], here)
        closes = is_last & (sizes[row + 1, going] == 0)
        code = ((same * alone.shape[1] + here) * alone.shape[1] + after) * 2 + closes
        at, index = numbered(code)
        work, before, closing = np.empty((SLOT_WORK, len(at))), left[:, same[at]], closes[at]
        work[_OF_OWN_LAYER], work[[BEFORE, LEFT]] = of_own.take(here[at], axis=1), before
        work[_OF_NEXT_LAYER] = of_next.take(after[at], axis=1)
        slowed, holds = passes.slowed.chosen(going[at]), passes.holds[going[at]]
        slot_s = slot_after(work, slowed, closes=closing, holds=holds)
        left = work[[BEFORE, LEAVES]]
        left[0] += work[REDUCED]
        is_alike = np.logical_and.reduce(np.abs(left - before) <= _ALIKE * slot_s)
        # All slots but the last one of a row have the same work.
        slots_alike = 1 + np.where(is_alike[index], np.maximum(layers - 2, 0), 0)
        taken_s[going] += slot_s[index] * slots_alike
        layers, row, same = layers - slots_alike, row + is_last, index
        layers = np.where(is_last, sizes[row, going], layers)
        if np.logical_or.reduce(closes):
            rests.append(work[:, closing])
            of_rests[going[closes]] = (ended + closing.cumsum() - 1)[index[closes]]
            others, ended = np.flatnonzero(~closes), ended + int(np.count_nonzero(closing))
            going, row, layers, same = (of_case[others] for of_case in (going, row, layers, same))
    return taken_s, np.concatenate(rests, axis=1), of_rests


def _leaving_s(work: Floats, slowed: SlowedBy) -> tuple[Floats, Floats]:
    """The seconds after all layers have computed until the gradients of the last two are
    offloaded, and until reductions alone would end; ``work`` is what is left of the last slot.
    """
    reducing_s = work[BEFORE] + work[REDUCED]
    left_s = slot_after(work, slowed)
    work[[BEFORE, LEFT]] = work[[REDUCED, LEAVES]]
    work[[REDUCED, LEAVES]] = 0.0
    return left_s + slot_after(work, slowed), reducing_s


def without_leaving_s(alone: Floats, fetched_s: Floats, slowed: SlowedBy) -> Floats:
    """Lower bounds of the seconds of each layer in a backward pass, whatever leaves meanwhile.

    Work without reductions takes ``alone`` (4, K', S); for ``fetched_s`` (2, K', S) of it the next
    layer's weights are copied and then gathered. The factors in ``slowed`` are ``lowered``.
    """
    alone = alone.copy()
    # Weights that are copied first are gathered at another time than the copies begin.
    alone[AWAY], alone[LINK, fetched_s[1] > 0] = 0.0, 0.0
    ends = ends_of_streams(alone.reshape(len(alone), -1), slowed.beside_any)
    lasting = until(STREAMS, ends.reshape(alone.shape), alone)
    return np.asarray(np.maximum(lasting, fetched_s.sum(axis=0)))


# Computes lower bounds of passes from which activations or gradients leave while later layers
# compute. What leaves a layer may do so in the next two slots. Each second of it counts as many
# seconds of the pass as its price says, and a slot's own work as any weights (of
# ``least_together``) say that are no lower.


def least_in_windows(seconds: TaskSeconds, kinds: Ints, alone: Floats) -> Floats:
    """Lower bounds of how long forward and backward passes take while activations or gradients
    leave for the host, split over their layers (2, prices, K, S).

    A price says how many seconds a pass takes at least for each second of what leaves. Each price
    gives a bound of its own: the sum over the pass's layers. The bounds never fall as work grows,
    and are zero where nothing leaves. The tasks take ``alone`` (4, 2, K, S) by themselves.
    """
    leave, slowed, holds = leave_passes(seconds), seconds.slowed_by(), reduces_each_pass(seconds)
    of_groups = {
        first: slowed.table[:, first : first + (1 << len(STREAMS))].tobytes()
        for first in np.unique(slowed.first[leave.any(axis=0)]).tolist()
    }
    tables: list[tuple[int, Rows, list[Floats]]] = []
    for way, (kind, of_layer) in enumerate((("A", LOWER), ("G", UPPER))):
        # Gradients are reduced before they leave.
        for reduces in (False, True)[: way + 1]:
            of_way = leave[way] & (holds == reduces) if way else leave[way]
            streams = (AWAY, LINK) if reduces else (AWAY,)
            for first, factors in of_groups.items():
                chosen = np.flatnonzero(of_way & (slowed.first == first))
                if not len(chosen):
                    continue
                work, layers = alone[:, way][..., chosen], kinds[:, of_layer]
                work[AWAY], gone = 0.0, [of_layers(seconds.alone(kind, ">")[:, chosen], layers)]
                if reduces:
                    gone.append(reduced_inside(seconds, layers)[:, chosen])
                    work[LINK] = np.maximum(work[LINK] - gone[1], 0.0)
                together = np.tensordot(largest_weights(factors), work, 1)
                least = [
                    together[reaches].max(axis=0) + np.tensordot(price, gone, 1)
                    for price, reaches in prices_of(factors, streams)
                ]
                tables.append((way, chosen, least))
    prices = max((len(least) for *_, least in tables), default=0)
    of_prices = np.zeros((2, prices, *alone.shape[2:]))
    for way, chosen, least in tables:
        of_prices[way, : len(least), :, chosen] = np.array(least).transpose(2, 0, 1)
    return of_prices


# Computes first forward and last backward passes where the gathers and reductions of different
# layers queue.


def queued_collectives(
    seconds: TaskSeconds, strategies: Distinct, stages: Distinct, kept: Kept, pace: Floats
) -> Floats:
    """The seconds of first forward passes with the gathers before them; of last backward passes
    until all layers have computed; and until all gradients but the last layer's are reduced (3, C).

    Zero for candidates that copy to or from the host, or whose layers wait for reductions, and of
    first passes with optimizer steps. The engine gathers one layer ahead. If a layer's reduction
    takes longer than the next layer's computation, further layers are slowed too; layers that take
    long to gather are gathered while several others compute. Layers compute for at least ``pace``
    (C) times as long as alone.
    """
    template, types = seconds.model.template, seconds.model.types
    strategy, stage = strategies.index, stages.index
    sizes, of_runs = types.runs(dict(zip(types.columns, stages.columns, strict=True)))
    of_runs = np.broadcast_to(of_runs, sizes.shape)
    rows = np.flatnonzero((stay_reduced(seconds) & keep_all(seconds))[strategy])
    queued_s = np.zeros((3, len(strategy)))
    if not len(rows):
        return queued_s
    strategy, stage = strategy[rows], stage[rows]

    def in_turn(tables: Iterable[Floats], way: int) -> Iterator[tuple[Floats, Floats]]:
        computed_s, linked_s = tables
        for size, of_type in zip(sizes[::way], of_runs[::way], strict=True):
            kinds, layers = (of_type[stage], strategy), size[stage]
            for layer in range(int(layers.max())):
                has = layers > layer
                yield computed_s[kinds] * has, linked_s[kinds] * has

    slowed = seconds.slowed_by(kept).chosen(strategy)
    both = np.full(len(rows), (1 << COMPUTE) + LINK_BIT, dtype=np.uint8)
    factors = *slowed.table[[COMPUTE, LINK]][:, slowed.place(both) + both], pace[rows]
    last_s = seconds.alone("B", "") + seconds.tensor_s["backward"], seconds.alone("R", "")
    queued_s[1:, rows] = link_behind(in_turn(last_s, -1), *factors)
    if {task.name for task in template.phases["first_forward"]} == {*_GATHERED}:
        first_s = of_pass(seconds, "first_forward", _GATHERED)
        queued_s[0, rows] = link_ahead([*in_turn(first_s, 1)], *factors)
    return queued_s


# The rows of the tasks of first forward passes without optimizer steps.
_GATHERED = {"F": 0, "U": 1}


def link_ahead(
    tasks: Sequence[tuple[Floats, Floats]], computing: Floats, linking: Floats, pace: Floats
) -> Floats:
    """The seconds until the last of several tasks in a row has computed (C), if each waits for work
    of the link between GPUs, which does its work for one after another.

    The arguments are those of ``link_behind``, but the link's work comes before the task.
    """
    elapsed, done, needed = np.zeros((3, len(computing)))
    whole = np.add.reduce([link for _, link in tasks])
    for compute, link in tasks:
        needed = needed + link
        elapsed, done = elapsed + np.maximum(needed - done, 0.0), np.maximum(needed, done)
        beside = np.minimum(compute * computing, (whole - done) * linking)
        lasting = beside + np.maximum(compute - beside / computing, 0.0)
        held = np.maximum(compute * pace - lasting, 0.0)
        elapsed = elapsed + lasting + held
        done = np.minimum(done + beside / linking + held, whole)
    return elapsed


def link_behind(
    tasks: Iterable[tuple[Floats, Floats]], computing: Floats, linking: Floats, pace: Floats
) -> Floats:
    """The seconds (2, C) until the last of several tasks in a row has computed, and until the link
    between GPUs has done the work that follows each of the tasks but the last.

    ``tasks`` are computed one after another; each is a pair of times (C): of its computation alone,
    and of the link's work after it. While both run, the computation is slowed by the factor
    ``computing`` (C), and the link by ``linking`` (C). A computation lasts at least ``pace`` (C)
    times as long as alone; in what its host adds the link runs by itself.
    """
    elapsed = np.zeros_like(computing)
    left, after = np.zeros_like(computing), np.zeros_like(computing)
    for compute, link in tasks:
        left = left + np.where(compute > 0, after, 0.0)
        beside = np.minimum(compute * computing, left * linking)
        lasting = beside + np.maximum(compute - beside / computing, 0.0)
        held = np.maximum(compute * pace - lasting, 0.0)
        elapsed += lasting + held
        left = np.maximum(left - beside / linking - held, 0.0)
        after = np.where(compute > 0, link, after)
    return np.stack([elapsed, elapsed + left])
