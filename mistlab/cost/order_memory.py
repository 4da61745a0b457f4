"""Computes the memory of pipeline stages in any order of passes, also where the formula of
``StageModel`` (for 1F1B) does not hold.

The closed form (the formula for 1F1B) counts the largest number of micro-batches in flight as if
all blocks were equal, and the head's activations for one micro-batch. But chunks hold different
layers, and a head may hold several micro-batches.

If weight gradients have separate passes (W), recomputed and offloaded activations are on the GPU
from the backward pass to W, so the memory peak need not be where the largest layer runs. Offloaded
activations are fetched while a layer of the same chunk runs. If a stage has several chunks, the
peak may be while one chunk runs and another recomputes or has the head, and the head may run while
fewer micro-batches are in flight than at other moments. So the passes of these stages are simulated
one by one (``mistlab.cost.memory``). They need at least what the closed form gives for the
micro-batches that all chunks hold at once.

*Lower bounds.* If a stage holds one or more whole micro-batches, the closed form's bytes never grow
with offload ratios or with the number of recomputed blocks. The bytes that chunks keep between
their forward and backward passes never grow either, and the bytes that they keep afterwards do not
change. So all stages with smaller ratios or fewer recomputed blocks have these lower bounds:

- where passes are simulated one by one: the closed form for the micro-batches that all chunks hold
  at once, and what is kept at any moment, without what a layer takes while it runs;
- else the closed form for one micro-batch, and what is kept beyond it at the fullest moment.

Axes: C candidates, V chunks of a stage, T types of layers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.cost.memory import WalkedLayers, WalkedPasses
from mistlab.engines.engine import ENGINES
from mistlab.graph.layer_types import EMBEDDING, HEAD, sum_name, type_of
from mistlab.graph.stage_model import StageModel
from mistlab.graph.treatments import PLAIN
from mistlab.plan.plan import Plan
from mistlab.schedule.placement import Placement
from mistlab.stages.plan_orders import HeldMoments, moments_of_plan
from mistlab.stages.stage_batch import (
    StageBatch,
    StageFigures,
    StagePeaks,
    StagesInOrder,
    batch_of_parts,
    chunk_in_order,
)

Sums = Mapping[str, Floats]


def figures_in_order(plans: Sequence[Plan], model: StageModel) -> StageFigures:
    """The memory of all stages of some plans, with memory peaks for the order in which each plan
    runs its passes.
    """
    batch = StageBatch.of_plans(plans)
    figures = model.figures(batch)
    names = ("activations_bytes", "host_bytes", "forward_peak_bytes", "backward_peak_bytes")
    changed = {name: getattr(figures, name).copy() for name in names}
    for rows, stages in _stages_of(plans, batch, model):
        closed = {name: getattr(figures, name)[rows] for name in _CLOSED}
        changed["activations_bytes"][rows] += stages.kept_beyond
        changed["host_bytes"][rows] += stages.away_beyond
        changed["forward_peak_bytes"][rows], changed["backward_peak_bytes"][rows] = stages.peaks(
            closed
        )
    return replace(figures, **changed)


def peaks_in_order(
    batch: StageBatch, in_order: StagesInOrder, model: StageModel, *, of_others: bool = False
) -> StagePeaks:
    """The memory peaks that decide whether a stage fits, in an order of passes, for each candidate
    at its position in a pipeline.

    With ``of_others`` they are lower bounds for all candidates with smaller offload ratios or fewer
    recomputed blocks (at least one).
    """
    batch = batch.with_columns(in_flight=_held(batch, in_order))
    counted = np.ones(len(batch)) if of_others else batch.in_flight
    peaks = model.peaks(batch.with_columns(in_flight=counted))
    chunks = [chunk_in_order(batch, chunk, in_order) for chunk in range(in_order.placement.chunks)]
    forward, backward = np.empty(len(batch)), np.empty(len(batch))
    for moments, rows in in_order.by_stage():
        chosen_chunks = [chunk.chosen(rows) for chunk in chunks]
        stages = OrderedStages.of(moments, batch.chosen(rows), chosen_chunks, model)
        closed = {name: getattr(peaks, name)[rows] for name in _CLOSED}
        forward[rows], backward[rows] = (stages.least if of_others else stages.peaks)(closed)
    return replace(peaks, forward_peak_bytes=forward, backward_peak_bytes=backward)


def _stages_of(
    plans: Sequence[Plan], batch: StageBatch, model: StageModel
) -> Iterator[tuple[Rows, "OrderedStages"]]:
    """The stages of some plans and their row numbers, in groups whose passes begin with the same
    numbers of micro-batches in flight.
    """
    rows: dict[HeldMoments, list[int]] = defaultdict(list)
    parts: dict[HeldMoments, list[list[int]]] = defaultdict(list)
    batches: list[StageBatch] = []
    row = part = 0
    for plan in plans:
        of_plan = moments_of_plan(plan)
        placement = of_plan[0].placement
        for stage, moments in enumerate(of_plan):
            rows[moments].append(row + stage)
            parts[moments].append([part + own for own in placement.of_stage(stage)])
        batches.append(batch_of_parts([plan], placement))
        row, part = row + plan.num_stages, part + len(placement.stages)
    every = StageBatch.joined(batches)
    for moments, numbers in rows.items():
        stage_rows = np.array(numbers)
        chunks = [every.chosen(of_chunk) for of_chunk in np.array(parts[moments]).T]
        yield stage_rows, OrderedStages.of(moments, batch.chosen(stage_rows), chunks, model)


def _held(batch: StageBatch, in_order: StagesInOrder) -> Floats:
    """The largest number of micro-batches that each candidate has in flight at once."""
    held = np.empty(len(batch))
    for moments, rows in in_order.by_stage():
        blocks, of = np.unique(batch.layers[rows], return_inverse=True)
        held[rows] = np.array([moments.most_held(count) for count in blocks.tolist()])[of]
    return held


def _sent_beyond(placement: Placement, stage: int) -> float:
    """The share of a stage's chunks that send their output to another stage, minus the share that
    the formula for 1F1B assumes (1, or 0 for the stage with the head).
    """
    if placement.is_loop:
        return 0.0
    sending = [placement.sends_away(part) for part in placement.of_stage(stage)]
    return sum(sending) / len(sending) - (stage != placement.last_stage)


def whole_types(plan: Plan, model: StageModel) -> Mapping[str, str]:
    """For each type of layer, another type that saves as many bytes as the layer still keeps
    between its backward pass and its separate weight-gradient pass; empty if there are no such
    passes.

    For example, a recomputed block then keeps all activations of a block that is not recomputed,
    except attention's scores: the backward pass has freed them, since no weight gradient needs
    them.
    """
    if not any(of_stage.splits_backward for of_stage in moments_of_plan(plan)):
        return {}
    return _whole_types(model)


def _whole_types(model: StageModel) -> Mapping[str, str]:
    types = {name: name for name in model.types.names}
    for kind in model.types.kinds:
        scoreless = type_of(kind, "core_recomputed")
        ways = (PLAIN, *model.types.treatments)
        types |= dict.fromkeys((type_of(kind, way) for way in ways), scoreless)
    return types


def sums_of_layers(model: StageModel, batch: StageBatch) -> Sums:
    """The saved bytes and peaks of each stage's layers, with the tensors that an engine's blocks
    keep beyond those of the layer graph, and with the head as the engine runs it.
    """
    sums, (beyond, keeping) = _sums_with_head(model, batch), model.beyond_graphs(batch)
    for name in model.types.of_blocks:
        for what in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes"):
            if what != "saved_bytes" or name in keeping:
                sums[sum_name(name, what)] = sums[sum_name(name, what)] + beyond
    return sums


def _sums_with_head(model: StageModel, batch: StageBatch) -> dict[str, Floats]:
    """The sums over each stage's layers, with the head as the engine computes its loss."""
    return {**model.layers_of(batch), **model.head_of(batch)}


