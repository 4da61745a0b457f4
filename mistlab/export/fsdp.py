"""What PyTorch's FSDP2 can say of a plan, for the targets that are built on it.

FSDP2 shards weights, gradients and optimizer state. It gathers weights again for the backward pass,
as ZeRO-3 does, or keeps them gathered from the forward pass on, as ZeRO-2 does. Without it replicas
reduce whole gradients. Offloading takes weights, gradients and optimizer state to the host, all of
them.
"""

import math

from mistlab.export.nearest import canonical
from mistlab.export.rules import highest
from mistlab.export.with_parts import with_values
from mistlab.job.job import Job

STATES = ("offload_weights", "offload_gradients", "offload_optimizer")
# An engine of its own, if there is one; otherwise this package's, which streams layers as well.
ENGINES = ("fsdp", "mistlab")


def sharded(job: Job) -> Job:
    """ZeRO-0, 2 or 3, alike on all stages: ZeRO-1 becomes 2, and 0 too where states are
    offloaded. A single replica shards nothing, its experts neither."""
    level = int(highest(job, "zero"))
    if level == 1 or (level == 0 and offloads(job)):
        level = 2
    return canonical(with_values(job, {"zero": level}), shares_experts=False)


def states_offloaded(job: Job) -> Job:
    """All states offloaded, or none."""
    return with_values(job, dict.fromkeys(STATES, float(offloads(job))))


def offloads(job: Job) -> bool:
    """Whether any state of a stage is offloaded."""
    return any(highest(job, name) > 0 for name in STATES)


def fewest_replicas(job: Job) -> Job:
    """All stages have as many replicas of states as the stage with the fewest, if they shard."""
    first, *_ = stages = job.plan.stages
    fewest = min(stage.state_replicas for stage in stages) if first.zero else 1
    return with_values(job, {"state_replicas": math.gcd(fewest, first.data_parallel)})
