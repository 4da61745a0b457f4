"""Computes the times of stages that offload weights: of layers whose weights are copied from the
host and then gathered, and of a first forward pass whose micro-batch comes late.
"""

from itertools import pairwise

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Distinct
from mistlab.cost.side_by_side import (
    AHEAD,
    LINK,
    LINK_BIT,
    MEASURED,
    ONE_MORE,
    STEPPED_AHEAD,
    Lanes,
    SlowedBy,
    ends_of_several,
    lanes_of,
    played,
    sets_of,
)
from mistlab.cost.slot_work import NOTHING, gathers_each_pass, of_first_pass, steps_in_turn
from mistlab.cost.tasks import TaskSeconds
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


# Computes the first forward pass of a micro-batch that comes late.
# When the micro-batch arrives, two blocks have run their optimizer steps and the states of a third
# block have been fetched; the buffers have no room for more. The other blocks run their steps while
# the micro-batch passes through. Of a long row of equal layers only some are simulated: the others
# take as long as the mean of these.


# The most layers that are simulated in a row of equal layers, and in a whole stage. In a longer
# row, the mean time of ``MEASURED`` layers stands for each layer that is left out; the last ones
# are not measured, since they may have run their optimizer steps before the others.
_OF_RUN, _OF_STAGE = 10, 60
# Cases are simulated so many at a time, which keeps intermediate results in the CPU's cache.
_AT_ONCE = 8192


def late_first_s(seconds: TaskSeconds, strategies: Distinct, stages: Distinct) -> Floats:
    """The seconds from the arrival of a first micro-batch that comes late until the stage has
    computed its forward pass, for each candidate (C) that offloads weights and waits for its
    micro-batch.

    Zero for other candidates, and for stages with very many different layers.
    """
    types, strategy, stage = seconds.model.types, strategies.index, stages.index
    columns = dict(zip(types.columns, stages.columns, strict=True))
    sizes, of_runs = types.runs(columns)
    simulated = np.minimum(sizes, _OF_RUN).astype(np.int64)
    layers = simulated.sum(axis=0)
    # The first stage is not simulated, since all of its micro-batches are there from the beginning.
    is_simulated = (layers > 0) & (layers <= _OF_STAGE) & (columns["has_embedding"] == 0)
    offloads: Bools = np.logical_or.reduce(seconds.alone("P", ">") > 0)
    rows = np.flatnonzero(offloads[strategy] & is_simulated[stage])
    passed_s = np.zeros(len(strategy))
    if not len(rows) or not steps_in_turn(seconds):
        return passed_s
    code, case = np.unique(strategy[rows] * sizes.shape[1] + stage[rows], return_inverse=True)
    of_case = np.divmod(code, sizes.shape[1])
    last = simulated.cumsum(axis=0) - 1
    kinds = _kinds(last + 1, of_runs)
    of_tasks = of_first_pass(seconds)
    late_s = np.empty(len(code))
    keeps = ~np.logical_or.reduce(seconds.alone("A", ">") > 0)[of_case[0]]
    # Cases are simulated together if their stages have equally many layers, since these take about
    # equally many steps of the simulation.
    in_order = np.lexsort((layers[of_case[1]], keeps))
    few = int(np.count_nonzero(~keeps))
    begins = [*range(0, few, _AT_ONCE), *range(few, len(code), _AT_ONCE)]
    for begin, end in pairwise([*begins, len(code)]):
        chosen = in_order[begin:end]
        of_strategy, of_stage = (one[chosen] for one in of_case)
        most = int(layers[of_stage].max())
        work = of_tasks[:, kinds[:most, of_stage], of_strategy]
        slowed = seconds.slowed_by().chosen(of_strategy)
        # Where activations stay on the GPU, the task that offloads them (A>) is left out.
        without = "A>" if begin >= few else ""
        lanes = lanes_of(most, most, without=without)
        ends_s = _late_ends_s(seconds, work, slowed, lanes, of_strategy, layers[of_stage] - 1)
        column = np.arange(len(chosen))
        late_s[chosen] = ends_s[layers[of_stage] - 1, column]
        more = (sizes - simulated)[:, of_stage]
        for run in np.flatnonzero(more.any(axis=1)).tolist():
            of_run = last[run, of_stage] - AHEAD
            measured_s = ends_s[of_run, column] - ends_s[of_run - MEASURED, column]
            late_s[chosen] += np.where(more[run], more[run] * measured_s / MEASURED, 0.0)
    passed_s[rows] = late_s[case]
    return passed_s


def _late_ends_s(
    seconds: TaskSeconds,
    work: Floats,
    slowed: SlowedBy,
    lanes: Lanes,
    strategy: Rows,
    last: Ints,
) -> Floats:
    """The seconds at which each layer has computed (layers L, cases C), up to layer ``last`` of
    each case, if each task alone takes the seconds in ``work`` (names, L, C).
    """
    at = np.repeat(lanes.late[:, None], len(strategy), axis=1)
    # Sharded weights of the second layer are gathered when the first one computes.
    is_sharded = gathers_each_pass(seconds)[strategy] & (work.shape[1] > 1)
    at[LINK] -= is_sharded
    ended = STEPPED_AHEAD - ONE_MORE["U"] * is_sharded
    _, ends_s = played(work, slowed, lanes, at, ended, last)
    return ends_s


def _kinds(ends: Ints, types: Ints) -> Ints:
    """The type of each layer (layers L, stages J) of stages whose rows of equal layers (R a stage)
    end at ``ends`` (R, J) and are of these ``types`` (R, J or R, 1); ``NOTHING`` after a stage's
    last layer.
    """
    position = np.arange(int(ends[-1].max()))[:, None, None]
    run = (position >= ends).sum(axis=1)
    types = np.concatenate([np.broadcast_to(types, ends.shape), np.full_like(ends[:1], NOTHING)])
    return np.take_along_axis(types, run, axis=0)
