"""The memory in use on a stage's GPU during a simulated iteration, and its peak.

States, and buffers for weights and gradients, are allocated all the time. The other buffers of the
optimizer step are allocated and freed together. With ring buffers they exist from the first fetch
of optimizer states until the first micro-batch's forward pass has ended and the last states have
been offloaded; without ring buffers, from the step of the first layer until the step of the last.

While a layer runs, it needs the peak bytes of its layer graph. From its forward until its backward
pass the layer keeps the tensors that it saved, or only its input if it is recomputed. Offloaded
activations free their memory once the next user of their buffer has waited for the copy to the
host, and take memory again when the copy back begins. Activations that were sent to the next stage
stay until their gradient arrives. In stages with several chunks sent activations count once per
micro-batch that has passed all chunks, because engines with chunks free most of them (Megatron's
``deallocate_output_tensor``).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.cost.order_memory import left_bytes, sums_of_layers, whole_types
from mistlab.graph.layer_types import EMBEDDING, sum_name
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import Plan
from mistlab.stages.plan_orders import passes_of_plan
from mistlab.stages.stage_batch import StageBatch, StageFigures, batch_of_parts
from mistlab.stages.stage_shape import StagePart, parts_of_plan
from simulators.graph import Label

if TYPE_CHECKING:
    from simulators.events import Simulation

# A change of memory: its time, its kind of content (weights, activations, ...; an index into
# ``CLASSES``), and its bytes.
Change = tuple[float, int, float]

CLASSES = ("states", "buffers", "step_buffers", "activations", "temporaries")
_STATES, _BUFFERS, _STEP, _ACTIVATIONS, _TEMPORARIES = range(len(CLASSES))

# Kinds of tasks that allocate or free memory.
_HOLDING = frozenset("FBWAOS")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryOverTime:
    """The bytes in use on one GPU of a stage after each change: the times of the changes, and at
    each time the bytes of weights, activations and each other kind of content.

    ``fits`` compares the peak with ``room_bytes``, the GPU's memory less what the allocator holds
    beyond tensors.
    """

    stage: int
    times_s: Floats
    by_class: Floats
    room_bytes: float

    @property
    def total_bytes(self) -> Floats:
        """The total bytes in use at each time."""
        return np.asarray(self.by_class.sum(axis=1))

    @property
    def peak_bytes(self) -> float:
        """The most bytes in use at any time."""
        return float(self.total_bytes.max())

    @property
    def peak(self) -> tuple[float, Mapping[str, float]]:
        """The first time at which the most bytes are in use, and the bytes of weights, activations
        and each other kind of content at that time.
        """
        moment = int(np.argmax(self.total_bytes))
        classes = dict(zip(CLASSES, self.by_class[moment].tolist(), strict=True))
        return float(self.times_s[moment]), classes

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough memory at every time."""
        return self.peak_bytes <= self.room_bytes

    @property
    def overflow(self) -> str:
        """A sentence that says when memory first ran out, and what filled it; empty if it never
        did.
        """
        over = np.flatnonzero(self.total_bytes > self.room_bytes)
        if not len(over):
            return ""
        moment = int(over[0])
        held = ", ".join(
            f"{name.replace('_', ' ')} {size / 2**30:.2f}"
            for name, size in zip(CLASSES, self.by_class[moment], strict=True)
        )
        return (
            f"stage {self.stage} is out of memory at {self.times_s[moment]:.3f} s: "
            f"{self.total_bytes[moment] / 2**30:.2f} of {self.room_bytes / 2**30:.2f} GiB "
            f"(GiB: {held})"
        )


def memory_of(
    simulation: "Simulation", plan: Plan, model: StageModel, room_bytes: Floats
) -> list[MemoryOverTime]:
    """The memory that each stage of a plan uses during a simulated iteration; ``room_bytes`` is the
    memory of each stage's GPUs.
    """
    batch = StageBatch.of_plan(plan)
    figures, sums = model.figures(batch), sums_of_layers(model, batch)
    changes: dict[int, list[Change]] = defaultdict(list)
    stages = _stages(plan, model, figures, sums)
    graph, times = simulation.graph, simulation.times
    went_forward: set[int | None] = set()
    for task, label in enumerate(graph.labels):
        if label[0] in _HOLDING:
            stage, end_s = graph.stage(task), times.ends_s[task]
            if label[0] == "A":
                end_s = _given_back_s(simulation, task)
            is_first = label[0] == "F" and label[2] not in went_forward
            if is_first:
                went_forward.add(label[2])
            changes[stage] += stages[stage].changes(
                label, times.starts_s[task], end_s, is_first=is_first
            )
    return [
        _over_time(
            stage,
            stages[stage].static,
            changes[stage] + stages[stage].step_buffers(),
            float(room_bytes[stage]),
        )
        for stage in range(plan.num_stages)
    ]


