"""Computes the times of passes layer by layer: of passes from which activations or gradients leave
(and their lower bounds), and of first and last passes whose collectives queue; and lower bounds of
first forward passes with optimizer steps.

Axes: C candidates or cases, S strategies, J sets of layers, R rows of equal layers, L layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import NOTHING, Cases, Distinct, distinct_rows, numbered
from mistlab.cost.side_by_side import (
    AWAY,
    BESIDE,
    BITS,
    FROM_HOST,
    LINK,
    LINK_BIT,
    NAMES,
    ROWS,
    TASKS,
    SlowedBy,
    ends_of_streams,
    largest_weights,
    prices_of,
    until,
)
from mistlab.cost.slot_work import (
    BEFORE,
    COMPUTED,
    COPIED,
    FETCHED,
    GATHERED,
    LEAVES,
    LEFT,
    LOWER,
    REDUCED,
    SIMULATED,
    SLOT_WORK,
    UPPER,
    WORK_OF_TASKS,
    keep_all,
    leave_passes,
    of_layers,
    of_pass,
    reduced_inside,
    reduces_each_pass,
    stay_reduced,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import COMPUTE, STREAMS

# Computes the time slots of layers whose data leaves as soon as each has computed.


_STREAM_OF_WORK = np.array([COMPUTE, LINK, LINK, LINK, FROM_HOST, FROM_HOST, AWAY, AWAY])
# Sets of work that is not done, and of further bits: the layer's own reduction has begun; it could
# have, but for the link; the reduction before gives way to the gather, since it has not begun.
_BEGUN_OWN, _READY, _GIVES_WAY = (1 << SLOT_WORK + bit for bit in range(3))
_SETS = np.arange(8 << SLOT_WORK)
_BIT_OF_WORK = (1 << np.arange(SLOT_WORK, dtype=np.uint8))[::-1, None]


def _of_sets() -> tuple[Bools, Bools, Ints]:
    """For each set of a slot's work that is not done yet: which work runs (8, sets), whether the
    slot goes on (for each of four cases), and which streams are busy.

    The cases: the slot closes the pass (no, yes), and for each of both, reductions hold layers up
    (no, yes).
    """
    is_left: Bools = (_SETS & _BIT_OF_WORK) > 0
    computes, reduces, gathers, reduced, copies, fetches, leaves, _ = is_left
    runs, begun, gives_way = is_left.copy(), (_SETS & _BEGUN_OWN) > 0, (_SETS & _GIVES_WAY) > 0
    # No gather interrupts a reduction.
    runs[GATHERED] &= ~((reduces & ~gives_way) | copies | (reduced & begun))
    runs[BEFORE] &= ~(gives_way & gathers)
    runs[REDUCED] &= ~(reduces | computes | runs[GATHERED])
    runs[FETCHED] &= ~copies
    runs[LEFT] &= ~reduces
    runs[LEAVES] &= ~(leaves | computes | reduced)
    waits = computes | gathers | copies | fetches | leaves
    goes_on = np.concatenate([waits, waits | reduces, computes, computes])
    return runs, goes_on, np.bitwise_or.reduce(runs * BITS[_STREAM_OF_WORK][:, None], axis=0)


_RUNNING, _GOING_ON, _BUSY = _of_sets()
_FURTHER = _SETS & -(1 << SLOT_WORK)
_FURTHER[_RUNNING[REDUCED]] |= _BEGUN_OWN
_FURTHER[(_SETS & (1 << SLOT_WORK - 1 - COMPUTED)) == 0] |= _READY


@lru_cache(maxsize=256)
def _factors_of_sets(table: bytes) -> Floats:
    """The slowdown factors of a slot's work, infinite for work that does not run (8, sets of all
    groups), from those of the streams by group and set of busy streams, as bytes.
    """
    factors = np.frombuffer(table).reshape(len(STREAMS), -1, len(BESIDE))
    of_work = factors[_STREAM_OF_WORK][..., _BUSY]
    return np.where(_RUNNING[:, None], of_work, np.inf).reshape(SLOT_WORK, -1)


# Nothing times infinity, for work that is done, is no number, which ``fmin`` leaves out.
@np.errstate(invalid="ignore")
def slot_after(
    work: Floats,
    slowed_by: SlowedBy,
    *,
    closes: Bools | bool = False,
    holds: Bools | bool = True,
    gives_way: Bools | bool = False,
) -> tuple[Floats, Bools]:
    """The seconds of one layer's time slot (C), and whether its own reduction has only just become
    ready; afterwards ``work`` (8, C) has what is left of it.

    A slot ends when its layer has computed, the next layer's data is there, and the layer before is
    reduced and offloaded. The reduction and then the offload of its own layer start as soon as the
    layer has computed. If the slot lasts longer, because it waits for copies, part of that work is
    done before the next slot, which may then be shorter. Weights that are copied from the host are
    gathered afterwards.

    A slot that ``closes`` a pass ends when its layer has computed. Where reductions do not
    ``hold`` layers up, none waits for the reduction of a layer that offloads nothing. The reduction
    of the layer before ``gives_way`` to the gather if both became ready at once.
    """
    factors, elapsed = _factors_of_sets(slowed_by.table.tobytes()), np.zeros(work.shape[1])
    offset = slowed_by.first * (len(_SETS) // len(BESIDE))
    ways = len(_SETS) * (2 * np.asarray(closes, dtype=np.intp) + holds)
    further = np.where(gives_way & (work[COPIED] <= 0), _GIVES_WAY, 0)
    while True:
        is_left = np.bitwise_or.reduce((work > 0) * _BIT_OF_WORK) + further
        goes_on = _GOING_ON.take(ways + is_left)
        if not np.logical_or.reduce(goes_on):
            return elapsed, further & (_BEGUN_OWN | _READY) == 0
        slowed = factors.take(offset + is_left, axis=1)
        ahead = work * slowed
        step = np.fmin.reduce(ahead)
        step[~goes_on] = 0.0
        work -= step / slowed
        np.maximum(work, 0.0, out=work)
        np.putmask(work, ahead <= step, 0.0)
        np.putmask(further, goes_on, _FURTHER.take(is_left))
        elapsed += step


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
    cases = Cases.of((sizes, of_runs), *of_rows)
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
    idle_s, idle_rests, of_idle = _in_slots(passes, np.zeros((3, 1)), begun)
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
    left afterwards of the reductions and offloads of the pass before (3, C), of whose last slot
    ``rest`` (8, C) was left.
    """
    work = rest.copy()
    work[COMPUTED] = 0.0
    work[_OF_NEXT_LAYER] = passes.alone[_OF_NEXT_LAYER].take(passes.slots[0], axis=1)
    opened_s, _ = slot_after(work, passes.slowed, holds=passes.holds)
    return opened_s, _to_next(work, np.zeros(len(opened_s), dtype=bool))


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
    left a column of ``left`` (``_to_next``), the one in ``same`` (C).
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
        work[_OF_OWN_LAYER], work[[BEFORE, LEFT]] = of_own.take(here[at], axis=1), before[:2]
        work[_OF_NEXT_LAYER] = of_next.take(after[at], axis=1)
        slowed, holds = passes.slowed.chosen(going[at]), passes.holds[going[at]]
        slot_s, is_ready = slot_after(
            work, slowed, closes=closing, holds=holds, gives_way=before[2] > 0
        )
        left = _to_next(work, is_ready)
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


