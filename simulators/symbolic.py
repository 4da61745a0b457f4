"""The closed form: plans to predictions, and columns of stage candidates to columns of costs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from mistlab.cluster import Cluster
from mistlab.cost.arithmetic import model_flop, stage_flop
from mistlab.cost.bounds import Bounds, bounds_of
from mistlab.cost.iteration import iteration_figures
from mistlab.cost.memory import host_bytes_of_fullest_node, reserved_bytes
from mistlab.cost.pipeline import StageTimes, iteration_s
from mistlab.cost.stage import StageCostModel
from mistlab.cost.tasks import TaskModel
from mistlab.errors import UncalibratedError
from mistlab.plan import Engine, Plan
from mistlab.predict import MemoryByClass, MemoryByPhase, Prediction, StagePrediction
from mistlab.schedule import template_of
from mistlab.stages import StageBatch, StageCosts, StageFigures, StagePeaks, StageSeconds
from mistlab.symbolic.stage_model import StageModel
from mistlab.workload import Workload

NAME = "symbolic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Whose slot table, whether it overlaps communication, and whether its sends block."""

    engine: Engine
    overlap_communication: bool
    sends_block: bool = False


@dataclass(slots=True, kw_only=True)
class SymbolicPredictor:
    """Predicts plans of one workload on one cluster; compiles when it is first asked."""

    workload: Workload
    cluster: Cluster
    _memory: StageModel | None = field(default=None, init=False)
    _times: dict[Schedule, StageCostModel] = field(default_factory=dict, init=False)

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> list[Prediction]:
        """What each plan costs, in order."""
        found: dict[int, Prediction] = {}
        # Plans of one schedule and number of stages go through together.
        together: dict[tuple[Schedule, int], list[int]] = defaultdict(list)
        for place, plan in enumerate(plans):
            together[_schedule_of(plan), plan.num_stages].append(place)
        for (schedule, _), places in together.items():
            chosen = [plans[place] for place in places]
            found |= zip(places, self._predict_alike(schedule, chosen), strict=True)
        return [found[place] for place in range(len(plans))]

    def predict_stage(self, plan: Plan, stage: int) -> Prediction:
        """What one of a plan's stages costs without the others: nobody keeps it waiting.

        Where nothing is sent either, on a cluster of one GPU, that is the stage by itself.
        """
        (prediction,) = self._predictions(
            _schedule_of(plan),
            StageBatch.of_plan(plan).chosen(np.array([stage])),
            np.array([plan.micro_batches]),
            stage_flop(self.workload, plan, stage),
        )
        return prediction

    def stage_costs(
        self, batch: StageBatch, *, engine: Engine = "mistlab", overlap_communication: bool = True
    ) -> StageCosts:
        """What each candidate for a stage costs."""
        schedule = Schedule(engine=engine, overlap_communication=overlap_communication)
        return self._costs(schedule, batch, self._stages().peaks(batch))

    def iterations(
        self,
        batch: StageBatch,
        micro_batches: NDArray[np.int64],
        *,
        engine: Engine = "mistlab",
        overlap_communication: bool = True,
        sends_block: bool = False,
    ) -> NDArray[np.float64]:
        """Seconds of an iteration of each pipeline: as many as ``micro_batches``, one after another
        in ``batch``, with equally many stages each."""
        schedule = Schedule(
            engine=engine, overlap_communication=overlap_communication, sends_block=sends_block
        )
        seconds = self._model(schedule)(batch)
        whole = iteration_s(_table(seconds, len(micro_batches)), micro_batches)
        return whole + self._calibration(engine).iteration_s

    def _predict_alike(self, schedule: Schedule, plans: Sequence[Plan]) -> list[Prediction]:
        return self._predictions(
            schedule,
            StageBatch.of_plans(plans),
            np.array([plan.micro_batches for plan in plans]),
            model_flop(self.workload),
        )

    def _predictions(
        self,
        schedule: Schedule,
        batch: StageBatch,
        micro_batches: NDArray[np.int64],
        flop: float,
    ) -> list[Prediction]:
        """The pipelines of ``batch``, one after another with equally many stages each, which all do
        ``flop`` operations a step."""
        figures = self._stages().figures(batch)
        costs = self._costs(schedule, batch, figures)
        iterations = iteration_s(_table(costs.seconds, len(micro_batches)), micro_batches)
        calibration = self._calibration(schedule.engine)
        iterations = iterations + calibration.iteration_s
        gpus = batch.data_parallel * batch.tensor_parallel
        in_node = np.minimum(gpus, self.cluster.gpus_per_node)
        stages = _stage_predictions(costs, figures, in_node)
        num_stages = len(batch) // len(micro_batches)
        predictions = []
        for row, seconds in enumerate(iterations.tolist()):
            of_plan = slice(row * num_stages, (row + 1) * num_stages)
            num_gpus = int(gpus[of_plan].sum())
            node_bytes = host_bytes_of_fullest_node(
                costs.host_bytes[of_plan], gpus[of_plan], self.cluster
            )
            times = iteration_figures(
                seconds,
                num_gpus=num_gpus,
                flop=flop,
                workload=self.workload,
                cluster=self.cluster,
                bounds=calibration,
            )
            predictions.append(
                Prediction(
                    **times,
                    fits=bool(costs.fits[of_plan].all())
                    and node_bytes <= self.cluster.host_memory_bytes,
                    predictor=NAME,
                    notes=calibration.notes(num_gpus),
                    stages=tuple(stages[of_plan]),
                )
            )
        return predictions

    def _stages(self) -> StageModel:
        if self._memory is None:
            self._memory = StageModel.of(self.workload)
        return self._memory

    def _costs(
        self, schedule: Schedule, batch: StageBatch, figures: StageFigures | StagePeaks
    ) -> StageCosts:
        allocator = self.cluster.hardware.allocator
        if allocator is None:
            message = (
                f"cluster.hardware: {self.cluster.hardware.name} has no allocator: run "
                "python -m experiments.calibrate --runs TABLE.csv with peaks of whole runs"
            )
            raise UncalibratedError(message)
        reserved = reserved_bytes(
            figures, data_parallel=batch.data_parallel, zero=batch.zero, allocator=allocator
        )
        room = self.cluster.memory_bytes - allocator.outside_bytes
        return StageCosts(
            seconds=self._model(schedule)(batch),
            fits=figures.feasible & (reserved <= room),
            peak_allocated_bytes=figures.peak_bytes,
            peak_reserved_bytes=reserved,
            host_bytes=figures.host_bytes,
        )

    def _model(self, schedule: Schedule) -> StageCostModel:
        if schedule not in self._times:
            template = template_of(
                schedule.engine,
                overlap_communication=schedule.overlap_communication,
                sends_block=schedule.sends_block,
            )
            tasks = TaskModel.of(self.workload, self.cluster, schedule.engine, template)
            self._times[schedule] = StageCostModel(tasks=tasks)
        return self._times[schedule]

    def _calibration(self, engine: Engine) -> Bounds:
        return bounds_of(self.workload, self.cluster, engine)


