"""The symbolic predictor: predicts plans in closed form from the costs of single stages.

Axes: C candidates.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.core.distinct import FEW_ROWS
from mistlab.core.values import refuse
from mistlab.cost.confidence import PredictionBounds, bounds_of, iteration_figures, slowest_cluster
from mistlab.cost.kernels import model_flop, stage_flop
from mistlab.cost.links import in_one_group, mean_peak_flop_per_s
from mistlab.cost.memory import fullest_host, reserved_bytes, room_at
from mistlab.cost.order_memory import figures_in_order, peaks_in_order
from mistlab.cost.order_times import (
    StagesOnGroups,
    engine_of,
    ordered_iterations_s,
    places_on_network,
    task_models,
)
from mistlab.cost.pipeline import asynchronous_exchanges_s, iteration_s, with_late_exchanges
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES, Engine
from mistlab.engines.mistlab import MISTLAB
from mistlab.graph.stage_model import StageModel
from mistlab.job.prediction import MemoryByClass, MemoryByPhase, Prediction, StagePrediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import OFFLOADS, RECOMPUTED, num_gpus
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.order_text import PipelineOrder
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.stages.plan_orders import order_of_plan, shortened
from mistlab.stages.played_pipeline import (
    FEWEST_STAGES_PLAYED,
    FURTHER_TIMES,
    Places,
    played_iterations_s,
)
from mistlab.stages.stage_batch import (
    TIMES,
    StageBatch,
    StageCosts,
    StageFigures,
    StagePeaks,
    StageRow,
    StageSeconds,
    StagesInOrder,
    StageTimes,
    rows_of,
)

# Computes the costs of single stages, from which the cost of a pipeline follows.
#
# Axes of arrays: C candidates.


# The times that an iteration is predicted from, in closed form and played.
_TIMES = (*TIMES, *FURTHER_TIMES)
# The bytes of a stage must stay below this (8 EiB), so that they fit in 64-bit integers.
MOST_BYTES = 2.0**63


@dataclass(frozen=True, slots=True)
class KnownStage:
    """The costs of one stage, which are cached for other plans with the same stage.

    ``times`` are in the order of ``_TIMES``. ``fits`` says whether the stage fits in the memory
    of its GPUs. A rank has ``rank_host_bytes`` in host memory. ``places`` are its node and units of
    network tiers, with the shares of their links that its sends take; none if sends share no links.
    """

    times: tuple[float, ...]
    prediction: StagePrediction
    fits: bool
    num_gpus: int
    rank_host_bytes: float
    places: Places


def known_stages(
    costs: StageCosts,
    figures: StageFigures,
    num_gpus: Ints,
    gpus_per_node: int,
    places: Iterable[Places],
) -> Iterator[KnownStage]:
    """Every candidate as a stage with its costs; ``num_gpus`` has the number of GPUs of each
    candidate, ``gpus_per_node`` that of a node, ``places`` where each is on the network.
    """
    pipeline_s = _rows(*(getattr(costs.seconds, name) for name in _TIMES))
    return map(
        KnownStage,
        map(tuple, pipeline_s),
        _predictions(costs, figures, np.minimum(num_gpus, gpus_per_node)),
        costs.fits.tolist(),
        num_gpus.tolist(),
        costs.host_bytes.tolist(),
        places,
    )


def _predictions(
    costs: StageCosts, figures: StageFigures, gpus_in_node: Ints
) -> list[StagePrediction]:
    seconds = costs.seconds
    times = _rows(
        seconds.stable_s,
        seconds.delta_forward_s,
        seconds.delta_backward_s,
        seconds.step_s,
        seconds.exposed_communication_s,
    )
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
        figures.step_peak_bytes,
    )
    return [_stage_prediction(t, s) for t, s in zip(times, sizes, strict=True)]


def _stage_prediction(times: list[float], sizes: list[int]) -> StagePrediction:
    peak, reserved, host, weights, gradients, optimizer, kept, buffers, logits, *phases = sizes
    # The activations of the block that is running at the peak count as temporaries, not as
    # activations.
    states = weights + gradients + optimizer + buffers
    # If the optimizer steps all layers at once after all passes, activations and logits have been
    # freed by then.
    is_step = phases[2] > max(phases[:2])
    activations = 0 if is_step else min(kept, peak - states)
    logits = 0 if is_step else min(logits, peak - states - activations)
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


def _rows(*columns: Floats) -> list[list[float]]:
    rows: list[list[float]] = np.stack(columns, axis=1).tolist()
    return rows


def _whole_rows(*columns: Floats) -> list[list[int]]:
    """The bytes of stages as integers; refuses stages whose bytes need more than 64 bits."""
    table = np.stack(columns, axis=1).round()
    if not (np.abs(table) < MOST_BYTES).all():
        refuse(
            "workload",
            "needs more than 8 EiB of a GPU: give a smaller model, sequence_length or batch",
        )
    rows: list[list[int]] = table.astype(np.int64).tolist()
    return rows


# The closed form: predicts plans, and computes the costs of many candidates for stages at once, as
# columns.


NAME = "symbolic"
# How many stages per engine are cached with their costs, about 30 MB; when there are more, the
# cache is cleared.
MOST_KNOWN = 1 << 14
# How many stages are computed together at most. With so few, a stage's result does not depend on
# the others to the last digit, and intermediate results stay in the CPU's cache.
STAGES_AT_ONCE = FEW_ROWS


def as_they_are(tasks: TaskModel) -> TaskModel:
    """Returns the times of tasks unchanged; other predictors may change them."""
    return tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMode:
    """The name of an engine, and whether its plans may overlap communication."""

    engine: Engine
    overlap_communication: bool


@dataclass(slots=True, kw_only=True)
class SymbolicPredictor:
    """Predicts plans of one workload on one cluster in closed form; the first prediction compiles
    the cost expressions.

    The cost of a stage does not depend on the other stages, so it is cached for other plans.
    ``altered`` changes the times of tasks before anything is predicted from them.
    """

    workload: Workload
    cluster: Cluster
    altered: Callable[[TaskModel], TaskModel] = as_they_are
    _memory: dict[str, StageModel] = field(default_factory=dict, init=False)
    _times: dict[EngineMode, StagesOnGroups] = field(default_factory=dict, init=False)
    _slow: dict[EngineMode, StagesOnGroups] = field(default_factory=dict, init=False)
    _bounds: dict[str, PredictionBounds] = field(default_factory=dict, init=False)
    _known: dict[EngineMode, dict[StageRow, KnownStage]] = field(default_factory=dict, init=False)

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of one plan."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> list[Prediction]:
        """The predicted cost of each plan, in order; equal stages are computed once."""
        predictions: dict[int, Prediction] = {}
        # Plans with the same engine, pipeline schedule and number of stages are predicted together.
        together: dict[tuple[EngineMode, PipelineOrder | None, int], list[int]] = defaultdict(list)
        for number, plan in enumerate(plans):
            together[_mode_of(plan), _order_of(plan), plan.num_stages].append(number)
        for (mode, order, _), places in together.items():
            chosen = [plans[place] for place in places]
            predictions |= zip(places, self._predict_alike(mode, chosen, order), strict=True)
        return [predictions[place] for place in range(len(plans))]

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits in memory; ``predict`` says the same, but takes longer since it also
        computes times.
        """
        figures, batch = self._figures([plan]), StageBatch.of_plan(plan)
        reserved = reserved_bytes(figures, batch, self.cluster, ENGINES[plan.engine])
        has_room = (figures.feasible & self._has_room(reserved, batch)).all()
        fullest = fullest_host(figures.host_bytes, num_gpus(batch.value), self.cluster)
        return bool(has_room and fullest <= 1)

    def predict_stage(self, plan: Plan, stage: int) -> Prediction:
        """Predict one stage of a plan as if it never waited for other stages.

        On a cluster of one GPU the stage sends nothing either, since there is no other stage.
        """
        alone = self._stages_of(_mode_of(plan), [self._rows(plan)[stage]])
        (seconds,) = _iterations(alone, [plan.micro_batches])
        flop = stage_flop(self.workload, plan, stage)
        first_rank = sum(before.num_gpus for before in plan.stages[:stage])
        return self._prediction(plan.engine, seconds, alone, flop, first_rank=first_rank)

    def stage_costs(
        self, batch: StageBatch, *, engine: str = "mistlab", overlap_communication: bool = True
    ) -> StageCosts:
        """The costs of each candidate for a stage."""
        mode = EngineMode(engine=ENGINES[engine], overlap_communication=overlap_communication)
        return self._costs(mode, batch, self._stages(engine).peaks(batch))

    def stage_bounds(
        self, least: StageBatch, most: StageBatch, *, engine: str = "mistlab"
    ) -> StageCosts | None:
        """Lower bounds of the costs of all candidates for stages whose choices lie between those of
        ``least`` and ``most``; None if there are no bounds.

        Larger ratios take more time and free more memory of the GPU. There are no bounds for
        offloading under an engine whose host may delay passes.
        """
        engine_row = ENGINES[engine]
        if engine_row.host is not None and any(most.value(name).any() for name in OFFLOADS):
            return None
        assert all(
            ((least.value(name) > 0) == (most.value(name) > 0)).all() for name in OFFLOADS
        ), "ratios between zero and more have no common bound"
        mode = EngineMode(engine=engine_row, overlap_communication=True)
        peaks = self._stages(engine).peaks
        # Candidates with a range of recomputed blocks are evaluated at both ends of the range.
        differ = np.flatnonzero(least.value(RECOMPUTED) != most.value(RECOMPUTED))
        others = least.chosen(differ).with_columns(**{RECOMPUTED: most.value(RECOMPUTED)[differ]})
        host_bytes, rows = peaks(StageBatch.joined([least, others])).host_bytes, len(least)
        least_bytes = host_bytes[:rows]
        least_bytes[differ] = np.minimum(least_bytes[differ], host_bytes[rows:])
        roomiest = peaks(most)
        reserved = reserved_bytes(roomiest, most, self.cluster, engine_row)
        return StageCosts(
            seconds=self._model(mode).least(least, most),
            fits=roomiest.feasible & self._has_room(reserved, most),
            peak_allocated_bytes=roomiest.peak_bytes,
            peak_reserved_bytes=reserved,
            host_bytes=least_bytes,
        )

    def part_seconds(
        self, least: StageBatch, most: StageBatch | None = None, *, engine: str = "mistlab"
    ) -> StageSeconds:
        """The times of stages' chunks (parts of the model), for schedules other than 1F1B. If
        ``most`` is given, they are lower bounds over all candidates between ``least`` and ``most``.
        """
        engine_row = ENGINES[engine].in_named_order()
        model = self._model(EngineMode(engine=engine_row, overlap_communication=True))
        seconds = model(least) if most is None else model.least(least, most)
        return seconds.without_turns

    def stage_fits(
        self,
        batch: StageBatch,
        in_order: StagesInOrder | None = None,
        *,
        engine: str = "mistlab",
        of_others: bool = False,
    ) -> Bools:
        """Whether each candidate for a stage fits in the memory of its GPUs.

        With ``of_others`` it is true also of a candidate that does not fit, if one with smaller
        offload ratios or fewer recomputed blocks might.
        """
        model = self._stages(engine)
        if in_order is None:
            peaks = model.peaks(batch)
        else:
            peaks = peaks_in_order(batch, in_order, model, of_others=of_others)
        reserved = reserved_bytes(peaks, batch, self.cluster, ENGINES[engine])
        return np.asarray(peaks.feasible & self._has_room(reserved, batch))

    def iterations(
        self,
        batch: StageBatch,
        micro_batches: Ints,
        *,
        engine: Engine = MISTLAB,
        overlap_communication: bool = True,
    ) -> Floats:
        """The iteration time of each pipeline in seconds.

        ``batch`` has the stages of the first pipeline, then of the next, and so on; all pipelines
        have equally many. ``micro_batches`` has a number for each pipeline. ``engine`` may be one
        that plans cannot name.
        """
        mode = EngineMode(engine=engine, overlap_communication=overlap_communication)
        return np.array(_batch_s(self._model(mode), batch, micro_batches.tolist()))

    def iterations_of(self, plans: Sequence[Plan], engine: Engine) -> list[float]:
        """The iteration time of each plan in seconds if the given engine runs it instead of the
        plan's own.
        """
        of_plan: dict[int, float] = {}
        together: dict[tuple[bool, PipelineOrder | None, int], list[int]] = defaultdict(list)
        for number, plan in enumerate(plans):
            together[plan.overlap_communication, _order_of(plan), plan.num_stages].append(number)
        for (overlaps, order, _), places in together.items():
            chosen = [plans[place] for place in places]
            if order is None:
                seconds = self.iterations(
                    StageBatch.of_plans(chosen),
                    np.array([plan.micro_batches for plan in chosen]),
                    engine=engine,
                    overlap_communication=overlaps,
                )
            else:
                mode = EngineMode(engine=engine.in_named_order(), overlap_communication=overlaps)
                seconds = ordered_iterations_s(self._model(mode), chosen)
            of_plan |= zip(places, seconds.tolist(), strict=True)
        return [of_plan[place] for place in range(len(plans))]

    def _predict_alike(
        self, mode: EngineMode, plans: Sequence[Plan], order: PipelineOrder | None
    ) -> Iterator[Prediction]:
        """Predict plans that have the same engine, pipeline schedule and number of stages."""
        if order is None:
            stages = self._stages_of(mode, [row for plan in plans for row in self._rows(plan)])
            iterations = _iterations(stages, [plan.micro_batches for plan in plans])
        else:
            stages = self._ordered(mode, plans)
            iterations = ordered_iterations_s(self._model(mode), plans).tolist()
        if not self.workload.reduces_plainly:
            model = self._model(mode)
            iterations = with_late_exchanges(model, plans, np.array(iterations)).tolist()
        flop, count = model_flop(self.workload), plans[0].num_stages
        slowest = self._slowest_s(mode, plans) if order is None else iterations
        for number, (plan, seconds) in enumerate(zip(plans, iterations, strict=True)):
            of_plan = stages[number * count : (number + 1) * count]
            prediction = self._prediction(plan.engine, seconds, of_plan, flop, slowest[number])
            further = () if order is None else (_unmeasured(plan),)
            yield (
                replace(prediction, notes=(*prediction.notes, *further)) if further else prediction
            )

    def _slowest_s(self, mode: EngineMode, plans: Sequence[Plan]) -> list[float]:
        """The iteration time of each plan on the slowest cluster on which its engine was measured;
        0 if it was measured on none.

        Only plans with several stages are slower on such a cluster.
        """
        cluster = slowest_cluster(self.cluster, mode.engine)
        if cluster is None or plans[0].num_stages == 1:
            return [0.0] * len(plans)
        if mode not in self._slow:
            self._slow[mode] = self._model_on(cluster, mode)
        micro_batches = [plan.micro_batches for plan in plans]
        return _batch_s(self._slow[mode], StageBatch.of_plans(plans), micro_batches)

    def _prediction(
        self,
        engine: str,
        seconds: float,
        stages: Sequence[KnownStage],
        flop: float,
        slowest_s: float = 0.0,
        first_rank: int = 0,
    ) -> Prediction:
        """The prediction of a pipeline whose first stage begins at rank ``first_rank``. ``seconds``
        is its iteration time, ``slowest_s`` its time on the slowest known cluster, and ``flop`` its
        number of operations.
        """
        gpus = [stage.num_gpus for stage in stages]
        calibration, num_gpus = self._calibration(engine), sum(gpus)
        rank_bytes = np.array([stage.rank_host_bytes for stage in stages])
        times = iteration_figures(
            seconds,
            num_gpus=num_gpus,
            flop=flop,
            workload=self.workload,
            peak_flop_per_s=mean_peak_flop_per_s(
                self.cluster, self.workload.precision, first_rank, num_gpus
            ),
            bounds=calibration,
            slowest_s=slowest_s,
        )
        return Prediction(
            **times,
            fits=all(stage.fits for stage in stages)
            and fullest_host(rank_bytes, np.array(gpus), self.cluster) <= 1,
            predictor=NAME,
            notes=(*calibration.notes(num_gpus), *_remarks(self.workload)),
            stages=tuple(stage.prediction for stage in stages),
        )

    def _stages_of(self, mode: EngineMode, rows: Sequence[StageRow]) -> list[KnownStage]:
        """The stages that these rows describe, with their costs; equal stages are computed once,
        and cached.
        """
        known = self._known.setdefault(mode, {})
        new = list(dict.fromkeys(row for row in rows if row not in known))
        for start in range(0, len(new), STAGES_AT_ONCE):
            chunk = new[start : start + STAGES_AT_ONCE]
            known |= zip(chunk, self._worked_out(mode, StageBatch.of_rows(chunk)), strict=True)
        stages = [known[row] for row in rows]
        if len(known) > MOST_KNOWN:
            known.clear()
        return stages

    def _ordered(self, mode: EngineMode, plans: Sequence[Plan]) -> list[KnownStage]:
        """The stages of plans whose schedule is not 1F1B, with their costs."""
        return [*self._known_of(mode, StageBatch.of_plans(plans), self._figures(plans))]

    def _figures(self, plans: Sequence[Plan]) -> StageFigures:
        """The memory and the work of the stages of plans under one engine, including the memory
        that their pipeline schedule adds.
        """
        model = self._stages(plans[0].engine)
        if all(plan.order == DEFAULT_ORDER for plan in plans):
            return model.figures(StageBatch.of_plans(plans))
        return figures_in_order(plans, model)

    def _worked_out(self, mode: EngineMode, batch: StageBatch) -> Iterator[KnownStage]:
        return self._known_of(mode, batch, self._stages(mode.engine.name).figures(batch))

    def _known_of(
        self, mode: EngineMode, batch: StageBatch, figures: StageFigures
    ) -> Iterator[KnownStage]:
        costs = self._costs(mode, batch, figures)
        places = places_on_network(self._model(mode), batch)
        gpus, in_node = num_gpus(batch.value), self.cluster.gpus_per_node
        return known_stages(costs, figures, gpus, in_node, places)

    def _rows(self, plan: Plan) -> list[StageRow]:
        # Two stages have equal rows only if their blocks begin at the same position of the
        # repeating pattern of block kinds.
        return rows_of(plan, len(self._stages(plan.engine).types.pattern))

    def _stages(self, engine: str) -> StageModel:
        if engine not in self._memory:
            self._memory[engine] = StageModel.of(self.workload, engine)
        return self._memory[engine]

    def _costs(self, mode: EngineMode, batch: StageBatch, figures: StagePeaks) -> StageCosts:
        reserved = reserved_bytes(figures, batch, self.cluster, mode.engine)
        return StageCosts(
            seconds=self._model(mode)(batch),
            fits=figures.feasible & self._has_room(reserved, batch),
            peak_allocated_bytes=figures.peak_bytes,
            peak_reserved_bytes=reserved,
            host_bytes=figures.host_bytes,
        )

    def _has_room(self, reserved: Floats, batch: StageBatch) -> Bools | bool:
        """For each candidate stage, whether its GPUs are of one kind and have ``reserved`` bytes of
        memory.
        """
        room = room_at(self.cluster, batch)
        return (reserved <= room) & in_one_group(self.cluster, batch)

    def asynchronous_exchanges_s(self, plan: Plan) -> tuple[float, float]:
        """The seconds of a rank's exchange with asynchronous parameter servers, and the seconds for
        which a server is busy with the messages of all ranks.
        """
        both_s, busy_s = asynchronous_exchanges_s(self._model(_mode_of(plan)), [plan])[:, 0]
        return float(both_s), float(busy_s)

    def _model(self, mode: EngineMode) -> StagesOnGroups:
        if mode not in self._times:
            self._times[mode] = self._model_on(self.cluster, mode)
        return self._times[mode]

    def _model_on(self, cluster: Cluster, mode: EngineMode) -> StagesOnGroups:
        engine, overlaps, work = mode.engine, mode.overlap_communication, self.workload
        tasks = task_models(
            work, cluster, engine, overlap_communication=overlaps, altered=self.altered
        )
        return StagesOnGroups.of(cluster, tasks)

    def _calibration(self, engine: str) -> PredictionBounds:
        if engine not in self._bounds:
            self._bounds[engine] = bounds_of(self.workload, self.cluster, engine)
        return self._bounds[engine]