def _given_back_s(simulation: "Simulation", number: int) -> float:
    """When the memory that a copy to the host frees can be used again: once a task has waited for
    the copy to end.
    """
    graph, times = simulation.graph, simulation.times
    waiting = (number + offset for offset in graph.after_end[number])
    starts = [times.starts_s[task] for task in waiting if graph.labels[task][:2] != ("A", ">")]
    return min(starts, default=times.ends_s[number])


def _stages(
    plan: Plan,
    model: StageModel,
    figures: StageFigures,
    sums: Mapping[str, Floats],
) -> list["_StageMemory"]:
    passes = passes_of_plan(plan)
    whole = whole_types(plan, model)
    placement = passes[0].placement
    chunks = placement.chunks
    batch = StageBatch.of_plan(plan)
    left = {name: left_bytes(batch, model, sums, whole, name) for name in whole}
    stages = []
    for stage, stage_passes in enumerate(passes):
        splits = stage_passes.splits_backward
        kept_bytes = {name: float(of_stages[stage]) for name, of_stages in left.items() if splits}
        stages.append(_StageMemory(plan, stage, model, figures, sums, kept_bytes, chunks))
    types = model.types.of_stages(batch_of_parts([plan], placement).value)
    for number, (part, places) in enumerate(
        zip(parts_of_plan(plan, placement), types, strict=True)
    ):
        # If the model's parts go round the stages several times, the stage with the head also frees
        # the outputs that its other parts have sent.
        is_last = placement.is_loop and part.stage == placement.last_stage
        stages[part.stage].take(
            part,
            [model.types.names[place] for place in places],
            sends=placement.sends_away(number) and not is_last,
        )
    return stages