def _schedule_of(plan: Plan) -> Schedule:
    return Schedule(engine=plan.engine, overlap_communication=plan.overlap_communication)


def _table(seconds: StageSeconds, plans: int) -> StageTimes:
    names = [entry.name for entry in fields(StageTimes)]
    return StageTimes(**{name: getattr(seconds, name).reshape(plans, -1) for name in names})


def _stage_predictions(
    costs: StageCosts, figures: StageFigures, gpus_in_node: NDArray[np.int64]
) -> list[StagePrediction]:
    seconds = costs.seconds
    times = _rows(
        seconds.stable_s,
        seconds.delta_forward_s,
        seconds.delta_backward_s,
        seconds.step_s,
        seconds.exposed_communication_s,
    )
    states = figures.weights_bytes + figures.gradients_bytes + figures.optimizer_bytes
    sizes = _whole_rows(
        costs.peak_allocated_bytes,
        costs.peak_reserved_bytes,
        costs.host_bytes * gpus_in_node,
        figures.weights_bytes,
        figures.gradients_bytes,
        figures.optimizer_bytes,
        figures.activations_bytes,
        figures.buffers_bytes,
        figures.logits_bytes,
        figures.forward_peak_bytes,
        figures.backward_peak_bytes,
        states + figures.buffers_bytes + figures.step_buffer_bytes,
    )
    return [_stage_prediction(t, s) for t, s in zip(times, sizes, strict=True)]


def _stage_prediction(times: list[float], sizes: list[int]) -> StagePrediction:
    peak, reserved, host, weights, gradients, optimizer, kept, buffers, logits, *phases = sizes
    # At the peak the running block's activations are among the temporaries.
    states = weights + gradients + optimizer + buffers
    activations = min(kept, peak - states)
    logits = min(logits, peak - states - activations)
    stable_s, delta_forward_s, delta_backward_s, step_s, exposed_s = times
    return StagePrediction(
        stable_s=stable_s,
        delta_forward_s=delta_forward_s,
        delta_backward_s=delta_backward_s,
        step_s=step_s,
        exposed_communication_s=max(0.0, exposed_s),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        host_bytes=host,
        memory=MemoryByClass(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            buffers=buffers,
            logits=logits,
            temporaries=peak - states - activations - logits,
        ),
        memory_by_phase=MemoryByPhase(forward=phases[0], backward=phases[1], step=phases[2]),
    )


def _rows(*columns: NDArray[np.float64]) -> list[list[float]]:
    rows: list[list[float]] = np.stack(columns, axis=1).tolist()
    return rows


def _whole_rows(*columns: NDArray[np.float64]) -> list[list[int]]:
    rows: list[list[int]] = np.stack(columns, axis=1).round().astype(np.int64).tolist()
    return rows
