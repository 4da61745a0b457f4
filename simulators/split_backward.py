"""The passes of a stage that makes gradients of weights in passes of their own (W)."""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.schedule.slot_table import Phase, Task, Template
from mistlab.schedule.split_passes import rows_of_pass
from mistlab.schedule.stage_passes import StagePass
from simulators.graph import Label
from simulators.pass_pattern import Name, Pattern, StageTasks, pattern_of

_BACKWARD: Name = ("B", None)
_OF_WEIGHTS: Name = ("W", None)


def pattern_of_pass(
    one: StagePass, tasks: StageTasks, template: Template, *, splits: bool
) -> Pattern:
    """The pattern of a pass of a stage, whether or not it ``splits`` its backward passes."""
    if not splits or one.kind == "F":
        return pattern_of(tasks, template, one.phase)
    rows = rows_of_pass(template.phases[one.phase], one, splits=splits)
    of_pass = _with_rows(template, one, rows)
    if one.kind == "B":
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
