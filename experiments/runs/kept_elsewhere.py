"""What measured runs keep on their hosts, or for a shorter time, than the plan that stands for
them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from experiments.runs.run_row import RunRow
from mistlab.job.prediction import Prediction, StagePrediction
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS


def _is_of_activations(dimension: str) -> bool:
    return DIMENSIONS[dimension].path == "offload.activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptElsewhere:
    """What a run's GPUs do not keep: states on the host, and gradients.

    With ``late_gradients`` gradients are freed after the step and come with the next backward pass,
    as torch's optimizers have it (``zero_grad``), so that they are not there while activations are
    most, if a step is one micro-batch. An optimizer that steps in the backward pass frees each as
    it comes, as one on the host does. One that ``pages`` has as much of its state on the host as a
    GPU lacks room for.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    activations: bool = False
    late_gradients: bool = False
    pages: bool = False

    @classmethod
    def of_row(cls, row: RunRow, micro_batches: int) -> "KeptElsewhere":
        """What a row says of it."""
        is_late = row.late_gradients and micro_batches == 1
        return cls(
            weights=row.weights_on_host,
            gradients=row.gradients_on_host or row.steps_in_backward,
            optimizer=row.optimizer_on_host,
            activations=row.activations_on_host,
            late_gradients=is_late,
            pages=row.pages_optimizer,
        )

    @property
    def on_host(self) -> tuple[str, ...]:
        """The states that are on the host."""
        return tuple(name for name in ("weights", "gradients", "optimizer") if getattr(self, name))

    @property
    def is_plain(self) -> bool:
        """Whether the plan keeps what the run does."""
        return not any(getattr(self, one.name) for one in fields(self))

    @property
    def of_stages(self) -> Mapping[str, float]:
        """What a plan's stages say of it, by dimension: that activations are on the host."""
        return {name: 1.0 for name in OFFLOADS if self.activations and _is_of_activations(name)}

    def applied(self, prediction: Prediction, room: Callable[[int], float]) -> Prediction:
        """A prediction of a plan that keeps all, without what the run does not keep; ``room`` is
        what a GPU of a stage has."""
        stages = tuple(
            self._stage(stage, room(number)) for number, stage in enumerate(prediction.stages)
        )
        fits = all(stage.peak_reserved_bytes <= room(number) for number, stage in enumerate(stages))
        return replace(prediction, stages=stages, fits=fits)

    def _stage(self, stage: StagePrediction, room: float) -> StagePrediction:
        gone = sum(getattr(stage.memory, name) for name in self.on_host)
        peak = stage.peak_allocated_bytes
        if self.late_gradients and not self.gradients:
            # Before gradients come, or when activations are gone.
            held = stage.memory.gradients
            without = max(peak - held, peak - stage.memory.activations - stage.memory.logits)
            gone += peak - max(without, stage.memory_by_phase.step)
        if self.pages and not self.optimizer:
            lacking = max(0, stage.peak_reserved_bytes - gone - int(room))
            gone += min(lacking, stage.memory.optimizer)
        gone = min(gone, peak)
        return replace(
            stage,
            peak_allocated_bytes=peak - gone,
            peak_reserved_bytes=max(stage.peak_reserved_bytes - gone, 0),
        )


# A run that keeps what its plan does.
ALL_KEPT = KeptElsewhere()
