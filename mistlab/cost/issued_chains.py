"""Chains of passes that begin with a stage's host, in any algebra.

A host issues the passes of its stage one after another, from the beginning of the iteration on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.algebra import Length

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedChains(Generic[Length]):
    """Each chain is alone, or missing where no host issues passes.

    They end when the ``first`` backward's turn has come, with the ``last`` forward, with ``every``
    pass, and with the stage's own extras after them (``ended``).
    """

    first: Sequence[Length] = ()
    last: Sequence[Length] = ()
    every: Sequence[Length] = ()
    ended: Sequence[Length] = ()

    @classmethod
    def of(
        cls, issued: Sequence[Length | None], in_flight: int | Whole, alternating: int | Whole
    ) -> Self:
        """The chains of a stage that runs ``in_flight`` forwards ahead, and ``alternating`` ones
        after its first backward; ``issued`` are its times of ``ISSUED``."""
        known = [length for length in issued if length is not None]
        if not known:
            return cls()
        forward, backward, forward_late, backward_late, end = known
        first = forward * in_flight
        last = first + (forward + backward) * alternating
        every = last + backward * in_flight
        return cls(
            first=[first],
            last=[last + forward_late],
            every=[every + backward_late],
            ended=[every + end],
        )
