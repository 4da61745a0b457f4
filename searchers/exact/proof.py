"""Proves how close to optimal the best plan is, by branch and bound over boxes (sets of
memory-saving strategies with ratios in ranges).

The lower bound of a group of pipelines is the time of its fastest pipeline made of boxes. The boxes
of this pipeline are cut in half until it consists of single strategies, or until no pipeline of the
group can beat the best plan. The group with the smallest bound is always next, so the smallest
bound of all groups rises; it is the lower bound of the whole space.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

import numpy as np

from mistlab.graph.library import graph_of
from mistlab.job.search import Problem, StageBoundModel
from mistlab.plan.dimensions import OFFLOADS
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, order_problem
from mistlab.stages.played_pipeline import FEWEST_NODES_SHARED, FEWEST_STAGES_PLAYED
from mistlab.stages.stage_batch import StageBatch
from searchers.exact.box_menus import BoxMenus
from searchers.exact.candidates import Menus, StagePosition
from searchers.exact.divisions import like_blocks
from searchers.exact.groups import Group, LeastWork
from searchers.exact.partials import Completions
from searchers.exact.played_plans import are_all_predicted
from searchers.exact.programme import BEAM, Chosen, fastest_few, places_by_stage, plan_of
from searchers.exact.relaxed import Relaxed, alone_s
from searchers.meshes import Mesh
from searchers.strategy import ROUNDING, BudgetSpentError, Ledger

# In each round, the boxes (sets of strategies) of at most this many pipelines are cut in half.
AT_ONCE = 8
# Times of partial pipelines are rounded down to multiples of a grain, so that fewer differ. These
# are the grain's first size, as a share of the gap to be proven per stage, and the divisor by which
# it shrinks whenever the fastest pipelines contain no boxes (sets of strategies) any more.
GRAIN, FINER = 0.25, 2.0
# Under a schedule other than 1F1B, the proof for a group of pipelines ends once the grain is below
# this share, since the bounds of its plans are below their times in any case.
FINEST = 0.0625
# The bound of a pipeline is rounded down by less than so many grains a stage.
ROUNDED = 4
# Where stages may have unequal numbers of GPUs, the bounds of all groups of pipelines are raised to
# within the first of these gaps (shares of the best plan's time), then the next. At a larger gap
# fewer stages must be evaluated.
GAPS = (0.2, 0.175, 0.15, 0.1, 0.045, 0.018, 0.01, 0.005)


def has_bounds(ledger: Ledger, space: SearchSpace) -> bool:
    """Whether the predictor gives lower bounds over sets of memory-saving strategies, as a proof of
    this search space needs them.
    """
    model = ledger.predictor
    batch = StageBatch(layers=np.array([1]), data_parallel=1, tensor_parallel=1, micro_batch=1)
    most = {name: np.array([max(space.lists[name] or (1.0,))]) for name in OFFLOADS}
    batch = batch.with_columns(**most)
    return isinstance(model, StageBoundModel) and (
        model.stage_bounds(batch, batch, engine=space.engine) is not None
    )


def proven_s(  # noqa: PLR0913 (a group of pipelines, and when to stop)
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    work: Mapping[Mesh, LeastWork],
    least_s: Mapping[Group, float],
    *,
    tolerance: float,
    seconds: float,
    hear: Callable[[float], object] = float,
) -> float:
    """A lower bound in seconds of all plans of these groups of pipelines: within ``tolerance`` of
    the best plan's time, or as high as the time limit allows. It starts from the bounds
    ``least_s``, and calls ``hear`` with the bound after each round.
    """
    known = _Known(bounds=dict(least_s))
    is_long = any(group.has_unequal_sizes for group in least_s)
    with suppress(BudgetSpentError), ledger.for_seconds(seconds):
        for gap in (*(gap for gap in GAPS if is_long and gap > tolerance), tolerance):
            for _ in _closing(problem, space, ledger, work, known, gap=gap):
                hear(min([ledger.best_s, *known.bounds.values()]))
    return min([ledger.best_s, *known.bounds.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is proven so far: the lower bound of each group of pipelines, the groups whose bound can
    rise no further, and the groups' linear relaxations.
    """

    bounds: dict[Group, float]
    ended: set[Group] = field(default_factory=set)
    relaxed: dict[Group, Relaxed] = field(default_factory=dict)


