"""Chooses a candidate for each stage of a pipeline by mixed-integer linear programming (as Mist
does), with the solver HiGHS or CBC.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from mistlab.core.arrays import Column
from mistlab.cost.chains import ISSUED, PASSES, Chains, Counts, PassLengths, chained
from mistlab.cost.memory import host_room_at
from mistlab.engines.engine import ENGINES
from mistlab.plan.plan import Plan
from searchers.exact.candidates import Menus, StagePosition
from searchers.exact.programme import Chosen, join_hastily, places_by_stage, plan_of
from searchers.exact.programme import join as join_exactly

# Discards what C libraries print to standard output.
#
# HiGHS 1.16 prints its version when it is created, before it can be silenced. A command with
# ``--json`` must write exactly one object to standard output.


STANDARD_OUTPUT = 1


@contextmanager
def silent() -> Iterator[None]:
    """In the ``with`` block, discard everything that is written to standard output, also by C
    code.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(STANDARD_OUTPUT)
    except OSError:
        # If standard output is closed, there is nothing to discard.
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STANDARD_OUTPUT)
        yield
    finally:
        os.dup2(kept, STANDARD_OUTPUT)
        os.close(kept)
        os.close(nowhere)


# Chooses the stages of the best pipeline by mixed-integer linear programming, as Mist does.
#
# Each candidate of each stage has a binary variable: a stage takes one of its candidates, and the
# stages together have all blocks. For the iteration time, the recurrence of ``mistlab.cost.chains``
# (when each pass can start) becomes inequalities, from the last stage to the first.


# A linear expression of the package PuLP, which has no type annotations.
Expression = Any

# Plans whose times differ by less than this share count as equal for the solver.
GAP = 1e-6
# The solver may return plans that are up to this factor slower than the best known plan, to allow
# for the solver's tolerances.
ALMOST = 1 + 1e-5


def _highs(seconds: float) -> pulp.LpSolver:
    return pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=GAP)


def _cbc(seconds: float) -> pulp.LpSolver:
    # CBC is an optional dependency: pip install '.[cbc]'.
    from cbcbox import cbc_bin_path  # noqa: PLC0415

    return pulp.COIN_CMD(
        path=cbc_bin_path(), msg=False, timeLimit=seconds, gapRel=GAP, options=["timeMode elapsed"]
    )


SOLVERS: dict[str, Callable[[float], pulp.LpSolver]] = {"highs": _highs, "cbc": _cbc}


