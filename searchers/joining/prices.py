"""Prices of blocks and GPUs that make the bounds of ``searchers.joining.relaxed`` high.

Axes: M columns, S positions from the end; E ends: the last stage, any between, and the first one.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Whole = NDArray[np.intp]

# Pipelines that lack blocks or GPUs, or have too many, cost so many times the limit in the linear
# programme. So it has a solution.
FAR = 50.0
# The numbers of ends.
LAST, BETWEEN, FIRST = range(3)
ENDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The least times (E, M) of stages with some blocks on some GPUs, for any of G micro-batches.

    The first stage has the embedding and receives nothing, the last one has the head and sends
    nothing, so they may take more or less than the others. ``sent_s`` (M) is the time of sends to
    the next stage and back.
    """

    micro_batches: int
    all_layers: int
    all_gpus: int
    layers: Whole
    gpus: Whole
    passed_s: Values
    sent_s: Values
    forward_s: Values
    backward_s: Values
    # Whether only the passage counts, and no stage waits.
    is_passage: bool = False

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def passing(self) -> Self:
        """The columns' passages alone."""
        return replace(self, is_passage=True)

    @property
    def share_of_layers(self) -> Values:
        """The share (M) of all blocks that each column has."""
        return np.asarray(self.layers / self.all_layers)

    @property
    def share_of_gpus(self) -> Values:
        """The share (M) of all GPUs that each column has."""
        return np.asarray(self.gpus / self.all_gpus)

    def merged(self) -> Self:
        """One column for each number of blocks and GPUs, with the least of each time."""
        shapes, which = np.unique(np.stack([self.layers, self.gpus]), axis=1, return_inverse=True)
        least: dict[str, Any] = {}
        for name in ("passed_s", "sent_s", "forward_s", "backward_s"):
            own = getattr(self, name)
            column = np.full((*own.shape[:-1], shapes.shape[1]), np.inf)
            np.minimum.at(column.T, which.reshape(-1), own.T)
            least[name] = column
        return replace(self, layers=shapes[0], gpus=shapes[1], **least)

    def passages_s(self, stages: int) -> Values:
        """The passage (S, M) of each column at each position: the last stage sends nothing on."""
        passed_s = self.passed_s[_ends(stages)]
        passed_s[1:] += self.sent_s
        return passed_s

    def waits_s(self, stages: int) -> Values:
        """What a pipeline takes beyond the passage (S, M), if it waits at one stage."""
        count = 1 if self.is_passage else self.micro_batches
        ahead = np.minimum(count, np.arange(1, stages + 1)) - 1
        forward_s, backward_s = (own[_ends(stages)] for own in (self.forward_s, self.backward_s))
        return np.asarray((count - 1) * (forward_s + backward_s) - ahead[:, None] * forward_s)


def _ends(stages: int) -> list[int]:
    """The end (S) that each position is, of two stages or more."""
    return [LAST, *[BETWEEN] * (stages - 2), FIRST]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Weights of positions (S), and of the shares of blocks and of GPUs, which add up to one at
    most; and what all blocks and all GPUs are worth."""

    positions: Values
    of_layers: float
    of_gpus: float
    layers_s: float
    gpus_s: float

    @classmethod
    def made(cls, weights: Values, layers_s: float, gpus_s: float) -> Self:
        """Prices with weights (S + 2) in these proportions."""
        weights = np.maximum(weights, 0.0)
        weights = weights / max(weights.sum(), 1e-300)
        return cls(
            positions=weights[:-2],
            of_layers=float(weights[-2]),
            of_gpus=float(weights[-1]),
            layers_s=layers_s,
            gpus_s=gpus_s,
        )

    def for_stages(self, stages: int) -> Self:
        """The same for another number of stages."""
        at = np.linspace(0, len(self.positions) - 1, stages)
        positions = np.interp(at, np.arange(len(self.positions)), self.positions)
        weights = np.array([*positions, self.of_layers, self.of_gpus])
        return type(self).made(weights, self.layers_s, self.gpus_s)

    def raised(self, factor: float) -> Self:
        """The same with weights that are larger by a factor."""
        return replace(
            self,
            positions=factor * self.positions,
            of_layers=factor * self.of_layers,
            of_gpus=factor * self.of_gpus,
        )

    def weight_of(self, after: int, layers: Values, gpus: Values) -> Values:
        """What the weights of stages in front of some add up to, by their shares (K)."""
        positions = self.positions[after:].sum()
        return np.asarray(positions + self.of_layers * layers + self.of_gpus * gpus)

    def cost_s(self, columns: Columns) -> Values:
        """The cost (S, M) of each column at each position."""
        stages = len(self.positions)
        weights = self.positions[:, None] + (
            self.of_layers * columns.share_of_layers + self.of_gpus * columns.share_of_gpus
        )
        return columns.passages_s(stages) + weights * columns.waits_s(stages)

    def beyond_s(self, columns: Columns) -> Values:
        """What each column costs beyond its worth (S, M)."""
        worth_s = self.layers_s * columns.share_of_layers + self.gpus_s * columns.share_of_gpus
        return self.cost_s(columns) - worth_s

    def bound_s(self, columns: Columns) -> float:
        """Seconds that no pipeline of these columns takes less than."""
        least_s = self.beyond_s(columns).min(axis=1).sum()
        return float(least_s + self.layers_s + self.gpus_s)


def dearest(
    columns: Columns, stages: int, near: Prices | None, enough_s: float
) -> tuple[Prices, float]:
    """Prices that make the bound of pipelines of so many stages high, and the bound. If prices near
    them, of another number of stages, make it high enough, these will do."""
    if near is not None:
        prices = near.for_stages(stages)
        bound_s = prices.bound_s(columns)
        if bound_s >= enough_s:
            return prices, bound_s
    prices = _solved(columns.merged(), stages, FAR * enough_s)
    return prices, prices.bound_s(columns)


def _solved(columns: Columns, stages: int, far_s: float) -> Prices:
    """The prices by the linear programme, whose variables are shares of columns at positions,
    blocks and GPUs too few and too many, and the largest wait."""
    from scipy import sparse  # noqa: PLC0415 (slow to import)
    from scipy.optimize import linprog  # noqa: PLC0415

    waits_s, shares = columns.waits_s(stages), [columns.share_of_layers, columns.share_of_gpus]
    longest = np.ones((stages + 2, 1))
    waits = sparse.vstack(
        [
            sparse.block_diag([row[None] for row in waits_s]),
            *((share * waits_s).reshape(1, -1) for share in shares),
        ]
    )
    most = sparse.hstack([waits, np.zeros((stages + 2, 4)), -longest])
    each = sparse.hstack(
        [sparse.block_diag([np.ones((1, len(columns)))] * stages), np.zeros((stages, 5))]
    )
    totals = [np.tile(share, stages)[None] for share in shares]
    off = np.array([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])
    equal = sparse.vstack(
        [
            each,
            np.column_stack([np.concatenate(totals), np.array(off), np.zeros((2, 1))]),
        ]
    )
    cost = np.concatenate([columns.passages_s(stages).reshape(-1), np.full(4, far_s), [1.0]])
    found = linprog(
        cost,
        A_ub=most.tocsr(),
        b_ub=np.zeros(stages + 2),
        A_eq=equal.tocsr(),
        b_eq=np.ones(stages + 2),
        method="highs",
    )
    layers_s, gpus_s = found.eqlin.marginals[-2:].tolist()
    return Prices.made(-found.ineqlin.marginals, layers_s, gpus_s)
