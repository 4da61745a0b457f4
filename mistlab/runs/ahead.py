"""Whether the host of a run's first stage gets ahead of its GPU, so that tensors of collectives
stay in memory."""

from collections.abc import Sequence

import numpy as np

from mistlab.cost.confidence import slowest_cluster
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.runs.configuration import Configuration


def host_is_ahead(run: Configuration, blocks: Sequence[int], cluster: Cluster) -> bool:
    """Whether the first stage's host gets ahead of its GPU.

    Without a pipeline it does. In a pipeline the GPU of a stage waits for its neighbours, while the
    host goes on; but a first stage with more blocks than any other never waits. Where sends are
    late on the slowest cluster that the engine is known on, hosts wait for them too.
    """
    if len(blocks) == 1:
        return True
    if blocks[0] > max(blocks[1:]):
        return False
    known = slowest_cluster(cluster, ENGINES[run.engine]) or cluster
    if known.profile is None:
        return True
    late_s = known.profile.send_s(np.array([run.tensor_parallel]), known.num_gpus)
    return not late_s.any()
