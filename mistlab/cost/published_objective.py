"""The published objective of a pipeline, stage by stage, in any algebra.

Mist (EuroSys 2025) takes a pipeline of G micro-batches to last

    (G - 1) max t + sum t + max_i (d_i - sum of t_j over the stages j in front of i)

where t is what a steady micro-batch takes in a stage, and d what the first and the last one take
beyond, which stages in front hide in part. ``mistlab.cost.chains`` is what this package takes it to
last. This objective stays so that the published search can be run beside.
"""

from dataclasses import dataclass
from typing import Generic, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.algebra import Algebra, Length
from mistlab.cost.chains import PassLengths

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published(Generic[Length]):
    """The terms of the objective for a stage and all stages after it: the slowest stage's time, the
    sum of their times, and the longest extra that is not hidden."""

    slowest: Length
    together: Length
    unhidden: Length

    @classmethod
    def of_nothing(cls, nothing: Length) -> Self:
        """After the last stage there is nothing."""
        return cls(slowest=nothing, together=nothing, unhidden=nothing)

    def whole(self, micro_batches: int) -> Length:
        """The time of a pipeline of these stages."""
        total: Length = self.slowest * (micro_batches - 1) + self.together + self.unhidden
        return total


def steady_s(stage: PassLengths[Table]) -> Table:
    """The time of a steady micro-batch in a stage, or of the host that issues it, and of its sends,
    for which published stages wait."""
    both_s = stage.forward_s + stage.backward_s
    if stage.issued_forward_s is not None and stage.issued_backward_s is not None:
        both_s = np.maximum(both_s, stage.issued_forward_s + stage.issued_backward_s)
    return both_s + stage.point_to_point_s


def extra_s(stage: PassLengths[Length]) -> Length:
    """The time that the first and the last micro-batch take beyond steady ones."""
    total: Length = (
        stage.begin_s
        + (stage.through_forward_s - stage.forward_s)
        + stage.within_forward_s
        + stage.after_first_s
        + stage.within_backward_s
        + stage.end_s
    )
    return total


def in_front(
    algebra: Algebra[Length], own_s: Length, own_extra_s: Length, after: Published[Length]
) -> Published[Length]:
    """A stage with these times in front of others."""
    return Published(
        slowest=algebra.longest("slowest", after.slowest, own_s),
        together=after.together + own_s,
        unhidden=algebra.longest("unhidden", own_extra_s, after.unhidden - own_s),
    )
