"""The pipelines of a space in groups that can be searched one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mistlab.search import Problem
from mistlab.space import SearchSpace
from searchers.bounds import Work
from searchers.meshes import Mesh, Pipeline, allows, equal_pipelines, meshes, micro_batch_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pipelines of so many micro-batches, with stages of any of the meshes.

    ``num_stages`` is None where meshes are of different sizes and their number is left open.
    """

    micro_batches: int
    meshes: tuple[Mesh, ...]
    num_stages: int | None

    def equal_pipelines(self, problem: Problem) -> Iterator[Pipeline]:
        """Those whose stages have one mesh."""
        for mesh in self.meshes:
            num_stages, rest = divmod(problem.cluster.num_gpus, mesh.num_gpus)
            is_one = num_stages <= problem.workload.model.layers and self._allows(num_stages)
            if not rest and is_one:
                yield Pipeline(micro_batches=self.micro_batches, meshes=(mesh,) * num_stages)

    def _allows(self, num_stages: int) -> bool:
        return self.num_stages in (None, num_stages)

    def least_s(self, problem: Problem, work: Mapping[Mesh, Work]) -> float:
        """What all of them take at least: the slowest stage takes an even share or more in each
        micro-batch. Of what the stages after it take it can hide half its passes ahead, the
        forwards or the backwards; the rest is on top."""
        layers, gpus = problem.workload.model.layers, problem.cluster.num_gpus
        ends_s = min(work[mesh].ends_s * mesh.num_gpus for mesh in self.meshes)
        slowest_s = (self.least_gpu_s(work, layers) + ends_s) / gpus
        stages = self.num_stages or min(layers, gpus)
        ahead = min(self.micro_batches, stages) - 1
        through_s = self.least_stages_s(work, layers) + ends_s / self._largest
        return through_s + (self.micro_batches - 1 - ahead / 2) * slowest_s

    def least_gpu_s(self, work: Mapping[Mesh, Work], layers: int) -> float:
        """GPU-seconds that a micro-batch takes in so many blocks at least."""
        return layers * min(work[mesh].block_s * mesh.num_gpus for mesh in self.meshes)

    def least_stages_s(self, work: Mapping[Mesh, Work], layers: int) -> float:
        """What stages of so many blocks together take at least in one micro-batch."""
        return self.least_gpu_s(work, layers) / self._largest

    @property
    def _largest(self) -> int:
        return max(mesh.num_gpus for mesh in self.meshes)


def groups_of(problem: Problem, space: SearchSpace) -> Iterator[Group]:
    """All pipelines of the space."""
    if not space.unequal_meshes:
        for pipeline in equal_pipelines(problem, space):
            yield Group(
                micro_batches=pipeline.micro_batches,
                meshes=pipeline.meshes[:1],
                num_stages=pipeline.num_stages,
            )
        return
    for micro_batches in micro_batch_counts(problem, space):
        choices = tuple(meshes(problem, space, micro_batches))
        if choices:
            for num_stages in _stage_counts(problem, space):
                yield Group(micro_batches=micro_batches, meshes=choices, num_stages=num_stages)


def _stage_counts(problem: Problem, space: SearchSpace) -> list[int | None]:
    """Numbers of stages, where it matters which."""
    if space.layers_off_balance is None and space.pipeline is None:
        return [None]
    most = min(problem.workload.model.layers, problem.cluster.num_gpus)
    return [count for count in range(1, most + 1) if allows(space.pipeline, count)]