def _mode_of(plan: Plan) -> EngineMode:
    return EngineMode(engine=engine_of(plan), overlap_communication=plan.overlap_communication)


def _order_of(plan: Plan) -> PipelineOrder | None:
    """The schedule of a plan as an order of passes, shortened to fewer micro-batches if it is
    periodic; None for 1F1B, whose iteration time has a closed form.
    """
    return None if plan.order == DEFAULT_ORDER else order_of_plan(shortened(plan))


def _remarks(workload: Workload) -> tuple[str, ...]:
    """The notes that come with a prediction: on the model and its context length, and on how ranks
    reduce gradients.
    """
    if workload.reduces_plainly:
        return workload.remarks
    return (
        *workload.remarks,
        f"{workload.reduction.words}: another training, whose loss is not predicted",
    )


def _unmeasured(plan: Plan) -> str:
    return f"no run in the order {plan.order} was measured, all were in {DEFAULT_ORDER}"


def _iterations(stages: Sequence[KnownStage], micro_batches: Sequence[int]) -> list[float]:
    """The iteration time of each pipeline, from a list of all pipelines' stages in order; all
    pipelines have equally many stages.
    """
    times = dict(zip(_TIMES, np.array([stage.times for stage in stages]).T, strict=True))
    return _iterations_s(times, [stage.places for stage in stages], micro_batches)


def _batch_s(model: StagesOnGroups, batch: StageBatch, micro_batches: Sequence[int]) -> list[float]:
    """The iteration time of each pipeline of a batch, all of equally many stages."""
    seconds = model(batch)
    times = {name: getattr(seconds, name) for name in _TIMES}
    return _iterations_s(times, places_on_network(model, batch), micro_batches)


def _iterations_s(
    of_stages: Mapping[str, Floats], places: Sequence[Places], micro_batches: Sequence[int]
) -> list[float]:
    """The iteration time of each pipeline, from the times and places of all pipelines' stages."""
    tables = {name: column.reshape(len(micro_batches), -1) for name, column in of_stages.items()}
    times = StageTimes(**{name: tables[name] for name in TIMES})
    seconds: list[float] = iteration_s(times, np.array(micro_batches)).tolist()
    count = times.forward_s.shape[1]
    if count == 1 or (count < FEWEST_STAGES_PLAYED and not any(places)):
        return seconds
    further_s = np.stack([tables[name] for name in FURTHER_TIMES], axis=-1)
    of_pipelines = [places[first : first + count] for first in range(0, len(places), count)]
    played_s = played_iterations_s(times, further_s, micro_batches, of_pipelines)
    return [*map(max, seconds, played_s)]
