"""Whether a plan is one of a space's."""

from dataclasses import dataclass, field

from mistlab.values.plan import Offload, Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import OffloadRatios, SearchSpace
from mistlab.values.value import to_mapping
from searchers.choices import alike
from searchers.meshes import (
    Mesh,
    allows,
    checkpoint_counts,
    even_layers,
    layer_counts,
    lies_well,
    meshes,
    micro_batch_counts,
    zero_levels,
)


def contains(problem: Problem, space: SearchSpace, plan: Plan) -> bool:
    """Whether the space allows the plan for the problem."""
    return plan in Members(problem=problem, space=space)


@dataclass(slots=True, kw_only=True)
class Members:
    """The plans of a space, to ask about many of them."""

    problem: Problem
    space: SearchSpace
    _meshes: dict[int, frozenset[Mesh]] = field(default_factory=dict, init=False)

    def __contains__(self, plan: Plan) -> bool:
        return (
            plan.engine == self.space.engine
            and plan.overlap_communication
            and self._allows_meshes(plan)
            and self._allows_layers([stage.layers for stage in plan.stages])
            and all(self._allows_savings(stage, plan.num_stages) for stage in plan.stages)
            and (self.space.unequal_stages or _is_alike(plan))
        )

    def _allows_meshes(self, plan: Plan) -> bool:
        space, cluster = self.space, self.problem.cluster
        chosen = [mesh_of(stage) for stage in plan.stages]
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

    def _allows_savings(self, stage: StagePlan, num_stages: int) -> bool:
        return (
            stage.zero in zero_levels(self.space, stage.data_parallel, in_pipeline=num_stages > 1)
            and stage.checkpointed_layers in checkpoint_counts(self.space, stage.layers)
            and _allows_ratios(self.space.offload, stage.offload)
        )


def mesh_of(stage: StagePlan) -> Mesh:
    """The mesh of a stage."""
    return Mesh(
        data_parallel=stage.data_parallel,
        tensor_parallel=stage.tensor_parallel,
        micro_batch=stage.micro_batch,
    )


def _allows_ratios(allowed: OffloadRatios, chosen: Offload) -> bool:
    return all(ratio in getattr(allowed, name) for name, ratio in to_mapping(chosen).items())


def _is_alike(plan: Plan) -> bool:
    first = plan.stages[0]
    return all(stage == alike(first, stage.layers) for stage in plan.stages)
