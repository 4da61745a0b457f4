"""Columns of stage candidates, and what each of them holds and does.

Axes: C candidates. Every column has length C.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.pipeline import in_flight
from mistlab.plan import Plan
from mistlab.symbolic.symbols import CHOICES, SIZES

Column = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBatch:
    """Candidates for one stage, each a row: its plan and its place in the pipeline.

    ``in_flight`` counts the micro-batches whose activations are held at once, the running one
    among them. ``has_embedding`` and ``has_head`` are 1 on the first and the last stage, else 0.
    """

    layers: Column
    data_parallel: Column
    tensor_parallel: Column
    micro_batch: Column
    zero: Column
    checkpointed_layers: Column
    offload_weights: Column
    offload_gradients: Column
    offload_optimizer: Column
    offload_activations: Column
    in_flight: Column
    has_embedding: Column
    has_head: Column

    def __post_init__(self) -> None:
        lengths = {entry.name: len(getattr(self, entry.name)) for entry in fields(self)}
        assert len(set(lengths.values())) == 1, f"columns of unlike lengths: {lengths}"

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """The stages of a plan, in order, under one forward and one backward pass in turn."""
        last = plan.num_stages - 1
        rows = [
            {
                "layers": stage.layers,
                "data_parallel": stage.data_parallel,
                "tensor_parallel": stage.tensor_parallel,
                "micro_batch": stage.micro_batch,
                "zero": stage.zero,
                "checkpointed_layers": stage.checkpointed_layers,
                "offload_weights": stage.offload.weights,
                "offload_gradients": stage.offload.gradients,
                "offload_optimizer": stage.offload.optimizer,
                "offload_activations": stage.offload.activations,
                "in_flight": in_flight(index, plan.num_stages, plan.micro_batches),
                "has_embedding": index == 0,
                "has_head": index == last,
            }
            for index, stage in enumerate(plan.stages)
        ]
        return cls(**{e.name: np.array([row[e.name] for row in rows]) for e in fields(cls)})

    @property
    def by_symbol(self) -> Mapping[str, Column]:
        """The columns under the short names that expressions use."""
        names = {column: symbol for symbol, column in {**SIZES, **CHOICES}.items()}
        return {names[entry.name]: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFigures:
    """What each candidate holds and does: bytes of one rank, work of one micro-batch on it.

    ``feasible`` is false where the sizes do not divide: the other figures then mean nothing. The
    peaks hold everything: states, buffers, activations and temporaries. ``moved_bytes`` are read
    and written by kernels, ``collective_bytes`` are messages between tensor-parallel ranks.
    """

    feasible: NDArray[np.bool_]
    parameters: NDArray[np.float64]
    weights_bytes: NDArray[np.float64]
    gradients_bytes: NDArray[np.float64]
    optimizer_bytes: NDArray[np.float64]
    activations_bytes: NDArray[np.float64]
    buffers_bytes: NDArray[np.float64]
    forward_peak_bytes: NDArray[np.float64]
    backward_peak_bytes: NDArray[np.float64]
    host_bytes: NDArray[np.float64]
    forward_flop: NDArray[np.float64]
    backward_flop: NDArray[np.float64]
    forward_moved_bytes: NDArray[np.float64]
    backward_moved_bytes: NDArray[np.float64]
    forward_collective_bytes: NDArray[np.float64]
    backward_collective_bytes: NDArray[np.float64]

    @property
    def peak_bytes(self) -> NDArray[np.float64]:
        """The higher of the two peaks."""
        return np.maximum(self.forward_peak_bytes, self.backward_peak_bytes)