def _closing(
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    work: Mapping[Mesh, LeastWork],
    known: _Known,
    *,
    gap: float,
) -> Iterator[Group]:
    """Raises the lower bounds of groups of pipelines until each is within ``gap`` of the best plan
    or can rise no further; yields a group after each round of work on it.
    """
    goal = 1 - max(gap, ROUNDING)
    bounds, ended = known.bounds, known.ended
    # Groups have no order, so a number in each entry of the heap decides between groups with equal
    # bounds.
    left = [
        (bound, number, group)
        for number, (group, bound) in enumerate(bounds.items())
        if group not in ended
    ]
    heapify(left)
    proofs: dict[Group, _GroupProof] = {}
    while left and left[0][0] < goal * ledger.best_s:
        bound, number, group = left[0]
        if group not in proofs:
            menus = BoxMenus(problem=problem, space=space, ledger=ledger, group=group, work=work)
            proofs[group] = _GroupProof(menus=menus, bound_s=bound, gap=gap, known=known)
        bounds[group] = proofs[group].further()
        if proofs[group].has_ended:
            ended.add(group)
        if bounds[group] >= goal * ledger.best_s or group in ended:
            # Deleted at once, since the candidates for a group of pipelines take much memory.
            del proofs[group]
        heapreplace(left, (bounds[group], number, group))
        if group in ended:
            left.remove((bounds[group], number, group))
            heapify(left)
        yield group


