"""Joins candidates to a pipeline by an integer linear programme (Mist), solved by HiGHS or CBC."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from mistlab.cost.chains import ISSUED, PASSES, Chains, Counts, PassLengths, chained
from mistlab.cost.memory import host_room_at
from mistlab.engines.engine import ENGINES
from mistlab.plan.plan import Plan
from searchers.exact.candidates import Menus, StagePosition
from searchers.exact.programme import join as join_exactly
from searchers.exact.programme import join_hastily, places_by_stage

# Keeps what a library in C writes to standard output away from it.
#
# HiGHS 1.16 greets with its version wherever it is made, before anything can tell it to be silent;
# a command with ``--json`` writes one object to standard output and nothing else.


STANDARD_OUTPUT = 1


@contextmanager
def silent() -> Iterator[None]:
    """Let nothing that is written inside reach standard output, whoever writes it."""
    sys.stdout.flush()
    try:
        kept = os.dup(STANDARD_OUTPUT)
    except OSError:
        # It was closed, and whoever writes to it writes nowhere.
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


# Joins stages to the best pipeline by a mixed-integer linear programme, as Mist does.
#
# Each candidate of each stage has a binary variable: a stage takes one of its candidates, and
# together the stages have all blocks. The recurrence of ``mistlab.cost.chains`` adds the
# inequalities of chains, from the last stage to the first.


# PuLP is not typed.
Expression = Any

# Plans whose times differ by less than this share count as equal.
GAP = 1e-6
# Solvers look this far above a known plan's time, since they have tolerances of their own.
ALMOST = 1 + 1e-5


def _highs(seconds: float) -> pulp.LpSolver:
    return pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=GAP)


def _cbc(seconds: float) -> pulp.LpSolver:
    # CBC is installed as an extra: pip install '.[cbc]'.
    from cbcbox import cbc_bin_path  # noqa: PLC0415

    return pulp.COIN_CMD(
        path=cbc_bin_path(), msg=False, timeLimit=seconds, gapRel=GAP, options=["timeMode elapsed"]
    )


SOLVERS: dict[str, Callable[[float], pulp.LpSolver]] = {"highs": _highs, "cbc": _cbc}


def join_by(solver: str, seconds: float) -> Callable[[Menus, float], tuple[float, Plan] | None]:
    """A joiner that gives one of ``SOLVERS`` some seconds for a group, or the rest of the budget if
    that is less. The ledger sees a quick answer first, in case the solver is stopped."""

    def join(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
        # Candidates that are known to be slower than a quick answer are left out: most of them.
        hasty = join_hastily(menus, limit_s)
        if hasty is not None:
            menus.ledger.predict([hasty[1]])
            limit_s = ALMOST * hasty[0]
        stages = places_by_stage(menus, limit_s)
        if not all(any(len(menus[place]) for place in places) for places in stages):
            return hasty
        before_s = menus.ledger.wall_s
        programme = _Programme(menus, stages, limit_s)
        # Handing the programme to a solver takes about as long as making it, and does not count for
        # the solver's limit.
        handing_s = menus.ledger.wall_s - before_s
        if programme.solve(solver, min(seconds, menus.ledger.seconds_left - handing_s)):
            return programme.solution() or hasty
        # If the solver was stopped, nothing is proven.
        return join_exactly(menus, limit_s) or hasty

    return join


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One stage: its candidates, a variable for each, and the times of the chosen candidate."""

    candidates: Sequence[tuple[StagePosition, int]]
    chosen: Sequence[pulp.LpVariable]
    passes: PassLengths[Expression]
    layers: Expression


class _Inequalities:
    """Durations that are linear expressions. The longest of several ways is a variable, with an
    inequality for each way."""

    def __init__(self, problem: pulp.LpProblem, stage: int, check_time: Callable[[], None]) -> None:
        self.nothing: Expression = pulp.LpAffineExpression()
        self._problem = problem
        self._stage = stage
        self._check_time = check_time

    def longest(self, name: str, *ways: Expression) -> Expression:
        """A variable that is at least as long as each way; variables are never below zero."""
        self._check_time()
        variable = self._problem.add_variable(f"{name}{self._stage}", lowBound=0)
        for way in ways:
            if way is not self.nothing:
                self._problem.addConstraint(variable >= way)
        return pulp.LpAffineExpression(variable)

    def may_exceed(self, lengths: Sequence[Expression], others: Sequence[Expression]) -> bool:
        """Whether a length of any candidate is longer than another length of any candidate."""
        longest = max(max(one.values(), default=0.0) for one in lengths)
        return longest > min(min(one.values(), default=0.0) for one in others)