# The formula for 1F1B gives these bytes; the bytes in other orders of passes are computed from
# them.
_CLOSED = ("held_bytes", "forward_peak_bytes", "backward_peak_bytes", "step_peak_bytes")
_Closed = Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedStages:
    """Stages that have the same numbers of micro-batches in flight when their passes begin, with
    their chunks of layers.
    """

    moments: HeldMoments
    batch: StageBatch
    chunks: Sequence[StageBatch]
    model: StageModel
    held: "_Held"

    @classmethod
    def of(
        cls,
        moments: HeldMoments,
        batch: StageBatch,
        chunks: Sequence[StageBatch],
        model: StageModel,
    ) -> "OrderedStages":
        """Make the stages of ``batch``, with the bytes that each of their chunks keeps between
        passes.
        """
        held = _Held.of(batch, chunks, model, splits_backward=moments.splits_backward)
        return cls(moments=moments, batch=batch, chunks=chunks, model=model, held=held)

    @property
    def kept_beyond(self) -> Floats:
        """The bytes that each stage keeps on the GPU beyond what the formula for 1F1B gives for
        equally many micro-batches.
        """
        return self.held.beyond(self.moments, self.batch.in_flight)

    @property
    def away_beyond(self) -> Floats:
        """The bytes that each stage keeps in host memory beyond what the formula for 1F1B gives."""
        counts = self.moments.every[:, : self.moments.chunks]
        counted = self.batch.in_flight * self.held.away.sum(axis=0)
        return np.asarray((counts @ self.held.away).max(axis=0) - counted)

    @property
    def walked(self) -> Rows:
        """The indices of the stages whose memory peak is computed pass by pass, instead of by the
        formula for 1F1B.
        """
        always = self.moments.splits_backward or self.moments.chunks > 1
        return np.flatnonzero(always | (self.batch.offload_activations > 0))

    def peaks(self, closed: _Closed) -> tuple[Floats, Floats]:
        """The peak bytes of each stage's forward passes and of its backward passes; ``closed`` has
        the bytes by the formula for 1F1B.
        """
        beyond, rows = self.kept_beyond, self.walked
        forward = closed["forward_peak_bytes"] + beyond
        backward = closed["backward_peak_bytes"] + beyond
        if len(rows):
            walked_stages = self._chosen(rows)
            known = {name: column[rows] for name, column in closed.items()}
            least, walked = walked_stages._for_all_chunks(), walked_stages._walked(known)
            forward[rows] = np.maximum(walked.forward, least.forward_peak_bytes)
            backward[rows] = np.maximum(walked.backward, least.backward_peak_bytes)
        return forward, backward

    def least(self, closed: _Closed) -> tuple[Floats, Floats]:
        """Lower bounds of the peak bytes of all stages with smaller offload ratios or fewer
        recomputed blocks.

        ``closed`` has the bytes by the formula for 1F1B and one micro-batch.
        """
        beyond = self.held.beyond(self.moments, self.batch.in_flight, of_others=True)
        forward = closed["forward_peak_bytes"] + beyond
        if self.model.memory.rings:
            # For the first forward pass, with its optimizer steps, the formula for 1F1B counts a
            # single micro-batch in flight.
            forward = forward - (closed["step_peak_bytes"] - closed["held_bytes"])
        backward = closed["backward_peak_bytes"] + beyond
        rows = self.walked
        if len(rows):
            walked_stages = self._chosen(rows)
            least = walked_stages._for_all_chunks()
            kept = closed["held_bytes"][rows] + walked_stages.held.most(self.moments)
            forward[rows] = least.forward_peak_bytes
            backward[rows] = np.maximum(kept, least.backward_peak_bytes)
        return forward, backward

    def _for_all_chunks(self) -> StagePeaks:
        """The memory peaks by the formula for 1F1B, for as many micro-batches as all chunks have in
        flight at once.
        """
        return self.model.peaks(self.batch.with_columns(in_flight=self.moments.least_held))

    def _chosen(self, rows: Rows) -> "OrderedStages":
        return replace(
            self,
            batch=self.batch.chosen(rows),
            chunks=[chunk.chosen(rows) for chunk in self.chunks],
            held=self.held.chosen(rows),
        )

    def _walked(self, closed: _Closed) -> WalkedPasses:
        """The peak bytes of these stages, computed pass by pass."""
        moments, model = self.moments, self.model
        placement, memory = moments.placement, model.memory
        sums = sums_of_layers(model, self.batch)
        # If chunks follow one another in a loop over the stages, the stage with the head keeps none
        # of its outputs, as in the formula for 1F1B.
        holds = not (placement.is_loop and moments.stage == placement.last_stage)
        sent = sums[sum_name(model.types.of_blocks[0], "output_bytes")] / moments.chunks
        parts = placement.of_stage(moments.stage)
        step_buffer = closed["step_peak_bytes"] - closed["held_bytes"]
        walked = WalkedPasses.of(
            moments,
            self._layers(sums),
            [model.types.runs(chunk.columns) for chunk in self.chunks],
            sent=[(holds and placement.sends_away(part)) * sent for part in parts],
            step_buffer=step_buffer * memory.rings,
        )
        # If an engine runs a pipeline schedule of its own, here counted as a single stage, it
        # reduces gradients after all passes.
        reduces = (self.batch.zero >= 1) & (placement.num_stages == 1)
        bucket = reduces * memory.bucket_bytes
        return WalkedPasses(
            forward=closed["held_bytes"] + walked.forward,
            backward=closed["held_bytes"] + walked.backward + bucket,
        )

    def _layers(self, sums: Sums) -> WalkedLayers:
        """The bytes of activations of one layer of each type, for one micro-batch."""
        types, splits = self.model.types, self.moments.splits_backward
        none = np.zeros(len(self.batch))

        def of(what: str) -> Floats:
            return np.stack([sums[sum_name(name, what)] for name in types.names])

        saved, away = of("saved_bytes"), self.batch.offload_activations
        away = np.stack([away if name in types.of_blocks else none for name in types.names])
        whole = _whole_types(self.model)
        left = [
            left_bytes(self.batch, self.model, sums, whole, name) if splits else none
            for name in types.names
        ]
        return WalkedLayers(
            keeps=(1 - away) * saved,
            moving=away * saved,
            left=np.stack(left),
            forward_peak=of("forward_peak_bytes"),
            backward_peak=of("backward_peak_bytes"),
            in_w=np.array([[splits and name == EMBEDDING] for name in types.names]),
        )