def _to_next(work: Floats, is_ready: Bools) -> Floats:
    """What a slot leaves to the next one (3, C), given what is left of its ``work`` (8, C): to
    reduce, to offload, and whether its own reduction ``is_ready`` at its end, which then gives way.
    """
    gives_way = is_ready & (work[BEFORE] <= 0) & (work[REDUCED] > 0)
    return np.stack([work[BEFORE] + work[REDUCED], work[LEAVES], gives_way])


def _leaving_s(work: Floats, slowed: SlowedBy) -> tuple[Floats, Floats]:
    """The seconds after all layers have computed until the gradients of the last two are
    offloaded, and until reductions alone would end; ``work`` is what is left of the last slot.
    """
    reducing_s = work[BEFORE] + work[REDUCED]
    left_s, _ = slot_after(work, slowed)
    work[[BEFORE, LEFT]] = work[[REDUCED, LEAVES]]
    work[[REDUCED, LEAVES]] = 0.0
    return left_s + slot_after(work, slowed)[0], reducing_s


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


# Computes lower bounds of first forward passes with optimizer steps.


def least_first(seconds: TaskSeconds, kinds: Ints) -> Floats:
    """Lower bounds of the seconds of each layer in a first forward pass from the beginning of the
    iteration, in whatever order the streams work (2, K, S): of all work; and of that which comes
    after the step of the first layer and the gather of its weights, with these.

    Each second of a stream's work counts with a weight (of ``least_together``), those by which
    blocks take longest. The last two layers may be offloaded after the pass.
    """
    slowed, (below, here, above) = seconds.slowed_by(), kinds.T
    of_tasks = of_pass(seconds, "first_forward", ROWS)
    least, opens = np.zeros((2, len(kinds), of_tasks.shape[-1])), (below == NOTHING)[:, None]
    for way, names in enumerate((NAMES, _AFTER_FIRST_GATHER)):
        work = np.zeros((len(STREAMS), *of_tasks.shape[1:]))
        for task, of_types in zip(TASKS, of_tasks, strict=True):
            work[STREAMS.index(task.stream)] += of_types * (task.name in names)
        for group in np.unique(slowed.first).tolist():
            rows = np.flatnonzero(slowed.first == group)
            table = slowed.table[:, group : group + (1 << len(STREAMS))]
            weights = largest_weights(table.tobytes())
            # The first type of blocks follows that of the embedding.
            best = weights[np.tensordot(weights, work[:, 1, rows], 1).argmax(axis=0)].T
            of_types = np.einsum("vs,vts->ts", best, work[..., rows])
            away = best[AWAY] * work[AWAY][:, rows]
            least[way][:, rows] = of_types[here] - (above == NOTHING)[:, None] * (
                away[here] + away[below]
            )
            if way:
                begins = of_tasks[ROWS["S"]] + of_tasks[ROWS["U"]]
                gathers = best[LINK] * work[LINK][:, rows]
                least[way][:, rows] += opens * (begins[here][:, rows] - gathers[here])
    return least


# The tasks of which none starts before the weights of the first layer are gathered, but for those
# of this layer.
_AFTER_FIRST_GATHER = {"F", "U", "A>"}


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
