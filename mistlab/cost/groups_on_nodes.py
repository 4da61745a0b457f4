"""How groups of ranks lie on nodes: how many ranks share a node, and on how many nodes they are.

Axes: C candidates for stages, S strategies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.symbolic.distinct import Known
from mistlab.values.dimensions import names_of
from mistlab.values.mesh import GROUPS, axes_of, degrees, num_gpus, ranks_of

Whole = NDArray[np.int64]
# A mask of the strategies (S) whose groups have a shape, with its ranks in a node and its nodes.
OfShape = tuple[NDArray[np.bool_], int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """The shape of each strategy's groups (S each), by name: ranks in a node, and nodes; and the
    ranks of each group.

    Neighbouring stages are taken to be as large as the stage itself.
    """

    groups: Mapping[str, tuple[Whole, Whole]]
    ranks: Mapping[str, Whole]
    crosses_to_next: NDArray[np.bool_]
    crosses_from_previous: NDArray[np.bool_]
    senders_of_node: Whole
    _several: dict[str, Sequence[OfShape]] = field(default_factory=dict, init=False, repr=False)

    def of_several(self, group: str) -> Sequence[OfShape]:
        """The strategies of each shape of a group, where it has several ranks."""
        if group not in self._several:
            several = (one for one in self.by_shape(group) if one[1] * one[2] > 1)
            self._several[group] = tuple(several)
        return self._several[group]

    def by_shape(self, group: str) -> Iterator[OfShape]:
        """The strategies of each shape of a group."""
        in_node, nodes = self.groups[group]
        for gpus, spanned in sorted({*zip(in_node.tolist(), nodes.tolist(), strict=True)}):
            yield (in_node == gpus) & (nodes == spanned), gpus, spanned

    def chosen(self, rows: NDArray[np.intp]) -> Self:
        """The shapes of the strategies in these rows."""
        groups = self.groups.items()
        return type(self)(
            groups={name: (in_node[rows], nodes[rows]) for name, (in_node, nodes) in groups},
            ranks={name: ranks[rows] for name, ranks in self.ranks.items()},
            crosses_to_next=self.crosses_to_next[rows],
            crosses_from_previous=self.crosses_from_previous[rows],
            senders_of_node=self.senders_of_node[rows],
        )


def shape_on_nodes(
    group: str, value: Callable[[str], NDArray[Any]], first_rank: Whole, gpus_per_node: int
) -> tuple[Whole, Whole]:
    """The most ranks of a group in a node, and the number of its nodes.

    The stage begins at ``first_rank``, and ranks fill nodes in order.
    """
    reach, apart = np.zeros_like(first_rank), np.ones_like(first_rank)
    step = np.ones_like(first_rank)
    for name, ranks in degrees(axes_of(group), value).items():
        degree = ranks.astype(np.int64)
        if name in GROUPS[group]:
            # Ranks that are at least a node apart are all in different nodes.
            is_inside = step < gpus_per_node
            reach = reach + np.where(is_inside, (degree - 1) * step, 0)
            apart = apart * np.where(is_inside, 1, degree)
        step = step * degree
    inside = (first_rank + reach) // gpus_per_node - first_rank // gpus_per_node + 1
    nodes = inside * apart
    return -(-ranks_of(group, value).astype(np.int64) // nodes), nodes


def shapes_of(
    known: Known[Shapes], columns: Mapping[str, NDArray[Any]], cluster: Cluster
) -> Shapes:
    """The shapes of each strategy's groups; ``known`` are those of meshes met before."""
    names = (*names_of("mesh"), "first_rank")
    shapes, rows = known(
        [columns[name] for name in names],
        lambda distinct: _shapes(dict(zip(names, distinct, strict=True)), cluster),
    )
    return shapes.chosen(rows)


def _shapes(columns: Mapping[str, NDArray[Any]], cluster: Cluster) -> Shapes:
    """The shapes of the groups, and the sends that cross nodes."""
    gpus = cluster.gpus_per_node
    value = columns.__getitem__
    first, ranks = columns["first_rank"].astype(np.int64), num_gpus(value).astype(np.int64)

    def crosses(before: Whole) -> NDArray[np.bool_]:
        """Whether a rank from ``before`` on and its peer in the next stage are in two nodes."""
        apart = (before + 2 * ranks - 1) // gpus != before // gpus
        return np.asarray((cluster.nodes > 1) & ((ranks >= gpus) | apart))

    return Shapes(
        groups={group: shape_on_nodes(group, value, first, gpus) for group in GROUPS},
        ranks={group: ranks_of(group, value).astype(np.int64) for group in GROUPS},
        crosses_to_next=crosses(first),
        crosses_from_previous=crosses(first - ranks),
        senders_of_node=np.minimum(ranks, gpus),
    )
