"""The mesh of a stage: axes along which its GPUs divide the work, and groups of GPUs.

Ranks count along the axes in the table's order, the first axis fastest; then come the ranks of the
next stage. A group is a set of axes: ranks that differ only along these axes work together. An axis
is added by the row of its dimension, which names it, by its place among the axes, and by its name
in the groups that contain it.

The same ranks count along other axes where blocks have experts: those of ``EXPERT_AXES``, which cut
across the first ones. Ranks that divide states count along ``STATE_AXES``, which cut data-parallel
ranks into replicas of the states. The axis without a dimension has as many ranks as are left.

The argument ``value`` of a function gives the degree of a dimension: ``stage.value`` for a stage of
a plan, ``batch.value`` for columns of candidates.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from mistlab.values.dimensions import DIMENSIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

Degree = TypeVar("Degree", int, "NDArray[Any]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """An axis: the dimension that is its degree, and its name for people.

    An axis without a dimension has all ranks that the other axes of its table leave.
    """

    dimension: str
    words: str


_DIMENSIONS_OF = {axis: name for name, row in DIMENSIONS.items() for axis in row.axes}


def _axes(*names: str) -> dict[str, Axis]:
    """Axes by name, each with the dimension whose row names it."""
    return {
        name: Axis(dimension=_DIMENSIONS_OF.get(name, ""), words=name.removeprefix("state "))
        for name in names
    }


AXES = _axes("tensor", "context", "data")
EXPERT_AXES = _axes("expert tensor", "expert", "expert data", "expert replica")
STATE_AXES = _axes("state tensor", "state context", "shard", "replica")

# By name, the axes of a group: of ranks that sum parts of activations; of ranks that exchange keys
# and values; of ranks that divide states under ZeRO, and gather weights; of ranks that have the
# same shard, whose gradients they add up; of ranks that reduce gradients. Then the same of experts:
# of ranks that have parts of the same experts; that have different experts, to which tokens go;
# that divide the experts' states; that reduce the experts' gradients.
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "gather": ("state context", "shard"),
    "state replicas": ("replica",),
    "reduce": ("context", "data"),
    "expert tensor": ("expert tensor",),
    "experts": ("expert",),
    "gather experts": ("expert data",),
    "reduce experts": ("expert data", "expert replica"),
}


def axes_of(group: str) -> dict[str, Axis]:
    """The table of axes that a group belongs to."""
    first, *_ = GROUPS[group]
    return next(axes for axes in (AXES, EXPERT_AXES, STATE_AXES) if first in axes)


def degrees(axes: Mapping[str, Axis], value: Callable[[str], Degree]) -> dict[str, Degree]:
    """The number of ranks along each axis of a table."""
    found: dict[str, Any] = {
        name: value(axis.dimension) for name, axis in axes.items() if axis.dimension
    }
    for name, axis in axes.items():
        if not axis.dimension:
            # A mesh that does not divide has no such groups, and is marked as infeasible.
            left: Any = num_gpus(value) // prod(found.values())
            found[name] = left + (left < 1)
    return {name: found[name] for name in axes}


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
    of_axes: Mapping[str, Any] = degrees(axes_of(group), value)
    ranks: Degree = prod(of_axes[axis] for axis in GROUPS[group])
    return ranks


def groups_of(group: str, value: Callable[[str], int]) -> Iterator[list[int]]:
    """The ranks of each group of this name, counted from the stage's first rank."""
    axes = axes_of(group)
    of_axes = degrees(axes, value)
    steps = dict(zip(axes, _steps(axes, value), strict=True))

    def ranks(names: list[str]) -> list[int]:
        ways = ([place * steps[name] for place in range(of_axes[name])] for name in reversed(names))
        return [sum(way) for way in product(*ways)]

    inside = ranks([axis for axis in axes if axis in GROUPS[group]])
    for first in ranks([axis for axis in axes if axis not in GROUPS[group]]):
        yield [first + rank for rank in inside]


def position_of(rank: int, value: Callable[[str], int]) -> dict[str, int]:
    """The position of a stage's rank along each axis."""
    found = {}
    for name, axis in AXES.items():
        rank, found[name] = divmod(rank, value(axis.dimension))
    return found


def rank_of(position: dict[str, int], value: Callable[[str], int]) -> int:
    """The rank at a position, counted from the stage's first."""
    steps = zip(AXES, _steps(AXES, value), strict=True)
    return sum(position.get(name, 0) * step for name, step in steps)


def _steps(axes: Mapping[str, Axis], value: Callable[[str], int]) -> list[int]:
    """The distance in ranks between neighbours along each axis."""
    steps = [1]
    for degree in degrees(axes, value).values():
        steps.append(steps[-1] * degree)
    return steps[:-1]
