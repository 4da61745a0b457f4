"""The memory of stages for micro-batches in any order of passes, beyond what the closed form
counts.

The closed form counts the most micro-batches held at once, as if all blocks were equal, and the
head's activations for one micro-batch. But chunks hold different layers, and a head may hold
several micro-batches. Where gradients of weights have their own passes, recomputed blocks also stay
in memory until these passes.

*Bounds.* The closed form's bytes never grow with larger ratios or with more recomputed blocks, if a
stage holds a whole micro-batch or more. What an order keeps beyond one micro-batch does not grow
either, at each moment at which every chunk holds a micro-batch: what chunks keep between their
forward and backward passes becomes less, and what they keep after these does not change. So the
closed form for one micro-batch, and what is kept beyond it at the fullest of these moments, bound
all stages with smaller ratios or fewer recomputed blocks.

Axes: C candidates, V chunks of a stage, T types of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.held_moments import HeldMoments
from mistlab.schedule.placement import Placement
from mistlab.schedule.plan_orders import moments_of_plan
from mistlab.symbolic.layer import sum_name
from mistlab.symbolic.layer_types import HEAD, type_of
from mistlab.symbolic.stage_model import StageModel
from mistlab.symbolic.treatments import PLAIN
from mistlab.values.parts import batch_of_parts, chunk_in_order
from mistlab.values.plan import Plan
from mistlab.values.stages import StageBatch, StagePeaks
from mistlab.values.stages_in_order import StagesInOrder

Values = NDArray[np.float64]


def unlike_bytes(plan: Plan, model: StageModel) -> list[float]:
    """Bytes on a GPU of each stage that the closed form leaves out, or (below zero) counts too
    many."""
    moments = moments_of_plan(plan)
    placement = moments[0].placement
    batch, parts = StageBatch.of_plan(plan), batch_of_parts([plan], placement)
    found = []
    for stage, own in enumerate(moments):
        chunks = [parts.chosen(np.array([part])) for part in placement.of_stage(stage)]
        row = batch.chosen(np.array([stage]))
        held = _Held.of(row, chunks, model, splits_backward=own.splits_backward)
        found.append(held.beyond(own, batch.in_flight[[stage]]).item())
    return found


def peaks_in_order(
    batch: StageBatch, in_order: StagesInOrder, model: StageModel, *, of_others: bool = False
) -> StagePeaks:
    """The figures that decide whether each candidate fits in its place; ``of_others``, bounds of
    those of all candidates that have smaller ratios or recompute fewer blocks, but at least one."""
    held = _held(batch, in_order)
    counted = np.ones(len(batch)) if of_others else held
    batch = batch.with_columns(in_flight=counted)
    peaks, beyond = model.peaks(batch), np.empty(len(batch))
    chunks = [chunk_in_order(batch, chunk, in_order) for chunk in range(in_order.placement.chunks)]
    every = _Held.of(batch, chunks, model, splits_backward=in_order.splits_backward)
    for moments, rows in in_order.by_stage():
        beyond[rows] = every.chosen(rows).beyond(moments, held[rows], of_others=of_others)
    forward = peaks.forward_peak_bytes
    if of_others and model.memory.rings:
        # The step beside the first forward pass counts one micro-batch, however many are held.
        forward = forward - (peaks.step_peak_bytes - peaks.held_bytes)
    return replace(
        peaks,
        forward_peak_bytes=forward + beyond,
        backward_peak_bytes=peaks.backward_peak_bytes + beyond,
    )


def _held(batch: StageBatch, in_order: StagesInOrder) -> Values:
    """The micro-batches (C) that each candidate holds at once, at most."""
    held = np.empty(len(batch))
    for moments, rows in in_order.by_stage():
        blocks, of = np.unique(batch.layers[rows], return_inverse=True)
        held[rows] = np.array([moments.most_held(count) for count in blocks.tolist()])[of]
    return held


def _sent_beyond(placement: Placement, stage: int) -> float:
    """The share of a stage's chunks that send their outcome to another stage, beyond the share that
    the closed form counts: all of them, but none of the stage with the head."""
    if placement.is_loop:
        return 0.0
    sending = [placement.sends_away(part) for part in placement.of_stage(stage)]
    return sum(sending) / len(sending) - (stage != placement.last_stage)


def whole_types(plan: Plan, model: StageModel) -> Mapping[str, str]:
    """For each type of layers, the type that keeps as many bytes as this one keeps for the
    gradients of its weights; nothing where these have no passes of their own.

    A block that was recomputed is whole then, but the backward pass has freed attention's scores,
    which no weight needs.
    """
    if not any(of_stage.splits_backward for of_stage in moments_of_plan(plan)):
        return {}
    return _whole_types(model)


def _whole_types(model: StageModel) -> Mapping[str, str]:
    found = {name: name for name in model.types.names}
    for kind in model.types.kinds:
        scoreless = type_of(kind, "core_recomputed")
        ways = (PLAIN, *model.types.treatments)
        found |= dict.fromkeys((type_of(kind, way) for way in ways), scoreless)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Bytes (V, C) that chunks keep on the GPU between their forward and their backward pass, and
    between their backward pass and their pass for weights; ``head`` (C) are the head's bytes among
    the former, ``sent`` (C) those of what a whole stage sends on."""

    between: Values
    afterwards: Values
    head: Values
    sent: Values

    @classmethod
    def of(
        cls,
        stages: StageBatch,
        chunks: Sequence[StageBatch],
        model: StageModel,
        *,
        splits_backward: bool,
    ) -> "_Held":
        """The chunks of stages (C)."""
        sums, types = model.layers_of(stages), model.types
        whole = _whole_types(model) if splits_backward else {}
        stays = 1 - stages.offload_activations
        saved = {name: sums[sum_name(name, "saved_bytes")] for name in types.names}
        counts = [_layers_of_types(model, chunk) for chunk in chunks]

        def summed(bytes_of: Mapping[str, Values]) -> Values:
            each = np.stack([bytes_of[name] for name in types.names])
            return np.stack([(own * each).sum(axis=0) for own in counts])

        stay = {
            name: one * stays if name in types.of_blocks else one for name, one in saved.items()
        }
        return cls(
            between=summed(stay),
            afterwards=summed({name: saved[whole.get(name, name)] for name in types.names}),
            head=sum(own[types.names.index(HEAD)] for own in counts) * saved[HEAD],
            sent=sums[sum_name(types.of_blocks[0], "output_bytes")],
        )

    def chosen(self, rows: NDArray[np.intp]) -> "_Held":
        """The stages with these numbers."""
        return _Held(**{entry.name: getattr(self, entry.name)[..., rows] for entry in fields(self)})

    def beyond(self, moments: HeldMoments, held: Values, *, of_others: bool = False) -> Values:
        """Bytes (C) of ``held`` micro-batches at most, beyond those of the closed form for as many;
        ``of_others``, beyond those for one, when every chunk holds one."""
        counts = moments.of_whole if of_others else moments.every
        counted = np.ones(len(held)) if of_others else held
        known = counted * (self.between.sum(axis=0) - self.head) + self.head
        kept = (counts @ np.concatenate([self.between, self.afterwards])).max(axis=0)
        sends_on = moments.stage != moments.placement.last_stage
        sent = _sent_beyond(moments.placement, moments.stage) * np.maximum(0.0, held - 1)
        return np.asarray(kept - known + (sent + sends_on * (held - counted)) * self.sent)


def _layers_of_types(model: StageModel, chunk: StageBatch) -> Values:
    """How many layers of each type (T, C) chunks have."""
    sizes, places = model.types.runs(chunk.columns)
    places = np.broadcast_to(places, sizes.shape)
    return np.stack(
        [
            np.where(places == place, sizes, 0.0).sum(axis=0)
            for place in range(len(model.types.names))
        ]
    )
