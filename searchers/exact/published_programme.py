"""Joins stages as in Mist's publication (EuroSys 2025): by samples of Pareto frontiers and a
mixed-integer linear programme.

The candidates of a stage are reduced to samples of the Pareto frontier of steady time t and extra
time d: those with the smallest weighted sum of the two, for thirty weights. Samples are taken first
for each number of blocks that keep fewer activations, by t and d / G, and then for all remaining
candidates together, by t and d. The pipeline of G micro-batches is the solution of a programme with
a binary variable for each sample of each stage (PuLP, solved by HiGHS) that minimises the published
objective (``mistlab.cost.pipeline``). Each rank may use an even share of its node's host memory.

Axes: F candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.cost.chains import Numbers
from mistlab.cost.pipeline import Published, extra_s, in_front, passes_of, steady_s
from mistlab.plan.plan import Plan
from searchers.exact.candidates import Menus, Options, StagePosition, undominated
from searchers.exact.programme import Chosen, places_by_stage, plan_of

# How many weights are tried: for each, the candidate with the least weighted sum of steady and
# extra time becomes a sample of the stage's Pareto frontier.
WEIGHTS = 30
# The seconds after which the solver of one linear programme is stopped.
PATIENCE_S = 600.0
# The solver may return plans that are up to this factor slower than the best known plan, to allow
# for the solver's tolerances.
ALMOST = 1 + 1e-6

# The type of a function that selects the candidates for a stage that enter the linear programme.
Pick = Callable[[Options], Options]


def best_by_weights(options: Options, *, weights: int = WEIGHTS) -> Options:
    """For each of a number of weights, the candidate with the least weighted sum of steady time and
    extra time per iteration.
    """
    return options.chosen(_least(times_of(options), 1.0, weights)) if len(options) else options


def _least(times: tuple[Floats, Floats], share: float, weights: int) -> Rows:
    """The candidates with the least weighted sum of steady time and a share of extra time."""
    steady, extra = times
    of_steady = np.linspace(0, 1, weights + 2)[1:-1, None]
    sums = of_steady * steady + (1 - of_steady) * share * extra
    return np.unique(sums.argmin(axis=1))


def samples_of(micro_batches: int, weights: int = WEIGHTS) -> Pick:
    """A function that samples the Pareto frontier of a stage's steady and extra time, separately
    for each number of recomputed blocks.
    """

    def picked(options: Options) -> Options:
        if not len(options):
            return options
        shape = options.counts.max(axis=0) + 1
        code = np.ravel_multi_index(tuple(options.counts.T), tuple(shape))
        cell = np.unique(code, return_inverse=True)[1]
        steady, extra = times_of(options)
        of_cells = [np.flatnonzero(cell == number) for number in range(cell.max() + 1)]
        least = [
            rows[_least((steady[rows], extra[rows]), 1 / micro_batches, weights)]
            for rows in of_cells
        ]
        return options.chosen(np.concatenate(least))

    return picked


def true_frontier(options: Options) -> Options:
    """The whole Pareto frontier of a stage's steady and extra time, of which the published search
    takes samples.
    """
    return options.chosen(undominated([*times_of(options)]))


def times_of(options: Options) -> tuple[Floats, Floats]:
    """For each candidate, its steady time, and the extra time that it adds once per iteration (at
    least zero).
    """
    passes = passes_of(options.times)
    return steady_s(passes), np.maximum(extra_s(passes), 0.0)


def join_by_objective(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The pipeline of a group with the least value of the published objective, and that value; None
    if it is not below ``limit_s``. ``menus`` has the candidates for stages with equally many GPUs;
    a single stage needs no linear programme.
    """
    stages = places_by_stage(menus, limit_s)
    hopeful = menus.only(lambda place, options: _hopeful(menus, place, options, limit_s))
    if not all(any(len(hopeful[place]) for place in places) for places in stages):
        return None
    alone = menus.group.num_stages == 1
    chosen = _best_alone(hopeful, stages[0]) if alone else _solved(hopeful, stages, limit_s)
    if chosen is None:
        return None
    stages_s = [times_of(hopeful[place].chosen(slice(row, row + 1))) for place, row in chosen]
    seconds = objective_s(stages_s, menus.group.micro_batches)
    return (seconds, plan_of(hopeful, chosen)) if seconds < limit_s else None


def objective_s(stages: Sequence[tuple[Floats, Floats]], micro_batches: int) -> float:
    """The value of the published objective for a pipeline, from the steady and extra time of each
    stage.
    """
    length: Published[float] = Published.of_nothing(0.0)
    for steady, extra in reversed(stages):
        length = in_front(Numbers(), float(steady[0]), float(extra[0]), length)
    return length.whole(micro_batches)


def _hopeful(menus: Menus, position: StagePosition, options: Options, limit_s: float) -> Options:
    """The candidates with which a pipeline may beat ``limit_s``, assuming that its slowest stage
    takes at least the candidate's time, and other stages at least the computation of their blocks.
    """
    others = menus.problem.workload.model.layers - position.layers
    others_s = menus.group.least_stages_s(menus.work, others)
    steady, _ = times_of(options)
    return options.chosen(menus.group.micro_batches * steady + others_s < limit_s)


def _best_alone(menus: Menus, places: Sequence[StagePosition]) -> Chosen:
    """The candidate with the least value of the objective, for a stage that is the whole
    pipeline.
    """
    best: dict[float, Chosen] = {}
    for position in places:
        steady, extra = times_of(menus[position])
        seconds = menus.group.micro_batches * steady + extra
        if len(seconds):
            best.setdefault(float(seconds.min()), ((position, int(seconds.argmin())),))
    return best[min(best)]


def _solved(
    menus: Menus, stages: Sequence[Sequence[StagePosition]], limit_s: float
) -> Chosen | None:
    """The candidates that the solver chooses for the stages; None if no pipeline is below the upper
    bound.
    """
    # Imported here, since the solver is slow to import.
    from searchers.exact.milp import StageProgramme  # noqa: PLC0415

    ledger, began_s = menus.ledger, menus.ledger.wall_s
    programme = StageProgramme(menus, stages)
    length: Published[Any] = Published.of_nothing(programme.nothing)
    for after, stage in enumerate(programme.stages):
        times = {place: times_of(menus[place]) for place in stage.places}
        steady = stage.taken({place: own for place, (own, _) in times.items()})
        extra = stage.taken({place: own for place, (_, own) in times.items()})
        length = in_front(programme.inequalities(after), steady, extra, length)
    programme.minimise(length.whole(menus.group.micro_batches), ALMOST * limit_s)
    # An estimate: handing the linear programme to the solver takes about as long as building it
    # did.
    handing_s = ledger.wall_s - began_s
    programme.solve("highs", min(PATIENCE_S, ledger.seconds_left - handing_s))
    return programme.chosen(is_best=False)
