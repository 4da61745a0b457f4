"""Tells whether a plan belongs to a space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.values.plan import Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import (
    Mesh,
    allows,
    even_layers,
    layer_counts,
    lies_well,
    mesh_of,
    meshes,
    micro_batch_counts,
    orders_of,
)
from searchers.savings import alike, saving_names


def contains(problem: Problem, space: SearchSpace, plan: Plan) -> bool:
    """Whether the space allows the plan for the problem."""
    return any(plan in Members(problem=problem, space=own) for own in space.of_engines)


@dataclass(slots=True, kw_only=True)
class Members:
    """The plans of one engine in a space; asks quickly about many plans."""

    problem: Problem
    space: SearchSpace
    _meshes: dict[int, frozenset[Mesh]] = field(default_factory=dict, init=False)
    _savings: dict[tuple[int, Mesh, bool], Mapping[str, frozenset[float]]] = field(
        default_factory=dict, init=False
    )

    def __contains__(self, plan: Plan) -> bool:
        meshes_of = [mesh_of(stage) for stage in plan.stages]
        return (
            plan.engine == self.space.engine
            and plan.overlap_communication
            and self._allows_order(plan)
            and self._allows_meshes(plan, meshes_of)
            and self._allows_layers([stage.layers for stage in plan.stages])
            and all(
                self._allows_savings(stage, mesh, plan.num_stages > 1)
                for stage, mesh in zip(plan.stages, meshes_of, strict=True)
            )
            and (self.space.unequal_stages or _is_alike(plan))
        )

    def _allows_order(self, plan: Plan) -> bool:
        layers = min(stage.layers for stage in plan.stages)
        return plan.order in orders_of(self.space, plan.num_stages, plan.micro_batches, layers)

    def _allows_meshes(self, plan: Plan, chosen: Sequence[Mesh]) -> bool:
        space, cluster = self.space, self.problem.cluster
        first_rank = 0
        for mesh in chosen:
            if not lies_well(first_rank, mesh.num_gpus, cluster):
                return False
            first_rank += mesh.num_gpus
        return (
            first_rank == cluster.num_gpus
            and allows(space.pipeline, plan.num_stages)
            and (space.unequal_meshes or len(set(chosen)) == 1)
            and self._meshes_for(plan.micro_batches).issuperset(chosen)
        )

    def _meshes_for(self, micro_batches: int) -> frozenset[Mesh]:
        if micro_batches not in self._meshes:
            allowed = micro_batches in micro_batch_counts(self.problem, self.space)
            found = meshes(self.problem, self.space, micro_batches) if allowed else ()
            self._meshes[micro_batches] = frozenset(found)
        return self._meshes[micro_batches]

    def _allows_layers(self, chosen: list[int]) -> bool:
        layers = self.problem.workload.model.layers
        if sum(chosen) != layers:
            return False
        if self.space.layers_off_balance == 0:
            return tuple(chosen) == even_layers(layers, len(chosen))
        counts = layer_counts(layers, len(chosen), self.space)
        return all(count in counts for count in chosen)

    def _allows_savings(self, stage: StagePlan, mesh: Mesh, in_pipeline: bool) -> bool:
        allowed = self._savings_for(stage.layers, mesh, in_pipeline)
        return all(stage.value(name) in choices for name, choices in allowed.items())

    def _savings_for(
        self, layers: int, mesh: Mesh, in_pipeline: bool
    ) -> Mapping[str, frozenset[float]]:
        key = layers, mesh, in_pipeline
        if key not in self._savings:
            self._savings[key] = {
                name: frozenset(
                    self.space.choices(
                        name, layers=layers, degree=mesh.value, in_pipeline=in_pipeline
                    )
                )
                for name in saving_names()
            }
        return self._savings[key]


def _is_alike(plan: Plan) -> bool:
    largest = max(plan.stages, key=lambda stage: stage.layers)
    return all(stage == alike(largest, stage.layers) for stage in plan.stages)