def left_bytes(
    batch: StageBatch, model: StageModel, sums: Sums, whole: Mapping[str, str], name: str
) -> Floats:
    """The bytes that a layer of this type keeps from its backward pass to its separate
    weight-gradient pass, for each stage.

    ``sums`` are over a stage's layers; ``whole`` is from ``whole_types``.

    The separate weight-gradient pass computes all of the embedding's gradient from the gradient of
    its output. If tensor-parallel ranks split tokens, the gradients at a block's row-split GEMMs
    were gathered for the backward pass; this project's runtime keeps them whole until the
    weight-gradient pass.
    """
    left = sums[sum_name(whole[name], "saved_bytes")]
    output_bytes = sums[sum_name(name, "output_bytes")]
    if name == EMBEDDING:
        return left + output_bytes
    if ENGINES[model.engine].runs_here and name in model.types.of_blocks:
        products = 1 if model.workload.model.parallel_block else 2
        others = batch.sequence_parallel * (batch.tensor_parallel - 1)
        left = left + products * others * output_bytes
    return left


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """The bytes that each chunk of a stage's layers keeps for one micro-batch, between its passes.

    Shapes are (V, C): ``between`` the forward and the backward pass on the GPU, ``afterwards``
    between the backward and the weight-gradient pass, ``away`` between the forward and the backward
    pass on the host. ``head`` (C) is the head's part of ``between``; ``sent`` (C) is the output
    that a whole stage sends to the next one.
    """

    between: Floats
    afterwards: Floats
    away: Floats
    head: Floats
    sent: Floats

    @classmethod
    def of(
        cls,
        stages: StageBatch,
        chunks: Sequence[StageBatch],
        model: StageModel,
        *,
        splits_backward: bool,
    ) -> "_Held":
        """The bytes that the chunks of some stages keep for one micro-batch."""
        sums, types = _sums_with_head(model, stages), model.types
        whole = _whole_types(model) if splits_backward else {}
        stays = 1 - stages.offload_activations
        saved = {name: sums[sum_name(name, "saved_bytes")] for name in types.names}
        counts = [types.counts(chunk.columns) for chunk in chunks]

        def summed(bytes_of: Mapping[str, Floats]) -> Floats:
            each = np.stack([bytes_of[name] for name in types.names])
            return np.stack([(own * each).sum(axis=0) for own in counts])

        stay = {
            name: one * stays if name in types.of_blocks else one for name, one in saved.items()
        }
        return cls(
            between=summed(stay),
            away=summed({name: one - stay[name] for name, one in saved.items()}),
            afterwards=summed({name: saved[whole.get(name, name)] for name in types.names}),
            head=sum(own[types.names.index(HEAD)] for own in counts) * saved[HEAD],
            sent=sums[sum_name(types.of_blocks[0], "output_bytes")],
        )

    def chosen(self, rows: Rows) -> "_Held":
        """The bytes that the chunks of the stages with these indices keep."""
        return _Held(**{entry.name: getattr(self, entry.name)[..., rows] for entry in fields(self)})

    def beyond(self, moments: HeldMoments, held: Floats, *, of_others: bool = False) -> Floats:
        """The bytes that stages keep beyond what the formula for 1F1B gives for equally many
        micro-batches.

        Stages keep at most ``held`` micro-batches. With ``of_others``, the formula's bytes are for
        one micro-batch.
        """
        counted = np.ones(len(held)) if of_others else held
        known = counted * (self.between.sum(axis=0) - self.head) + self.head
        kept = self.most(moments)
        sends_on = moments.stage != moments.placement.last_stage
        sent = _sent_beyond(moments.placement, moments.stage) * np.maximum(0.0, held - 1)
        return np.asarray(kept - known + (sent + sends_on * (held - counted)) * self.sent)

    def most(self, moments: HeldMoments) -> Floats:
        """The most bytes that each stage keeps at once, without the outputs that it has sent to
        other stages.
        """
        kept = moments.every @ np.concatenate([self.between, self.afterwards])
        return np.asarray(kept.max(axis=0))
