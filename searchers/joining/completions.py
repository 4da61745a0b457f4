"""The least time of any pipeline that a partial pipeline can become, from the menus of its places.

For a group whose stages have equally many GPUs: then the number of stages that are left, and of
blocks, say which places they can have.

Axes: S stages, the last first; L numbers of blocks; K partial pipelines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from searchers.joining.candidate_table import Options
from searchers.joining.candidates import StagePosition
from searchers.joining.partials import Partials

Values = NDArray[np.float64]


class _Menus(Protocol):
    def __getitem__(self, place: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What all stages from one on to the first take at least, for each number of blocks (S + 1, L).

    ``through_s`` is the time in which a micro-batch passes all of them, there and back.
    ``slowest_s`` is the time of the slowest of them for each micro-batch, ``own_s`` the least
    passage of one.
    """

    micro_batches: int
    layers: int
    through_s: Values
    slowest_s: Values
    own_s: Values

    @classmethod
    def of(
        cls,
        menus: _Menus,
        stages: Sequence[Sequence[StagePosition]],
        micro_batches: int,
        layers: int,
    ) -> Self:
        """The completions of partial pipelines of menus; ``stages`` has the places of each."""
        shape = len(stages) + 1, layers + 1
        through, slowest, own = (np.full(shape, np.inf) for _ in range(3))
        through[-1, 0] = slowest[-1, 0] = 0.0
        each_s = partial(_each_s, micro_batches=micro_batches, num_stages=len(stages))
        for after in reversed(range(len(stages))):
            passes = _least_by_layers(menus, stages[after], _passage_s)
            steady = _least_by_layers(menus, stages[after], each_s)
            own[after] = min([*own[after + 1, :1], *passes.values()])
            for count, least_s in passes.items():
                rest = slice(0, layers + 1 - count)
                here = through[after, count:]
                np.minimum(here, through[after + 1, rest] + least_s, out=here)
            for count, least_s in steady.items():
                rest = slice(0, layers + 1 - count)
                here = slowest[after, count:]
                np.minimum(here, np.maximum(slowest[after + 1, rest], least_s), out=here)
        return cls(
            micro_batches=micro_batches,
            layers=layers,
            through_s=through,
            slowest_s=slowest,
            own_s=own[:, 0],
        )

    def least_s(self, partials: Partials, stages: int) -> Values:
        """The least seconds of any completion (K) of partial pipelines of so many stages."""
        chains, left = partials.chains, self.layers - partials.layers
        count, most = self.micro_batches, len(self.own_s) - 1
        through_s = self.through_s[stages, left]
        can_end = np.isfinite(through_s)
        # Infinity times zero would be no number.
        slowest_s = np.where(can_end, self.slowest_s[stages, left], 0.0)
        ahead = min(count, most) - 1
        # The slowest stage waits for the first or for the last micro-batch, whichever is longer.
        around = np.minimum(chains.around_first, chains.around_last)
        ways = [
            chains.through + through_s,
            chains.whole,
            count * slowest_s + np.maximum(around - ahead / 2 * slowest_s, 0.0),
        ]
        if stages < most and count > ahead + 1:
            # Or for both.
            both = chains.around_first + chains.around_last + self.own_s[stages]
            # A backward that waited takes less than its whole time: at least a forward is left.
            ways.append((count - ahead - 2) * slowest_s + both)
        return np.asarray(np.where(can_end, np.maximum.reduce(ways), np.inf))


def _each_s(options: Options, *, micro_batches: int, num_stages: int) -> Values:
    """The steady time, or a little less: the first forward and the last backward may be shorter
    than steady passes, because nothing is fetched before the one and left over after the other.

    Where a stage waits for a micro-batch, all micro-batches but that one and half of those that it
    runs ahead count, so this difference is shared out to so many.
    """
    ahead = min(micro_batches, num_stages) - 1
    shorter_s = np.maximum(options.stable_s - _passage_s(options), 0.0)
    return np.asarray(options.stable_s - shorter_s / (micro_batches - ahead / 2))


def _passage_s(options: Options) -> Values:
    times = options.times
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    return np.asarray(first + last)


def _least_by_layers(
    menus: _Menus, places: Sequence[StagePosition], seconds: Callable[[Options], Values]
) -> Mapping[int, float]:
    """The least seconds of stages with each number of blocks."""
    found: dict[int, float] = {}
    for place in places:
        least_s = float(seconds(menus[place]).min(initial=np.inf))
        found[place.layers] = min(least_s, found.get(place.layers, np.inf))
    return found
