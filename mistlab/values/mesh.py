"""The mesh of a stage: axes along which its GPUs divide the work, and groups of GPUs.

Ranks count along the axes in the table's order, the first axis fastest; then come the ranks of the
next stage. A group is a set of axes: ranks that differ only along these axes work together. An axis
is added by its row, and by its name in the groups that contain it.

The argument ``value`` of a function gives the degree of a dimension: ``stage.value`` for a stage of
a plan, ``batch.value`` for columns of candidates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray

Degree = TypeVar("Degree", int, "NDArray[Any]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """An axis: the dimension that is its degree, and its name for people."""

    dimension: str
    words: str


AXES: dict[str, Axis] = {
    "tensor": Axis(dimension="tensor_parallel", words="tensor"),
    "context": Axis(dimension="context_parallel", words="context"),
    "data": Axis(dimension="data_parallel", words="data"),
}

# By name, the axes of a group: of ranks that sum parts of activations; of ranks that exchange keys
# and values; of ranks that divide states under ZeRO, and gather weights; of ranks that reduce
# gradients.
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "gather": ("context", "data"),
    "reduce": ("context", "data"),
}


def dimensions_of_axes() -> tuple[str, ...]:
    """The dimension of each axis."""
    return tuple([axis.dimension for axis in AXES.values()])


def num_gpus(value: Callable[[str], Degree]) -> Degree:
    """Number of GPUs of a stage: the product of its axes' degrees."""
    # Asked for with every stage of a plan.
    gpus: Any = 1
    for axis in AXES.values():
        gpus = gpus * value(axis.dimension)
    product: Degree = gpus
    return product


def ranks_of(group: str, value: Callable[[str], Degree]) -> Degree:
    """Number of ranks in a group."""
    product: Any = prod(value(AXES[axis].dimension) for axis in GROUPS[group])
    ranks: Degree = product
    return ranks


def groups_of(group: str, value: Callable[[str], int]) -> Iterator[list[int]]:
    """The ranks of each group of this name, counted from the stage's first rank."""
    steps = dict(zip(AXES, _steps(value), strict=True))

    def ranks(axes: list[str]) -> list[int]:
        ways = (
            [place * steps[axis] for place in range(value(AXES[axis].dimension))]
            for axis in reversed(axes)
        )
        return [sum(way) for way in product(*ways)]

    inside = ranks([axis for axis in AXES if axis in GROUPS[group]])
    for first in ranks([axis for axis in AXES if axis not in GROUPS[group]]):
        yield [first + rank for rank in inside]


def position_of(rank: int, value: Callable[[str], int]) -> dict[str, int]:
    """The position of a stage's rank along each axis."""
    found = {}
    for name, axis in AXES.items():
        rank, found[name] = divmod(rank, value(axis.dimension))
    return found


def rank_of(position: dict[str, int], value: Callable[[str], int]) -> int:
    """The rank at a position, counted from the stage's first."""
    steps = zip(AXES, _steps(value), strict=True)
    return sum(position.get(name, 0) * step for name, step in steps)


def _steps(value: Callable[[str], int]) -> list[int]:
    """The distance in ranks between neighbours along each axis."""
    steps = [1]
    for axis in AXES.values():
        steps.append(steps[-1] * value(axis.dimension))
    return steps[:-1]
