"""The names of tasks in messages: a short one, and one with the task's layer and micro-batch."""

from mistlab.stages.stage_program import Op


def brief_name(op: Op | None) -> str:
    """A task's label and phase, such as "0B.4m0 (backward)"; empty without a task."""
    return "" if op is None else f"{op.task} ({_phase(op)})"


def full_name(op: Op | None) -> str:
    """A task's label, with its layer, micro-batch and phase spelled out; empty without a task."""
    if op is None:
        return ""
    if isinstance(op.task, str) or op.task.layer is None:
        return f"task {op.task} ({_phase(op)} phase)"
    _, batch = op.task.of_pass
    return f"task {op.task} (layer {op.task.layer}, micro-batch {batch}, {_phase(op)} phase)"


def _phase(op: Op) -> str:
    return op.phase.replace("_", " ")