class _StageMemory:
    """The changes of memory that each task of a stage makes: the bytes that it allocates or frees,
    and the kind of their content.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        model: StageModel,
        figures: StageFigures,
        sums: Mapping[str, Floats],
        left: Mapping[str, float],
        chunks: int,
    ) -> None:
        stage_plan = plan.stages[stage]
        # The type of each of the stage's layers, by layer number; layers are numbered through the
        # whole model, and the embedding is layer 0.
        self.types: dict[int, str] = {}
        self.sends_from: set[int] = set()
        self.chunks = chunks
        # For each type of layer, the bytes that a layer keeps between its backward pass and its
        # separate pass for weight gradients.
        self.left = left
        self.ratios = stage_plan.offload
        self.bytes = {
            name: {key: float(sums[sum_name(name, key)][stage]) for key in _SUMS}
            for name in model.types.names
        }
        self.of_layer: dict[int, tuple[float, float, float]] = {}
        self.static = np.zeros(len(CLASSES))
        states = (figures.weights_bytes, figures.gradients_bytes, figures.optimizer_bytes)
        self.static[_STATES] = sum(float(column[stage]) for column in states)
        self.static[_BUFFERS] = float(figures.buffers_bytes[stage])
        self.step_bytes = float(figures.step_buffer_bytes[stage])
        memory = model.memory
        self.steps_with = "O" if memory.rings else "S"
        # In an engine with a pipeline of its own, which counts as a single stage here, gradients
        # are reduced after all passes.
        reduces = stage_plan.zero >= 1 and plan.num_stages == 1
        self.bucket_bytes = memory.bucket_bytes if reduces else 0
        # When the first task of the optimizer step starts, and when its buffers are freed: when its
        # last task ends or, with ring buffers, when all layers have computed.
        self.steps_from_s, self.steps_until_s = math.inf, 0.0

    def take(self, part: StagePart, types: Sequence[str], *, sends: bool) -> None:
        """Add a part of the model to the stage, with its layers' types; ``sends`` says whether
        outputs that the part sends to another stage stay allocated.
        """
        self.types |= dict(enumerate(types, part.first_layer))
        if sends:
            self.sends_from.add(part.blocks.stop - 1)

    def changes(
        self, label: Label, start_s: float, end_s: float, *, is_first: bool
    ) -> list[Change]:
        """The changes of memory that a task makes: the time, the bytes and the kind of content of
        each.
        """
        kind, direction, layer = label
        assert layer is not None
        if kind == self.steps_with:
            self.steps_from_s = min(self.steps_from_s, start_s)
        if kind == self.steps_with or (kind == "F" and is_first):
            self.steps_until_s = max(self.steps_until_s, end_s)
        if kind == "W":
            return self._of_weights(layer, start_s, end_s)
        if kind in ("F", "B"):
            return self._computing(kind == "F", layer, start_s, end_s)
        if kind in ("O", "S"):
            return []
        size = self.ratios.activations * self._of(layer)["saved_bytes"]
        if direction == "<":
            return [(start_s, _ACTIVATIONS, size)]
        return [(end_s, _ACTIVATIONS, -size)]

    def step_buffers(self) -> list[Change]:
        """The changes of memory by the optimizer step's buffers, which are allocated together and
        freed together; empty if there are none.
        """
        if math.isinf(self.steps_from_s):
            return []
        return [
            (self.steps_from_s, _STEP, self.step_bytes),
            (self.steps_until_s, _STEP, -self.step_bytes),
        ]

    def _computing(
        self, is_forward: bool, layer: int, start_s: float, end_s: float
    ) -> list[Change]:
        held, *peaks = self._held_and_peaks(layer)
        running = peaks[0 if is_forward else 1]
        is_in_w = bool(self.left) and not is_forward and self.types[layer] == EMBEDDING
        left = 0.0 if is_forward or not self.left else self.left[self.types[layer]]
        running = 0.0 if is_in_w else running
        return [
            (end_s, _ACTIVATIONS, held) if is_forward else (start_s, _ACTIVATIONS, -held),
            (start_s, _TEMPORARIES, running),
            (end_s, _TEMPORARIES, -running),
            (end_s, _ACTIVATIONS, left),
        ]

    def _of_weights(self, layer: int, start_s: float, end_s: float) -> list[Change]:
        left = self.left[self.types[layer]]
        if self.types[layer] != EMBEDDING:
            return [(start_s, _ACTIVATIONS, -left)]
        # These bytes count in full: they are the peak of a whole backward pass, which includes
        # weight gradients.
        _, _, running = self._held_and_peaks(layer)
        return [
            (start_s, _ACTIVATIONS, -left),
            (start_s, _TEMPORARIES, running),
            (end_s, _TEMPORARIES, -running),
        ]

    def _held_and_peaks(self, layer: int) -> tuple[float, float, float]:
        """The bytes that a layer keeps between its passes, the bytes of the output that it sends,
        and the peak bytes of its forward and of its backward pass.
        """
        known = self.of_layer.get(layer)
        if known is None:
            sums = self._of(layer)
            sent = sums["output_bytes"] / self.chunks if layer in self.sends_from else 0.0
            backward = self.bucket_bytes + sums["backward_peak_bytes"]
            peaks = sums["forward_peak_bytes"], backward
            known = self.of_layer[layer] = (sums["saved_bytes"] + sent, *peaks)
        return known

    def _of(self, layer: int) -> Mapping[str, float]:
        return self.bytes[self.types[layer]]


_SUMS = (
    *("parameters", "saved_bytes", "output_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes"),
)


def _over_time(
    stage: int,
    static: Floats,
    changes: list[Change],
    room_bytes: float,
) -> MemoryOverTime:
    # At equal times, memory is freed before it is allocated, so that temporaries of two layers do
    # not count together.
    when, kinds, sizes = np.array(changes).reshape(-1, 3).T
    order = np.lexsort((sizes > 0, when))
    times = np.concatenate([[0.0], when[order]])
    deltas = np.zeros((len(changes) + 1, len(CLASSES)))
    deltas[0] = static
    deltas[np.arange(1, len(changes) + 1), kinds[order].astype(int)] = sizes[order]
    # Of several changes at the same time, only the state after the last is kept.
    ends = np.flatnonzero(np.append(times[1:] != times[:-1], True))
    return MemoryOverTime(
        stage=stage,
        times_s=times[ends],
        by_class=np.cumsum(deltas, axis=0)[ends],
        room_bytes=room_bytes,
    )
