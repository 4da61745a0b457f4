"""The memory that an iteration of a small model takes, held against what is predicted."""

from mistlab.values.plan import Offload, Plan
from mistlab.values.workload import Workload
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


def taken_bytes(work: Workload, plan: Plan, connections: Connections) -> int:
    """The most that is on the device during the second iteration."""
    return memory_taken(work, plan, connections)[0]


def memory_taken(work: Workload, plan: Plan, connections: Connections) -> tuple[int, int]:
    """The most that is on the device during the second iteration, and what is on the host."""
    with Allocations() as allocations:
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
