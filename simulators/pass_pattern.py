"""One pass of a micro-batch through a stage, as columns of tasks with what they wait for.

The schedule says which tasks there are and what they wait for (``mistlab.schedule.pass_waits``).
How long each takes comes from the stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.pass_columns import Offsets
from mistlab.schedule.pass_waits import PassWaits, pass_waits
from mistlab.schedule.places import layer_at
from mistlab.schedule.slot_table import Direction, Kind, Phase, Task, Template
from simulators.graph import Label
from simulators.network import Use

# A kind of task and its direction: F, P<, A>.
Name = tuple[Kind, Direction | None]

# Tasks that are in the graph even if they take no time.
_ALWAYS = ("F", "B", "S")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTasks:
    """How long one stage's tasks take: ``seconds`` of each of its layers in order, by task.

    The first layer has the number ``first_layer``. Forward and backward include the tensor-parallel
    collectives that the layer waits for. ``send_s`` is the time to send a micro-batch to the next
    stage, or its gradients back. ``networks`` are the links of sends after forward (F) and backward
    passes (B). ``tied_s`` is the time to reduce the gradient of a table that the embedding and the
    head share. ``issues`` has the host's seconds to issue passes of each layer, by kind.
    """

    stage: int
    first_layer: int
    zero: int
    seconds: Mapping[Name, Sequence[float]]
    send_s: float
    networks: Mapping[Kind, tuple[Use, ...]] = field(default_factory=dict)
    tied_s: float = 0.0
    issues: Mapping[Kind, Sequence[float]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers, the embedding and the head among them."""
        return len(self.seconds["F", None])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """The tasks of a pass, numbered from zero, as columns of a graph.

    ``derived`` has the pass as the schedule derives it, and its links with other passes.
    """

    labels: Sequence[Label]
    streams: Sequence[int]
    seconds: Sequence[float]
    waits: Sequence[int]
    after_end: Sequence[Offsets]
    after_start: Sequence[Offsets]
    derived: PassWaits


def pattern_of(tasks: StageTasks, template: Template, phase: Phase) -> Pattern:
    """The pattern of a forward or backward pass in its phase."""
    rows = [row for row in template.phases[phase] if tasks.zero >= row.from_zero]
    layers = [layer_at(at, tasks.num_layers, phase) for at in range(tasks.num_layers)]
    derived = pass_waits(template, phase, tasks.zero, _names(tasks, rows, layers))
    columns = derived.columns
    of_row = {
        row: (row.kind, row.direction, STREAMS.index(row.stream), tasks.seconds[_name(row)])
        for row in rows
    }
    labels, streams, seconds = [], [], []
    for row, position in zip(columns.rows, columns.positions, strict=True):
        kind, direction, stream, seconds_of = of_row[row]
        layer = layers[position]
        labels.append((kind, direction, tasks.first_layer + layer))
        streams.append(stream)
        seconds.append(seconds_of[layer])
    return Pattern(
        labels=labels,
        streams=streams,
        seconds=seconds,
        waits=columns.waits,
        after_end=columns.after_end,
        after_start=columns.after_start,
        derived=derived,
    )


def _names(tasks: StageTasks, rows: Sequence[Task], layers: Sequence[int]) -> list[frozenset[str]]:
    """The names of each layer's tasks: the tasks that take time, and a few others."""
    seconds = [(row.name, row.name in _ALWAYS, tasks.seconds[_name(row)]) for row in rows]
    return [
        frozenset(name for name, is_there, of_layer in seconds if is_there or of_layer[layer] > 0)
        for layer in layers
    ]


def _name(row: Task) -> Name:
    return row.kind, row.direction