def join_by(solver: str, seconds: float) -> Callable[[Menus, float], tuple[float, Plan] | None]:
    """A function that solves a group of pipelines with one of ``SOLVERS``, until a time limit or
    the budget ends. The plan of a beam search is predicted first, in case the solver is stopped.
    """

    def join(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
        # The beam search's plan is an upper bound, by which most candidates are pruned.
        hasty = join_hastily(menus, limit_s)
        if hasty is not None:
            menus.ledger.predict([hasty[1]])
            limit_s = ALMOST * hasty[0]
        stages = places_by_stage(menus, limit_s)
        if not all(any(len(menus[place]) for place in places) for places in stages):
            return hasty
        before_s = menus.ledger.wall_s
        programme = StageProgramme(menus, stages)
        programme.minimise(_longest_chain(programme), limit_s)
        # Handing the linear programme to the solver takes about as long as building it, so the
        # solver's time limit is shortened by that time.
        handing_s = menus.ledger.wall_s - before_s
        if programme.solve(solver, min(seconds, menus.ledger.seconds_left - handing_s)):
            chosen = programme.chosen()
            if chosen is None:
                return hasty
            return float(pulp.value(programme.length)), plan_of(menus, chosen)
        # A stopped solver's pipeline is not proven to be the best.
        return join_exactly(menus, limit_s) or hasty

    return join


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStage:
    """One stage of the mixed-integer linear programme: its candidates, with a binary variable for
    each.
    """

    candidates: Sequence[tuple[StagePosition, int]]
    chosen: Sequence[pulp.LpVariable]

    def taken(self, values: Mapping[StagePosition, Column]) -> Expression:
        """The chosen candidate's value of a property, as a linear expression; ``values`` has the
        property of every candidate, by stage position.
        """
        each = [float(values[place][row]) for place, row in self.candidates]
        return pulp.LpAffineExpression(dict(zip(self.chosen, each, strict=True)))

    @property
    def places(self) -> set[StagePosition]:
        """Which stage (mesh, blocks, ranks) each candidate is for."""
        return {place for place, _ in self.candidates}


class Inequalities:
    """Builds linear expressions of durations. The maximum of several durations is a new variable,
    with an inequality for each of them.
    """

    def __init__(self, problem: pulp.LpProblem, stage: int, check_time: Callable[[], None]) -> None:
        self.nothing: Expression = pulp.LpAffineExpression()
        self._problem = problem
        self._stage = stage
        self._check_time = check_time

    def longest(self, name: str, *ways: Expression) -> Expression:
        """A new variable that is at least each of these durations and, like every variable, at
        least zero.
        """
        self._check_time()
        variable = self._problem.add_variable(f"{name}{self._stage}", lowBound=0)
        for way in ways:
            if way is not self.nothing:
                self._problem.addConstraint(variable >= way)
        return pulp.LpAffineExpression(variable)

    def may_exceed(self, lengths: Sequence[Expression], others: Sequence[Expression]) -> bool:
        """Whether the longest duration in ``lengths`` that a candidate may have exceeds the
        shortest in ``others``.
        """
        longest = max(max(one.values(), default=0.0) for one in lengths)
        return longest > min(min(one.values(), default=0.0) for one in others)


class StageProgramme:
    """The mixed-integer linear programme that chooses a candidate for each stage of a group's
    pipelines.

    ``stages`` are its stages, the last stage first; a solution has all blocks of the model.
    """

    def __init__(self, menus: Menus, places: Sequence[Sequence[StagePosition]]) -> None:
        self.menus = menus
        self.problem = pulp.LpProblem("stages", pulp.LpMinimize)
        self.stages = [self._stage(after, own) for after, own in enumerate(places)]
        self.length: Expression = pulp.LpAffineExpression()
        layers = pulp.lpSum(
            stage.taken({place: _blocks(menus, place) for place in stage.places})
            for stage in self.stages
        )
        self.problem.addConstraint(layers == menus.problem.workload.model.layers)
        if menus.with_host:
            self._share_hosts()

    @property
    def nothing(self) -> Expression:
        """A linear expression for a duration of zero."""
        return pulp.LpAffineExpression()

    def inequalities(self, after: int) -> Inequalities:
        """The ``Inequalities`` that belong to the stage with ``after`` stages behind it."""
        return Inequalities(self.problem, after, self.menus.ledger.check_time)

    def minimise(self, length: Expression, limit_s: float) -> None:
        """Set the objective of the linear programme: to minimise the pipeline's iteration time,
        which must stay below an upper bound.
        """
        self.length = length
        self.problem.setObjective(length)
        if limit_s < float("inf"):
            self.problem.addConstraint(length <= limit_s)

    def solve(self, solver: str, seconds: float) -> bool:
        """Run a solver until a time limit; True if it found the optimum or proved that there is no
        solution.
        """
        if seconds <= 0:
            return False
        with silent():
            self.problem.solve(SOLVERS[solver](seconds))
        is_best = self.problem.sol_status == pulp.LpSolutionOptimal
        return bool(is_best or self.problem.status == pulp.LpStatusInfeasible)

    def chosen(self, *, is_best: bool = True) -> Chosen | None:
        """Each stage's candidate in the best solution found; None if there is none. With
        ``is_best``, a solution counts only if it is proven optimal.
        """
        known = {pulp.LpSolutionOptimal}
        if not is_best:
            known.add(pulp.LpSolutionIntegerFeasible)
        if self.problem.sol_status not in known:
            return None
        stages = []
        for stage in reversed(self.stages):
            values = [variable.value() or 0.0 for variable in stage.chosen]
            stages.append(stage.candidates[values.index(max(values))])
        return tuple(stages)

    def _stage(self, after: int, places: Sequence[StagePosition]) -> ChosenStage:
        self.menus.ledger.check_time()
        candidates = [(place, row) for place in places for row in range(len(self.menus[place]))]
        chosen = [
            self.problem.add_variable(f"x{after}_{number}", cat=pulp.LpBinary)
            for number in range(len(candidates))
        ]
        self.problem.addConstraint(pulp.lpSum(chosen) == 1)
        return ChosenStage(candidates=candidates, chosen=chosen)

    def _share_hosts(self) -> None:
        """Add constraints of host memory: the stages on each node must together fit in the node's
        host memory.
        """
        cluster = self.menus.problem.cluster
        held: dict[int, Expression] = {}
        first_rank = cluster.num_gpus
        for stage in self.stages:
            mesh = stage.candidates[0][0].mesh
            first_rank -= mesh.num_gpus
            node = first_rank // cluster.gpus_per_node
            gpus = min(mesh.num_gpus, cluster.gpus_per_node)
            here = pulp.LpAffineExpression(
                {
                    variable: gpus * float(self.menus[position].host_bytes[row])
                    for variable, (position, row) in zip(
                        stage.chosen, stage.candidates, strict=True
                    )
                }
            )
            held[node] = held.get(node, 0) + here
        for node, here in held.items():
            room = host_room_at(cluster, np.array([node * cluster.gpus_per_node]))
            self.problem.addConstraint(here <= float(np.min(room)))


def _blocks(menus: Menus, position: StagePosition) -> Column:
    return np.full(len(menus[position]), float(position.layers))


def _longest_chain(programme: StageProgramme) -> Expression:
    """The iteration time as a linear expression: the longest path of dependent passes, by the
    recurrence of ``mistlab.cost.chains``.
    """
    menus = programme.menus
    has_host = ENGINES[menus.space.engine].host is not None
    names = [name for name in PASSES if has_host or name not in ISSUED]
    chains: Chains[Expression] = Chains.of_nothing(pulp.LpAffineExpression())
    for after, stage in enumerate(programme.stages):
        times = {place: menus[place].times for place in stage.places}
        passes = {
            name: stage.taken({place: getattr(own, name) for place, own in times.items()})
            for name in names
        }
        counts = Counts.of(menus.group.micro_batches, after + 1)
        chains = chained(programme.inequalities(after), PassLengths(**passes), chains, counts)
    return chains.whole