@dataclass(slots=True, kw_only=True)
class _GroupProof:
    """The lower bound of one group of pipelines, which rises from round to round."""

    menus: BoxMenus
    bound_s: float
    # Pipelines that are faster than the best plan by a smaller share than this are not examined.
    gap: float
    known: _Known
    # The grain of rounding the times of partial pipelines, as a share of ``gap`` in seconds divided
    # by the number of stages.
    share: float = GRAIN
    rounds: int = 0
    # Whether the group's bound can rise no further: under a schedule other than 1F1B, and where
    # passes are played one by one, plans may take longer than their bounds, and may be too many to
    # predict them all.
    has_ended: bool = False

    def further(self) -> float:
        """The lower bound of this group of pipelines after one more round; at most the best plan's
        time less the share ``gap``. Plans found on the way are predicted.
        """
        menus, ledger, group = self.menus, self.menus.ledger, self.menus.group
        limit_s = self._limit_s
        if self._may_be_relaxed and group not in self.known.relaxed:
            return self._relaxed_s()
        relaxed = self.known.relaxed.get(group)
        menus.lower_limit_to(limit_s)
        completions = None
        if relaxed is None:
            stages = places_by_stage(menus, limit_s)
            most_stages = len(stages)
            if group.num_stages is not None and group.has_formula and not group.has_unequal_sizes:
                completions = self._completions(stages)
        else:
            # The linear relaxation knows how many stages a pipeline can have, so the possible
            # stages are not listed here.
            most_stages = relaxed.most_stages(limit_s)
        # While there is no plan to beat, the best plan is assumed to take at most twice the bound.
        gap_s = min(limit_s, 2 * self.bound_s) - self.bound_s
        grain_s = self.share * gap_s / max(1, most_stages)
        fastest = fastest_few(
            menus, limit_s, AT_ONCE, completions=completions, relaxed=relaxed, grain_s=grain_s
        )
        self.bound_s = max(self.bound_s, fastest[0][0]) if fastest else limit_s
        closed = [one for _, one in fastest if not any(menus.is_open(*stage) for stage in one)]
        # If the fastest pipelines consist of single strategies, there is nothing left to split.
        is_split = bool(closed) and len(closed) == len(fastest) and self.share < FINEST
        if group.has_formula:
            times = []
            for plan in [plan_of(menus, one) for one in closed]:
                prediction = ledger.predict([plan])[0]
                if not prediction.fits and not menus.with_host:
                    menus.count_host_memory()
                    return self.bound_s
                times.append(prediction.iteration_s)
            rounded_s = grain_s * ROUNDED * max(1, most_stages)
            self.has_ended = is_split and self._is_final(closed, times, rounded_s)
            if self.has_ended and are_all_predicted(self._strategies, ledger.best_s):
                self.bound_s = ledger.best_s
        else:
            self._show(menus, closed)
            # Under schedules other than 1F1B the bound is then final.
            self.has_ended = is_split
        if closed:
            self.share /= FINER
        elif fastest and self._may_look():
            self._look_for_plans(completions)
        menus.split([stage for _, one in fastest for stage in one], self._limit_s)
        return self.bound_s

    def _completions(self, stages: Sequence[Sequence[StagePosition]]) -> Completions:
        menus = self.menus
        workload = menus.problem.workload
        layers, pattern = workload.model.layers, graph_of(workload).pattern
        like = like_blocks(pattern, layers) if len(pattern) > 1 else None
        return Completions.of(menus, stages, menus.group.micro_batches, layers, like)

    def _is_final(
        self, pipelines: Sequence[Chosen], times: Sequence[float], rounded_s: float
    ) -> bool:
        """Whether no further round can raise the lower bound on a group's iteration time, although
        the fastest pipelines of the group take longer.

        Bounds come from a formula; the predicted ``times`` of these ``pipelines`` may be longer,
        since their passes and sends are played one by one. Bounds are rounded down by at most
        ``rounded_s``: if the best plan's time is no further above the bound, finer rounding may
        still raise the bound to it.
        """
        may_wait = self.menus.problem.cluster.nodes >= FEWEST_NODES_SHARED
        may_wait |= max(map(len, pipelines)) >= FEWEST_STAGES_PLAYED
        highest_s = (self.bound_s + rounded_s) * (1 + ROUNDING)
        return may_wait and highest_s < min([self._limit_s, *times])

    @property
    def _strategies(self) -> Menus:
        """Lists of the single strategies of each stage of the group, none of them in a box."""
        menus = self.menus
        return Menus(
            problem=menus.problem,
            space=menus.space,
            ledger=menus.ledger,
            group=menus.group,
            work=menus.work,
        )

    def _may_look(self) -> bool:
        """Whether to look for plans after this round. Where stages may have different meshes,
        looking takes as long as the round itself, so it is done ever less often.
        """
        self.rounds += 1
        is_long = self.menus.group.has_unequal_sizes
        return not (is_long and self.rounds & (self.rounds - 1))

    @property
    def _may_be_relaxed(self) -> bool:
        group, is_found = self.menus.group, self.menus.ledger.best is not None
        return group.num_stages is None and group.has_formula and is_found

    def _relaxed_s(self) -> float:
        """A lower bound of this group of pipelines: of those with several stages by a linear
        relaxation (stages may be fractional), and of those with one stage by itself.
        """
        relaxed = Relaxed.of(self.menus, self.menus.ledger.best_s)
        self.known.relaxed[self.menus.group] = relaxed
        limit_s = self._limit_s
        least_s = min(relaxed.bound_s(limit_s), alone_s(self.menus, limit_s))
        self.bound_s = max(self.bound_s, least_s)
        return self.bound_s

    @property
    def _limit_s(self) -> float:
        return (1 - self.gap) * self.menus.ledger.best_s

    def _look_for_plans(self, completions: Completions | None) -> None:
        """Predict the plan of a beam search over single strategies, if one is found that may beat
        the best plan.
        """
        certain = self.menus.certain()
        limit_s = self._limit_s
        relaxed = self.known.relaxed.get(self.menus.group)
        fastest = fastest_few(
            certain, limit_s, 1, completions=completions, relaxed=relaxed, beam=BEAM
        )
        chosen = [one for _, one in fastest]
        if self.menus.group.num_stages == 1:
            # The best single-stage plan is found in few rounds, so the next best candidates are
            # predicted too, as its rivals.
            chosen = [((place, row),) for ((place, _),) in chosen for row in certain.fastest(place)]
        self._show(certain, chosen)

    def _show(self, menus: BoxMenus, pipelines: Iterable[Chosen]) -> None:
        """Predict the plans of those pipelines that can run their schedule."""
        plans = [plan_of(menus, one) for one in pipelines]
        self.menus.ledger.predict([plan for plan in plans if _can_run(plan)])


def _can_run(plan: Plan) -> bool:
    """Whether a plan can run its schedule; a plan with one stage can only run the default one."""
    if plan.num_stages == 1:
        return plan.order == DEFAULT_ORDER
    fewest = min(stage.layers for stage in plan.stages)
    return not order_problem(plan.order, plan.num_stages, plan.micro_batches, fewest)
