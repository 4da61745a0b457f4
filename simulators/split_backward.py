"""The passes of a stage that makes gradients of weights in passes of their own (W).

A backward pass of inputs gathers and swaps in everything that it computes with. Gradients are
swapped and reduced in the pass that makes them.
"""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.schedule.slot_table import Kind, Phase, Task, Template
from mistlab.schedule.stage_passes import StagePass
from simulators.graph import Label
from simulators.pass_pattern import Name, Pattern, StageTasks, pattern_of

# Kinds of tasks that belong to gradients of weights.
_OF_GRADIENTS: frozenset[Kind] = frozenset({"R", "G"})
_BACKWARD: Name = ("B", None)
_OF_WEIGHTS: Name = ("W", None)


def pattern_of_pass(
    one: StagePass, tasks: StageTasks, template: Template, *, splits: bool
) -> Pattern:
    """The pattern of a pass of a stage, whether or not it ``splits`` its backward passes."""
    if not splits or one.kind == "F":
        return pattern_of(tasks, template, one.phase)
    computes_weights = one.kind == "W"
    rows = [
        row
        for row in template.phases[one.phase]
        if row.kind == "B" or (row.kind in _OF_GRADIENTS) == computes_weights
    ]
    of_pass = _with_rows(template, one, tuple(rows))
    if not computes_weights:
        return pattern_of(tasks, of_pass, one.phase)
    seconds = {**tasks.seconds, _BACKWARD: tasks.seconds[_OF_WEIGHTS]}
    pattern = pattern_of(replace(tasks, seconds=seconds), of_pass, one.phase)
    labels: list[Label] = [
        ("W" if kind == "B" else kind, direction, layer)
        for kind, direction, layer in pattern.labels
    ]
    return replace(pattern, labels=labels)


def _with_rows(template: Template, one: StagePass, rows: tuple[Task, ...]) -> Template:
    phases: Mapping[Phase, tuple[Task, ...]] = {**template.phases, one.phase: rows}
    return replace(template, phases=phases)
