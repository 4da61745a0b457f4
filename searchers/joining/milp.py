"""Joins stages to the best pipeline by a mixed-integer linear programme, as Mist does.

Each candidate of each stage has a binary variable: a stage takes one of its candidates, and
together the stages have all blocks. The chains of ``mistlab.cost.pipeline`` are longest paths. Each
chain becomes a variable, with an inequality for every way that the path can go, from the last stage
to the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from mistlab.cost.pipeline import CROSSINGS, Rounds
from mistlab.values.plan import Plan
from searchers.joining.candidates import Menus, StagePosition
from searchers.joining.programme import join as join_exactly
from searchers.joining.programme import join_hastily, places_by_stage

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
    times: Mapping[str, Expression]
    layers: Expression
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """The chains of a stage and the stages behind it, as in ``mistlab.cost.pipeline``."""

    nearest: Expression
    around: Expression
    around_first: Expression
    around_last: Expression
    around_begun: Expression
    around_ended: Expression
    through: Expression
    through_begun: Expression
    through_ended: Expression
    whole: Expression


# The fields of a candidate's ``StageTimes`` that are used.
_TIMES = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s", "begin_s", "end_s"),
    *("within_forward_s", "within_backward_s", "point_to_point_s"),
)


def _from_in_front(chains: _Chains, there_and_back_s: Expression) -> _Chains:
    return _Chains(
        **{
            name: getattr(chains, name) + crossings / 2 * there_and_back_s
            for name, crossings in CROSSINGS.items()
        }
    )


class _Programme:
    """The programme of a group of pipelines; turns its solution into a plan."""

    def __init__(
        self, menus: Menus, stages: Sequence[Sequence[StagePosition]], limit_s: float
    ) -> None:
        self.menus = menus
        self.problem = pulp.LpProblem("stages", pulp.LpMinimize)
        self.micro_batches = menus.group.micro_batches
        self.stages = [self._stage(after, places) for after, places in enumerate(stages)]
        nothing = pulp.LpAffineExpression()
        chains = _Chains(**dict.fromkeys(_Chains.__dataclass_fields__, nothing))
        for after, stage in enumerate(self.stages):
            menus.ledger.check_time()
            chains = self._prepended(after, stage, chains)
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

        layers = [place.layers for place, _ in candidates]
        return _Stage(
            candidates=candidates,
            chosen=chosen,
            times={name: taken(name) for name in _TIMES},
            layers=pulp.LpAffineExpression(dict(zip(chosen, layers, strict=True))),
            in_flight=places[0].in_flight,
        )

    def _prepended(self, number: int, stage: _Stage, after: _Chains) -> _Chains:
        times = stage.times
        begin, end, nothing = times["begin_s"], times["end_s"], pulp.LpAffineExpression()
        forward, backward = times["through_forward_s"], times["through_backward_s"]
        first = forward + times["within_forward_s"]
        last = backward + times["within_backward_s"]
        after = _from_in_front(after, times["point_to_point_s"])

        def longest(name: str, *ways: Expression) -> Expression:
            variable = self.problem.add_variable(f"{name}{number}", lowBound=0)
            self.menus.ledger.check_time()
            for way in ways:
                self.problem.addConstraint(variable >= way)
            return pulp.LpAffineExpression(variable)

        held = after.nearest if number >= self.micro_batches else None

        def own(*ends: Expression) -> list[Expression]:
            return self._own(stage, rounds, held, *ends)

        rounds = longest("R", *self._rounds(stage, after))
        there = first + after.around_first
        back = after.around_last + last
        there_begun = longest("there", begin + there, after.around_begun)
        back_ended = longest("back", back + end, after.around_ended)
        through_begun = longest("begun", begin + first + after.through, after.through_begun)
        through_ended = longest("ended", after.through + last + end, after.through_ended)
        around_begun = longest("AB", begin + first + after.around_first, after.around_begun)
        around_ended = longest("AE", after.around_last + last + end, after.around_ended)
        return _Chains(
            nearest=forward + backward + (held or nothing),
            around=forward + after.around + backward,
            around_first=first + after.around_first + backward,
            around_last=forward + after.around_last + last,
            around_begun=around_begun + backward,
            around_ended=forward + around_ended,
            through=longest("T", *own(nothing, there, back, nothing), first + after.through + last),
            through_begun=longest(
                "TB", *own(begin, there_begun, back, nothing), through_begun + last
            ),
            through_ended=longest(
                "TE", *own(nothing, there, back_ended, end), first + through_ended
            ),
            whole=longest(
                "W",
                *own(begin, there_begun, back_ended, end),
                through_begun + last + end,
                begin + first + after.through_ended,
                after.whole,
            ),
        )

    def _rounds(self, stage: _Stage, after: _Chains) -> list[Expression]:
        """The seconds of rounds beyond the passes that the stage does meanwhile."""
        counts = Rounds.of(np.array(self.micro_batches), np.array(stage.in_flight))
        both = stage.times["forward_s"] + stage.times["backward_s"]
        waited = stage.times["backward_s"] - stage.times["through_backward_s"]
        near = after.nearest - both - waited
        far = after.around - (stage.in_flight - 1) * both
        nested = far - stage.times["point_to_point_s"]
        return [int(counts.near) * near, int(counts.far) * far + int(counts.nested) * nested]

    def _own(
        self,
        stage: _Stage,
        rounds: Expression,
        held: Expression | None,
        begins: Expression,
        there: Expression,
        back: Expression,
        ends: Expression,
    ) -> list[Expression]:
        """The chains that wait at this stage."""
        ahead, times = stage.in_flight, stage.times
        forward, backward = times["forward_s"], times["backward_s"]
        pairs, alone = (self.micro_batches - ahead) * (forward + backward), ahead - 1
        last = times["through_backward_s"] + times["within_backward_s"]
        to_last_forward = (
            times["through_forward_s"] + times["within_forward_s"] + alone * forward + pairs
        )
        ways = [
            begins + to_last_forward + ahead * backward + times["within_backward_s"] + ends,
            there + pairs + alone * backward + last + ends,
            begins + to_last_forward + back,
        ]
        if held is not None:
            # With fewer micro-batches than stages, the last forward comes back with the first
            # gradient.
            ways.append(begins + to_last_forward + held + alone * backward + last + ends)
        if self.micro_batches > ahead:
            ways.append(there + pairs + rounds + back)
        return ways

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
        for here in held.values():
            self.problem.addConstraint(here <= cluster.host_memory_bytes)
