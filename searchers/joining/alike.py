"""Plans whose stages all save memory alike: whole iterations, in columns.

Axes: C candidates, S stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import StageTimes, iteration_s
from mistlab.schedule.orders import in_flight
from mistlab.values.plan import Offload, Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.stages import StageBatch, StageCosts
from searchers.choices import alike
from searchers.joining.candidates import coarse, neighbours, spread
from searchers.ledger import Ledger
from searchers.meshes import Pipeline, checkpoint_counts, even_layers, zero_levels

# Stage candidates asked for at once.
TOGETHER = 1 << 19

# ZeRO level, ratios of weights, gradients, optimizer state and activations, blocks computed again.
Candidates = NDArray[np.float64]
# All of these but the last.
SavingsRow = tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class AlikeStages:
    """A pipeline whose stages are alike, and all the ways to save memory on them.

    ``axes`` are what each column of candidates may be.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    pipeline: Pipeline
    shares: tuple[int, ...] = field(init=False)
    axes: tuple[Sequence[float], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = even_layers(self.problem.workload.model.layers, self.pipeline.num_stages)
        self.axes = (
            zero_levels(
                self.space,
                self.pipeline.meshes[0].data_parallel,
                in_pipeline=self.pipeline.num_stages > 1,
            ),
            *self.space.offload.kinds,
            checkpoint_counts(self.space, self.shares[0]),
        )

    def show_all(self) -> float:
        """Let the ledger see the fastest plan that fits, if it beats its best; its seconds."""
        return float(self._show(np.array([*product(*self.axes)], dtype=np.float64)).min())

    def show_coarse(self) -> float:
        """The same of coarse ratios, and recomputation in quarters."""
        zero, *ratios, counts = self.axes
        some = (zero, *coarse(ratios, is_alone=self._is_alone), spread(counts, 4))
        return float(self._show(np.array([*product(*some)], dtype=np.float64)).min())

    def show_near(self, count: int) -> None:
        """Go from the fastest few strategies of coarse ratios to better ones beside them, in ever
        smaller steps, each with any number of recomputed blocks."""
        zero, *ratios, _ = self.axes
        new = set(product(zero, *coarse(ratios, is_alone=self._is_alone)))
        best_s: dict[SavingsRow, float] = {}
        step = max(len(kind) - 1 for kind in ratios) // 4 or 1
        while step:
            best_s |= self._show_strategies(sorted(new))
            best = sorted(best_s, key=lambda strategy: (best_s[strategy], strategy))[:count]
            new = {near for one in best for near in neighbours(one, ratios, step)} - best_s.keys()
            if not new:
                step //= 2

    @property
    def _is_alone(self) -> bool:
        return self.pipeline.num_stages == 1

    def _show_strategies(self, strategies: Sequence[SavingsRow]) -> dict[SavingsRow, float]:
        """The best seconds of each strategy."""
        counts = self.axes[-1]
        candidates = [(*strategy, count) for strategy in strategies for count in counts]
        seconds = self._show(np.array(candidates, dtype=np.float64).reshape(-1, len(self.axes)))
        best = seconds.reshape(len(strategies), len(counts)).min(axis=1)
        return dict(zip(strategies, best.tolist(), strict=True))

    def _show(self, candidates: Candidates) -> NDArray[np.float64]:
        """Seconds (C) of an iteration, infinite where a stage does not fit."""
        at_once = max(1, TOGETHER // self.pipeline.num_stages)
        found = []
        for start in range(0, len(candidates), at_once):
            some = candidates[start : start + at_once]
            costs = self.ledger.stage_costs(self._batch(some), engine=self.space.engine)
            seconds = _iterations(costs, self.pipeline, len(some))
            found.append(seconds)
            for row in np.argsort(seconds, kind="stable"):
                # A node's host memory is shared by its stages, which only a whole plan shows.
                if seconds[row] >= self.ledger.best_s:
                    break
                if self.ledger.predict([self._plan(some[row])])[0].fits:
                    break
        return np.concatenate([np.empty(0), *found])

    def _batch(self, candidates: Candidates) -> StageBatch:
        """Each candidate's stages, one stage of all candidates after another."""
        pipeline, rows = self.pipeline, len(candidates)
        stages, mesh = pipeline.num_stages, pipeline.meshes[0]
        columns = np.tile(candidates, (stages, 1)).T
        zero, weights, gradients, optimizer, activations, recomputed = columns
        layers, number = np.repeat(self.shares, rows), np.arange(stages)
        held = [in_flight(stage, stages, pipeline.micro_batches) for stage in range(stages)]
        in_node = np.array(pipeline.first_ranks()) % self.problem.cluster.gpus_per_node
        return StageBatch(
            layers=layers,
            data_parallel=np.full(len(layers), mesh.data_parallel),
            tensor_parallel=np.full(len(layers), mesh.tensor_parallel),
            micro_batch=np.full(len(layers), mesh.micro_batch),
            zero=zero.astype(np.int64),
            checkpointed_layers=np.minimum(recomputed.astype(np.int64), layers),
            offload_weights=weights,
            offload_gradients=gradients,
            offload_optimizer=optimizer,
            offload_activations=activations,
            in_flight=np.repeat(held, rows),
            has_embedding=np.repeat((number == 0).astype(np.int64), rows),
            has_head=np.repeat((number == stages - 1).astype(np.int64), rows),
            first_rank=np.repeat(in_node, rows),
        )

    def _plan(self, candidate: NDArray[np.float64]) -> Plan:
        zero, weights, gradients, optimizer, activations, recomputed = candidate.tolist()
        mesh = self.pipeline.meshes[0]
        first = StagePlan(
            layers=self.shares[0],
            data_parallel=mesh.data_parallel,
            tensor_parallel=mesh.tensor_parallel,
            micro_batch=mesh.micro_batch,
            zero=int(zero),
            checkpointed_layers=int(recomputed),
            offload=Offload(
                weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
            ),
        )
        return Plan(
            engine=self.space.engine,
            micro_batches=self.pipeline.micro_batches,
            stages=tuple(alike(first, own) for own in self.shares),
        )


def _iterations(costs: StageCosts, pipeline: Pipeline, rows: int) -> NDArray[np.float64]:
    """Seconds (C) of an iteration; infinite where a stage does not fit."""
    times = StageTimes(
        **{
            entry.name: getattr(costs.seconds, entry.name).reshape(-1, rows).T
            for entry in fields(StageTimes)
        }
    )
    seconds = iteration_s(times, np.full(rows, pipeline.micro_batches))
    return np.where(costs.fits.reshape(-1, rows).all(axis=0), seconds, np.inf)