class _Programme:
    """The programme of a group of pipelines; turns its solution into a plan."""

    def __init__(
        self, menus: Menus, stages: Sequence[Sequence[StagePosition]], limit_s: float
    ) -> None:
        self.menus = menus
        self.problem = pulp.LpProblem("stages", pulp.LpMinimize)
        self.micro_batches = menus.group.micro_batches
        self.stages = [self._stage(after, places) for after, places in enumerate(stages)]
        chains: Chains[Expression] = Chains.of_nothing(pulp.LpAffineExpression())
        for after, stage in enumerate(self.stages):
            inequalities = _Inequalities(self.problem, after, menus.ledger.check_time)
            counts = Counts.of(self.micro_batches, after + 1)
            chains = chained(inequalities, stage.passes, chains, counts)
        self.iteration_s = chains.whole
        self.problem.setObjective(self.iteration_s)
        if limit_s < float("inf"):
            self.problem.addConstraint(self.iteration_s <= limit_s)
        layers = pulp.lpSum(stage.layers for stage in self.stages)
        self.problem.addConstraint(layers == menus.problem.workload.model.layers)
        if menus.with_host:
            self._share_hosts()

    def solve(self, solver: str, seconds: float) -> bool:
        """Run a solver for some seconds; whether it found the best solution or proved that there is
        none."""
        if seconds <= 0:
            return False
        with silent():
            self.problem.solve(SOLVERS[solver](seconds))
        is_best = self.problem.sol_status == pulp.LpSolutionOptimal
        return bool(is_best or self.problem.status == pulp.LpStatusInfeasible)

    def solution(self) -> tuple[float, Plan] | None:
        """The time and the plan of the solution, if there is one."""
        if self.problem.sol_status != pulp.LpSolutionOptimal:
            return None
        stages = []
        for stage in reversed(self.stages):
            values = [variable.value() or 0.0 for variable in stage.chosen]
            place, row = stage.candidates[values.index(max(values))]
            stages.append(self.menus[place].stage_plan(row, place.mesh, place.layers))
        plan = Plan(
            engine=self.menus.space.engine,
            micro_batches=self.micro_batches,
            stages=tuple(stages),
        )
        return float(pulp.value(self.iteration_s)), plan

    def _stage(self, after: int, places: Sequence[StagePosition]) -> _Stage:
        self.menus.ledger.check_time()
        candidates = [(place, row) for place in places for row in range(len(self.menus[place]))]
        chosen = [
            self.problem.add_variable(f"x{after}_{number}", cat=pulp.LpBinary)
            for number in range(len(candidates))
        ]
        self.problem.addConstraint(pulp.lpSum(chosen) == 1)

        times = {place: self.menus[place].times for place in places}

        def taken(name: str) -> Expression:
            values = [float(getattr(times[place], name)[row]) for place, row in candidates]
            return pulp.LpAffineExpression(dict(zip(chosen, values, strict=True)))

        has_host = ENGINES[self.menus.space.engine].host is not None
        names = [name for name in PASSES if has_host or name not in ISSUED]
        layers = [place.layers for place, _ in candidates]
        return _Stage(
            candidates=candidates,
            chosen=chosen,
            passes=PassLengths(**{name: taken(name) for name in names}),
            layers=pulp.LpAffineExpression(dict(zip(chosen, layers, strict=True))),
        )

    def _share_hosts(self) -> None:
        """Keep the stages of each node within its host memory."""
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
                    variable: gpus * float(self.menus[place].host_bytes[row])
                    for variable, (place, row) in zip(stage.chosen, stage.candidates, strict=True)
                }
            )
            held[node] = held.get(node, 0) + here
        for node, here in held.items():
            room = host_room_at(cluster, np.array([node * cluster.gpus_per_node]))
            self.problem.addConstraint(here <= float(np.min(room)))
