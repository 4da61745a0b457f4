"""The GPU memory that is used outside of torch's allocator: the context of CUDA or ROCm, and NCCL's
buffers.
"""

from collections.abc import Sequence
from itertools import accumulate

from experiments.runs.run_row import RunRow
from mistlab.core.units import MIB_BYTES
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import reader_of_degrees

# The MiB of a CUDA context with the kernels that a training step uses. The number is an estimate,
# not a measurement.
CONTEXT_MIB = 600
# The MiB of a CUDA context with all of torch's kernels, which torch before release 1.13 loads at
# once (later releases set ``CUDA_MODULE_LOADING`` to ``LAZY``). The number is the memory that
# Hugging Face's documentation shows after a first tensor.
WHOLE_CONTEXT_MIB = 1343
LAZY_FROM = "2022-11"

# The MiB of the buffers with which an NCCL channel connects to one neighbour: NCCL's default sizes
# in KiB for its protocols Simple, LL128 and LL (nccl/src/include/device.h).
CONNECTION_MIB = (4096 + 4800 + 512) / 1024
# The number of connections of an NCCL channel: one to receive in its ring, and one to each
# neighbour in its tree, which is a chain inside a node.
CONNECTIONS = 3
# The rate of an NCCL channel in GB/s, about that of one NVLink; and the number of copies that NCCL
# makes of each ring.
CHANNEL_GBYTES_PER_S, COPIES = 25.0, 2
FEWEST_CHANNELS, MOST_CHANNELS = 2, 24


def context_bytes(row: RunRow) -> float:
    """The bytes of a process's CUDA or ROCm context, for the release of torch that was current on
    the row's date.
    """
    is_whole = "" < row.date < LAZY_FROM
    return (WHOLE_CONTEXT_MIB if is_whole else CONTEXT_MIB) * MIB_BYTES


def communicator_bytes(cluster: Cluster) -> float:
    """The bytes of the buffers of one NCCL communicator, which has as many channels as it needs to
    reach the rate of the links.
    """
    rate = cluster.hardware.node.intra_node_gbytes_per_s
    channels = COPIES * int(rate / CHANNEL_GBYTES_PER_S)
    channels = min(max(channels, FEWEST_CHANNELS), MOST_CHANNELS)
    return channels * CONNECTIONS * CONNECTION_MIB * MIB_BYTES


def buffers_bytes(job: Job) -> tuple[float, ...]:
    """The bytes of all communicators' buffers on a GPU of each stage."""
    each, last = communicator_bytes(job.cluster), len(job.plan.stages) - 1
    degrees = reader_of_degrees()
    return tuple(
        each * _communicators(degrees(stage), index, last, job.plan.num_gpus)
        for index, stage in enumerate(job.plan.stages)
    )


def _communicators(degrees: Sequence[float], index: int, last: int, gpus: int) -> int:
    """The communicators of a GPU of a stage: one of all ranks, one for each parallel axis, one for
    the gradient norm of a replica, one with each neighbouring stage (torch makes one per pair of
    ranks that send), and one of the first and the last stage, which share the embedding.
    """
    axes = sum(ranks > 1 for ranks in degrees)
    neighbours = (index > 0) + (index < last)
    is_end = last > 0 and index in (0, last)
    return (gpus > 1) + axes + (last > 0) + neighbours + is_end


def stages_of_node(job: Job) -> int:
    """The number of stages that have GPUs in the first node."""
    ends = accumulate(stage.num_gpus for stage in job.plan.stages)
    return 1 + sum(end < job.cluster.gpus_per_node for end in [*ends][:-1])
