"""The times of stages on a cluster whose groups of nodes are unlike.

A stage has the times of its own group, as if all nodes were of that group. Only stages at a border
between two groups depend on both: a send takes as long as on the slower side, and so does the
reduction of a table that the first and the last stage share.

Axes: C candidates, S strategies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.figures_at import groups_of
from mistlab.cost.stage import StageTimeModel
from mistlab.cost.tasks import TaskModel, TaskSeconds
from mistlab.engines.engine import Engine
from mistlab.machine.cluster import Cluster
from mistlab.values.mesh import num_gpus
from mistlab.values.stages import StageBatch, StageSeconds
from mistlab.values.workload import Workload

Values = NDArray[np.float64]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Where the ``ranks`` of a group end, and the tasks of all groups by number; ``group`` is the
    group's own number."""

    ranks: range
    group: int
    groups: tuple[TaskModel, ...]

    def met(self, seconds: TaskSeconds) -> TaskSeconds:
        """The times of tasks, where those between two groups take as long as on the slower side."""
        first = seconds.columns["first_rank"].astype(np.int64)
        after = first + num_gpus(seconds.columns.__getitem__).astype(np.int64)
        if self.group > 0:
            rows = np.flatnonzero(first == self.ranks.start)
            there_s = self._there(self.group - 1, seconds, rows, lambda one: one.receive_s)
            seconds.receive_s = _slower(seconds.receive_s, rows, there_s)
        if self.group + 1 < len(self.groups):
            rows = np.flatnonzero(after == self.ranks.stop)
            there_s = self._there(self.group + 1, seconds, rows, lambda one: one.send_s)
            seconds.send_s = _slower(seconds.send_s, rows, there_s)
        if seconds.tied_s.any():
            every = np.arange(len(first))
            for other in range(len(self.groups)):
                there_s = self._there(other, seconds, every, lambda one: one.tied_s)
                seconds.tied_s = _slower(seconds.tied_s, every, there_s)
        return seconds

    def _there(
        self, group: int, seconds: TaskSeconds, rows: Rows, times: Callable[[TaskSeconds], Values]
    ) -> Values:
        """Times that some strategies (rows) would have in another group."""
        if not len(rows):
            return np.empty(0)
        chosen = {name: column[rows] for name, column in seconds.columns.items()}
        return times(self.groups[group].seconds(chosen))


def _slower(own_s: Values, rows: Rows, there_s: Values) -> Values:
    slower_s = own_s.copy()
    slower_s[rows] = np.maximum(own_s[rows], there_s)
    return slower_s


def task_models(
    workload: Workload,
    cluster: Cluster,
    engine: Engine,
    *,
    overlap_communication: bool = True,
    altered: Callable[[TaskModel], TaskModel] | None = None,
) -> tuple[TaskModel, ...]:
    """The tasks of stages in each group of a cluster's nodes; ``altered`` changes them before
    groups meet."""
    alone = tuple(
        TaskModel.of(workload, group, engine, overlap_communication=overlap_communication)
        for group in cluster.of_groups
    )
    if altered is not None:
        alone = tuple(map(altered, alone))
    if len(alone) == 1:
        return alone
    return tuple(
        replace(model, meet=Borders(ranks=ranks, group=group, groups=alone).met)
        for group, (model, ranks) in enumerate(zip(alone, cluster.ranks_of_groups, strict=True))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesOnGroups:
    """The times of a workload's stages on a cluster: a model of them for each group of nodes."""

    cluster: Cluster
    models: tuple[StageTimeModel, ...]

    @classmethod
    def of(cls, cluster: Cluster, tasks: tuple[TaskModel, ...]) -> Self:
        """The times of stages, from the tasks of each group."""
        return cls(cluster=cluster, models=tuple(StageTimeModel(tasks=one) for one in tasks))

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate, on the group at its first rank."""
        return self._seconds(lambda model, some: model(some), batch)

    def least(self, least: StageBatch, most: StageBatch) -> StageSeconds:
        """Times that no candidate undercuts that lies between those of ``least`` and ``most``."""
        return self._seconds(lambda model, *ends: model.least(*ends), least, most)

    def _seconds(self, times: Callable[..., StageSeconds], *batches: StageBatch) -> StageSeconds:
        names = [entry.name for entry in fields(StageSeconds)]

        def columns(model: StageTimeModel, *some: StageBatch) -> Values:
            seconds = times(model, *some)
            return np.stack([getattr(seconds, name) for name in names])

        if len(self.models) == 1:
            return times(self.models[0], *batches)
        return StageSeconds(**dict(zip(names, self.by_group(columns, *batches), strict=True)))

    @property
    def tasks(self) -> TaskModel:
        """The tasks of the first group; those of others have the same schedule and layers."""
        return self.models[0].tasks

    def by_group(self, times: Callable[..., Values], *batches: StageBatch) -> Values:
        """Times with candidates on the last axis (..., C), each by the model of its group."""
        found = [
            (rows, times(self.models[group], *(batch.chosen(rows) for batch in batches)))
            for group, rows in self._rows(batches[0])
        ]
        together = np.concatenate([own for _, own in found], axis=-1)
        order = np.argsort(np.concatenate([rows for rows, _ in found]), kind="stable")
        return np.asarray(together[..., order])

    def _rows(self, batch: StageBatch) -> Iterator[tuple[int, Rows]]:
        """The groups that have candidates, and the numbers of these candidates."""
        if len(self.models) == 1:
            yield 0, np.arange(len(batch))
            return
        group_of = groups_of(self.cluster, batch.first_rank)
        for group in np.unique(group_of).tolist():
            yield group, np.flatnonzero(group_of == group)
