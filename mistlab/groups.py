"""Shapes of communicating groups, and which measured one stands for another."""

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Shaped(Protocol):
    """What was measured on one shape of group."""

    @property
    def gpus_in_node(self) -> int:
        """GPUs of the group in each node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""


T = TypeVar("T", bound=Shaped)


def nearest(groups: Iterable[T], *, gpus_in_node: int, nodes: int) -> T:
    """The nearest shape: first in whether it crosses nodes, then in size."""

    def distance(group: T) -> tuple[bool, float]:
        return (
            (group.nodes > 1) != (nodes > 1),
            abs(math.log(group.gpus_in_node / gpus_in_node)) + abs(math.log(group.nodes / nodes)),
        )

    return min(groups, key=distance)
