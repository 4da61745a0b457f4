"""The memory that an iteration of a small model takes, held against what is predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mistlab.plan.plan import Offload, Plan
from mistlab.plan.workload import Workload
from runtime.comm.topology import Connections
from runtime.engine.streams.device_streams import SimulatedStreams
from tests.runtime.allocations import Allocations
from tests.runtime.worlds import TRAINING, begun, run_step

SIZES = {"hidden": 256, "ffn": 1024, "vocab": 2048, "sequence_length": 128}
# A feed-forward layer's inner tensor.
LARGEST_BYTES = 2 * 128 * 1024 * 4
# A weight of that layer. Predictions have its gradient beside the tensors of the pass that makes
# it, as graphs have it; here the product adds it to the sums, and a peak may be less.
LARGEST_WEIGHT_BYTES = 256 * 1024 * 4
# Products of fewer multiplications are computed: routers choose experts by some.
MOST_MULTIPLIED = 2**22
ATEN = torch.ops.aten


class Unmultiplied(Allocations):
    """Counts storages, and leaves out large products, which take half of the time: their results
    are zeros, and sums that they are added to stay as they are."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in {ATEN.mm.default, ATEN.addmm_.default}:
            *into, left, right = args
            if left.numel() * right.shape[1] > MOST_MULTIPLIED:
                result = into[0] if into else left.new_zeros(len(left), right.shape[1])
                self.note(result.untyped_storage())
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def taken_bytes(work: Workload, plan: Plan, connections: Connections) -> int:
    """The most that is on the device during the second iteration."""
    return memory_taken(work, plan, connections)[0]


def memory_taken(work: Workload, plan: Plan, connections: Connections) -> tuple[int, int]:
    """The most that is on the device during the second iteration, and what is on the host."""
    with Unmultiplied() as allocations:
        executor = begun(work, plan, connections, SimulatedStreams(), TRAINING)
        run_step(executor, work, connections, 0)
        executor.streams.spans()
        allocations.most_bytes = 0
        run_step(executor, work, connections, 1)
    return allocations.most_bytes - executor.host_bytes, executor.host_bytes


def assert_predicted(taken: int, predicted: float, offload: Offload, *, rel: float = 0.01) -> None:
    """Activations leave as whole storages: in sum one may be too many for a ratio, and of the block
    that is whole for its neighbour's sake another."""
    storages = 2 * LARGEST_BYTES if 0 < offload.activations < 1 else 0
    more = max(rel * predicted, storages)
    assert predicted - LARGEST_WEIGHT_BYTES - more <= taken <= predicted + more
