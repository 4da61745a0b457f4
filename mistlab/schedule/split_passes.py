"""The rows of the slot table that a pass has if its stage makes gradients of weights in passes of
their own (W).

A backward pass of inputs gathers and swaps in everything that it computes with. Gradients are
swapped and reduced, and leave for a step on the host, in the pass that makes them.
"""

from collections.abc import Sequence

from mistlab.schedule.slot_table import Kind, Task
from mistlab.schedule.stage_passes import StagePass

# Kinds of tasks that belong to gradients of weights.
_OF_GRADIENTS: frozenset[Kind] = frozenset({"R", "G", "O"})


def rows_of_pass(rows: Sequence[Task], one: StagePass, *, splits: bool) -> tuple[Task, ...]:
    """The rows of a pass among the ``rows`` of its phase; B stands for what W computes."""
    if not splits or one.kind == "F":
        return tuple(rows)
    makes_gradients = one.kind == "W"
    return tuple(
        row for row in rows if row.kind == "B" or (row.kind in _OF_GRADIENTS) == makes_gradients
    )
