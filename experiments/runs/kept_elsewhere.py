"""The parts of a plan's memory that the GPUs of the measured run do not need, or not for as long:
they are on the host, or freed early.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from experiments.runs.kept_beside import (
    beside_bytes,
    bucket_bytes,
    flat_gradients_bytes,
    stepped_bytes,
    streamed_bytes,
)
from experiments.runs.kept_by_llmq import kept_by_llmq
from experiments.runs.run_row import Recomputation, RunRow
from mistlab.engines.engine import EngineMemory
from mistlab.job.prediction import Prediction, StagePrediction
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS
from mistlab.plan.workload import ModelSpec


def _is_of_activations(dimension: str) -> bool:
    return DIMENSIONS[dimension].path == "offload.activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptElsewhere:
    """The parts of a plan's memory that the GPUs of a run do not hold: states on the host, and
    gradients that are freed early.

    With ``late_gradients``, gradients are freed after the optimizer step, as by torch's
    ``zero_grad``; in a step of one micro-batch they then do not exist yet when activations are
    largest. An optimizer that steps in the backward pass, or on the host, frees each gradient at
    once. With ``pages``, the optimizer states are in managed memory (bitsandbytes), which torch
    does not count; a driver counts what fits on the GPU (``counts_pages``), and so may a table that
    does not name its tool.

    If states are in ``shards``, a run that ``loads_whole`` holds all weights beside its shard while
    it reads a checkpoint; with ``whole_gradients`` each rank keeps all gradients until the last
    micro-batch (``no_sync``). ``activations_share`` is the share of activations that are offloaded
    while passes run; inputs of blocks may ``leave_by_copies`` for which passes wait.
    ``freed_share`` is the share of activations that the run recomputes but the plan keeps. With
    ``caches_nothing``, the run plans its buffers or returns cached memory. ``beside_bytes`` are
    tensors that the run keeps but its plan does not (``experiments.runs.kept_beside``);
    ``activation_bytes`` replace the activations. ``stepped_bytes`` are the gradients that exist at
    once while an optimizer steps in the backward pass.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    activations: bool = False
    late_gradients: bool = False
    pages: bool = False
    counts_pages: bool = False
    loads_whole: bool = False
    whole_gradients: bool = False
    shards: int = 1
    activations_share: float = 0.0
    leave_by_copies: bool = False
    freed_share: float = 0.0
    caches_nothing: bool = False
    beside_bytes: int = 0
    stepped_bytes: int = 0
    activation_bytes: int | None = None

    @classmethod
    def of_row(
        cls,
        row: RunRow,
        micro_batches: int,
        shards: int,
        model: ModelSpec,
        recompute: Recomputation,
        tokens: int,
        memory: EngineMemory | None,
    ) -> "KeptElsewhere":
        """The states that a row says are offloaded or freed early, divided among a number of
        shards; and bytes of tensors that the plan does not count, for a micro-batch's ``tokens``.
        ``memory`` says how the row's engine stores states; None if it does not train in the row's
        precision.
        """
        beside = beside_bytes(row, model, recompute, tokens, memory, shards)
        beside += streamed_bytes(row, model, memory, shards) + bucket_bytes(row, memory)
        is_late = row.late_gradients and micro_batches == 1
        is_whole = shards > 1 and row.loads_whole
        is_summed = shards > 1 and row.whole_gradients and micro_batches > 1
        beside += flat_gradients_bytes(row, model) if is_summed else 0
        return cls(
            weights=row.weights_on_host,
            gradients=row.gradients_on_host or row.steps_in_backward,
            optimizer=row.optimizer_on_host,
            activations=row.activations_on_host,
            late_gradients=is_late,
            pages=row.pages_optimizer,
            counts_pages=row.pages_optimizer and (row.of_driver or not row.text("memory_kind")),
            loads_whole=is_whole,
            whole_gradients=is_summed,
            shards=shards if is_whole or is_summed else 1,
            caches_nothing=row.plans_buffers or row.empties_cache,
            activations_share=min(1.0, (row.offloaded_blocks or 0) / model.layers),
            beside_bytes=beside,
            stepped_bytes=stepped_bytes(row, model),
            activation_bytes=kept_by_llmq(row, model, tokens),
        )

    @property
    def on_host(self) -> tuple[str, ...]:
        """The names of the states that are on the host."""
        return tuple(name for name in ("weights", "gradients", "optimizer") if getattr(self, name))

    @property
    def is_plain(self) -> bool:
        """Whether the run's GPUs hold the same states as the plan."""
        return self == ALL_KEPT

    @property
    def of_stages(self) -> Mapping[str, float]:
        """The offload ratios with which a plan's stages offload activations as the run does."""
        return {name: 1.0 for name in OFFLOADS if self.activations and _is_of_activations(name)}

    def applied(self, prediction: Prediction, room: Callable[[int], float]) -> Prediction:
        """The prediction of a plan, reduced by the states that the run's GPUs do not hold; ``room``
        is the memory of a GPU of a stage.
        """
        stages = tuple(
            self._stage(stage, room(number)) for number, stage in enumerate(prediction.stages)
        )
        fits = all(stage.peak_reserved_bytes <= room(number) for number, stage in enumerate(stages))
        return replace(prediction, stages=stages, fits=fits)

    def _stage(self, stage: StagePrediction, room: float) -> StagePrediction:
        gone = sum(getattr(stage.memory, name) for name in self.on_host)
        peak, phases = stage.peak_allocated_bytes, stage.memory_by_phase
        # There are no gradients in the forward pass: as far as its peak exceeds the peaks of later
        # phases, gradients do not raise the peak.
        before_gradients = phases.forward - max(phases.backward, phases.step)
        stepped = max(self.stepped_bytes - max(before_gradients, 0), 0)
        if self.late_gradients and not self.gradients:
            # Gradients and activations are not held at the same time: the peak is reached before
            # gradients exist, or after activations are freed.
            held = stage.memory.gradients
            without = max(peak - held, peak - stage.memory.activations - stage.memory.logits)
            gone += peak - max(without, phases.step)
        gone += int((self.leave_by_copies or self.activations_share) * stage.memory.activations)
        gone += int(self.freed_share * stage.memory.activations)
        if self.activation_bytes is not None:
            gone += stage.memory.activations - self.activation_bytes
        if self.pages and not self.optimizer:
            held = stage.memory.optimizer
            lacking = max(0, stage.peak_reserved_bytes + stepped - gone - int(room))
            gone += min(lacking, held) if self.counts_pages else held
        peak -= min(gone, peak)
        peak += self.beside_bytes
        peak += stepped
        if self.whole_gradients:
            peak += (self.shards - 1) * stage.memory.gradients
        if self.loads_whole:
            peak = max(peak, (self.shards + 1) * stage.memory.weights)
        more = peak - stage.peak_allocated_bytes
        if self.caches_nothing:
            return replace(stage, peak_allocated_bytes=peak, peak_reserved_bytes=peak)
        if self.leave_by_copies:
            # Cached memory is assumed to shrink or grow in proportion to allocated memory.
            more = int(stage.peak_reserved_bytes * more / stage.peak_allocated_bytes)
        return replace(
            stage,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=max(stage.peak_reserved_bytes + more, 0),
        )

    def copies_s(self, prediction: Prediction, micro_batches: int, bytes_per_s: float) -> float:
        """The seconds per step for which passes wait for inputs of blocks to be copied to the host
        and back. A stage holds the inputs of one micro-batch for itself and for each later stage.
        """
        if not self.leave_by_copies:
            return 0.0
        stages = prediction.stages
        of_one = max(
            stage.memory.activations / min(micro_batches, len(stages) - number)
            for number, stage in enumerate(stages)
        )
        return 2 * of_one * micro_batches / bytes_per_s


# A run whose GPUs hold all states of its plan.
ALL_KEPT = KeptElsewhere()
