"""Optuna's samplers: TPE, CMA-ES, NSGA-II and random keys, on a study that may be kept.

A plan is a vector of keys in [0, 1), one for each choice that any plan of the space may ask for,
so that the space of keys is the same for all plans; a key becomes a place among the options there
are (random keys, Bean 1994).
"""

from collections.abc import Iterator

import numpy as np

from mistlab.values.dimensions import label_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.ledger import Ledger
from searchers.meshes import equal_pipelines
from searchers.savings import saving_names
from searchers.strategy import Ending, Strategy


def optuna_strategy(sampler: str, storage: str | None = None) -> Strategy:
    """A strategy that draws plans with one of ``optuna_study.SAMPLERS``.

    ``storage`` keeps the study, to go on later or to share it between processes: a database
    (``sqlite:///study.db``) or the path of a journal file. Studies in it are named by sampler,
    space and problem; processes that share one need seeds of their own.
    """

    def search(
        problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        # Importing Optuna takes half a second, which whoever does not use it need not wait for.
        from searchers.strategies.optuna_study import sample  # noqa: PLC0415

        return sample(problem, space, ledger, draw, sampler=sampler, storage=storage)

    return search


def key_names(problem: Problem, space: SearchSpace) -> list[str]:
    """The names of all choices that a plan of the space may ask for."""
    most = _most_stages(problem, space)
    names = ["micro_batches"]
    names += [f"mesh {stage}" for stage in range(most if space.unequal_meshes else 1)]
    if space.layers_off_balance != 0:
        names += [f"layers {stage}" for stage in range(most - 1)]
    for stage in range(most if space.unequal_stages else 1):
        names += [f"{saving} {stage}" for saving in _savings(space)]
    return names


def _savings(space: SearchSpace) -> Iterator[str]:
    for name in saving_names():
        listed = space.listed(name)
        if listed is None or len(listed) > 1:
            yield label_of(name)


def _most_stages(problem: Problem, space: SearchSpace) -> int:
    if not space.unequal_meshes:
        return max(pipeline.num_stages for pipeline in equal_pipelines(problem, space))
    return min(problem.cluster.num_gpus, problem.workload.model.layers)
