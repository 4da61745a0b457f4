"""What stages cost: columns of candidates to columns of times, by summing the slots of a schedule.

A slot's length depends on a candidate's strategy (degrees, ZeRO level, offload ratios) and on the
types of the layers in it, not on how many layers there are; how often each kind of slot occurs
depends on the layers alone. So slots are worked out once for each distinct strategy, counted once
for each distinct set of layers, and a candidate's time is the product of the two.

Axes: C candidates, S distinct strategies, J distinct sets of layers, K kinds of slots; the four
streams last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.interference import overlapped
from mistlab.cost.tasks import STRATEGY, TaskModel, TaskSeconds
from mistlab.distinct import Distinct, distinct_rows
from mistlab.interference import STREAMS
from mistlab.schedule import PHASES, Phase, Task
from mistlab.slots import NOTHING, SLOT_KINDS, SlotKind, slot_counts
from mistlab.stages import StageBatch, StageSeconds

Values = NDArray[np.float64]

LAYERS_OF_STAGE = ("layers", "checkpointed_layers", "has_embedding", "has_head")

COMPUTE = STREAMS.index("compute")

# Above this many products of strategies and layers a candidate, rows are summed one by one.
DENSE = 8
ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCostModel:
    """The times of a workload's stages on a cluster under one engine's schedule."""

    tasks: TaskModel

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate."""
        strategies = distinct_rows([getattr(batch, name) for name in STRATEGY])
        stages = distinct_rows([getattr(batch, name) for name in LAYERS_OF_STAGE])
        layers, checkpointed, embedding, head = stages.columns
        counts = slot_counts(
            layers=layers,
            checkpointed=checkpointed,
            embedding=embedding,
            head=head,
            depth=self.tasks.template.depth,
        )
        occurring = np.flatnonzero(counts.any(axis=1))
        kinds = [SLOT_KINDS[k] for k in occurring]
        seconds = self.tasks.seconds(dict(zip(STRATEGY, strategies.columns, strict=True)))

        def summed(lengths: Values) -> Values:
            return _summed(lengths, counts[occurring], strategies, stages)

        whole = {phase: summed(_slots(seconds, phase, kinds)) for phase in PHASES}
        computing = summed(_of_layer(seconds, ("F", "B"), kinds))
        received = np.where(batch.has_embedding, 0.0, seconds.receive_s[strategies.index])
        sent = np.where(batch.has_head, 0.0, seconds.send_s[strategies.index])
        if self.tasks.template.sends_block:
            for phase in PHASES:
                if phase != "step":
                    whole[phase] += received if "forward" in phase else sent
            sent = np.zeros_like(sent)
        return StageSeconds(
            forward_s=whole["forward"],
            backward_s=whole["backward"],
            delta_forward_s=whole["first_forward"] - whole["forward"],
            delta_backward_s=whole["last_backward"] - whole["backward"] + whole["step"],
            point_to_point_s=2 * sent,
            exposed_communication_s=whole["forward"] + whole["backward"] - computing,
            step_s=summed(_of_layer(seconds, ("S",), kinds)),
        )


def _slots(seconds: TaskSeconds, phase: Phase, kinds: Sequence[SlotKind]) -> Values:
    """Seconds (K, S) of a phase's slots."""
    template = seconds.model.template
    alone = np.zeros((len(kinds), len(seconds.zero), len(STREAMS)))
    for task in template.phases[phase]:
        stream = STREAMS.index(task.stream)
        of_type = seconds.alone(task.kind, task.direction or "")
        of_type = np.where(seconds.zero >= task.from_zero, of_type, 0.0)
        for row, kind in enumerate(kinds):
            layer = kind[_place(task, phase, template.depth)]
            if layer != NOTHING:
                alone[row, :, stream] += of_type[layer]
    if phase != "step":
        # The layer that computes waits for its tensor-parallel collectives, copies go on.
        waiting = seconds.tensor_s["forward" if "forward" in phase else "backward"]
        for row, (_, here, _) in enumerate(kinds):
            if here != NOTHING:
                alone[row, :, COMPUTE] += waiting[here]
    if template.depth == 0 or phase == "step":
        return np.asarray(alone.sum(axis=-1))
    lengths = np.empty(alone.shape[:2])
    for rows, factors in seconds.factors():
        part = alone[:, rows]
        flat = overlapped(part.reshape(-1, len(STREAMS)), factors)
        lengths[:, rows] = flat.reshape(part.shape[:2])
    return lengths


def _of_layer(seconds: TaskSeconds, tasks: Sequence[str], kinds: Sequence[SlotKind]) -> Values:
    """Seconds (K, S) of some kinds of tasks of the layer that computes in a slot."""
    lengths = np.zeros((len(kinds), len(seconds.zero)))
    for row, (_, here, _) in enumerate(kinds):
        if here != NOTHING:
            lengths[row] = sum(seconds.alone(task, "")[here] for task in tasks)
    return lengths


def _place(task: Task, phase: Phase, depth: int) -> int:
    """Which of a slot's three layers a task is for: 0 the lower, 1 the one here, 2 the upper."""
    if task.place == "here" or depth == 0:
        return 1
    upwards = "backward" not in phase
    return 2 if (task.place == "ahead") == upwards else 0


def _summed(lengths: Values, counts: Values, strategies: Distinct, stages: Distinct) -> Values:
    """Seconds (C) from lengths of slots (K, S) and their counts (K, J)."""
    rows = len(strategies.index)
    if lengths.shape[1] * counts.shape[1] <= DENSE * rows:
        table = lengths.T @ counts
        return np.asarray(table[strategies.index, stages.index])
    result = np.empty(rows)
    lengths, counts = np.ascontiguousarray(lengths.T), np.ascontiguousarray(counts.T)
    for start in range(0, rows, ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        of_block = lengths[strategies.index[block]] * counts[stages.index[block]]
        result[block] = of_block.sum(axis=1)
    return result
