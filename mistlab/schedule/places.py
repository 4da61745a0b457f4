"""Finds the layer of each task in a slot, and the entry of a ring of buffers that it takes.

A pass meets the layers of a stage one after another, at positions 0, 1, 2 and so on: a forward pass
from the first layer up, a backward pass from the last layer down. In each slot one layer computes.
The slot's other tasks are for the same layer, or for the layers that compute ``depth`` slots later
(ahead) or earlier (behind). In the first and the last ``depth`` slots of a pass nothing computes.
Layers that pass through a ring take its ``depth + 1`` entries in turn.
"""

from collections.abc import Iterator, Mapping, Sequence

from mistlab.schedule.slot_table import Phase, Place, Task

_AWAY: Mapping[Place, int] = {"ahead": 1, "here": 0, "behind": -1}


def goes_up(phase: Phase) -> bool:
    """Whether a pass begins at the first layer of a stage."""
    return "backward" not in phase


def layer_at(position: int, num_layers: int, phase: Phase) -> int:
    """The layer, counted within its stage, that a pass meets at a position."""
    return position if goes_up(phase) else num_layers - 1 - position


def layers_above(place: Place, phase: Phase, depth: int) -> int:
    """The distance, in layers, from the layer that computes in a slot up to a task's layer."""
    return _AWAY[place] * (depth if goes_up(phase) else -depth)


def slots_of(num_layers: int, depth: int) -> range:
    """The slots of a pass, named by the position of the layer that computes there."""
    return range(-depth, num_layers + depth)


def tasks_of_slot(
    rows: Sequence[Task], slot: int, num_layers: int, depth: int
) -> Iterator[tuple[Task, int]]:
    """The rows that have a layer in a slot of a pass, each with the position of its layer."""
    for row in rows:
        position = slot + _AWAY[row.place] * depth
        if 0 <= position < num_layers:
            yield row, position


def ring_entries(depth: int) -> int:
    """The number of layers in a ring of buffers: the one that computes, and ``depth`` ahead."""
    return depth + 1


def entry_of(layers_before: int, position: int, depth: int) -> int:
    """The entry of the rings that a layer takes; ``layers_before`` counts the layers that the
    passes before have passed."""
    return (layers_before + position) % ring_entries(depth)
