"""Problems and spaces small enough to try every plan."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import Workload

MODELS = ("gpt3-1.3b", "gpt3-7b", "llama-1.3b")
CLUSTERS = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4))
EIGHTHS = np.arange(1, 9) / 8


def small_problem(seed: int) -> tuple[Problem, SearchSpace]:
    """A few blocks on a few GPUs, and a space with everything."""
    draw = np.random.default_rng(seed)
    model = replace(
        catalog.model(str(draw.choice(MODELS))), name="small", layers=int(draw.integers(3, 6))
    )
    workload = Workload(
        model=model,
        sequence_length=int(draw.choice([1024, 2048, 4096])),
        global_batch=int(draw.choice([8, 16, 32])),
        attention="flash",
        precision="fp16",
    )
    nodes, gpus = CLUSTERS[draw.integers(len(CLUSTERS))]
    cluster = Cluster(
        hardware=catalog.hardware("l4-24gb"),
        nodes=nodes,
        gpus_per_node=gpus,
        host_memory_gib=float(draw.uniform(4, 40)) if draw.random() < 0.3 else None,
    )
    space = replace(
        space_of("mist"),
        name="small",
        zero=tuple(sorted(draw.choice([0, 1, 2, 3], draw.integers(1, 3), replace=False).tolist())),
        micro_batch=(1, 2),
        offload=OffloadRatios(
            optimizer=_ratios(draw, 0.7),
            activations=_ratios(draw, 0.5),
            weights=_ratios(draw, 0.2),
            gradients=_ratios(draw, 0.1),
        ),
        layers_off_balance=[1, 2, None][draw.integers(3)],
        unequal_meshes=bool(draw.random() < 0.4),
        recomputation="any" if draw.random() < 0.7 else "none_or_all",
    )
    return Problem(workload=workload, cluster=cluster), space


def _ratios(draw: np.random.Generator, chance: float) -> tuple[float, ...]:
    return (0.0, float(draw.choice(EIGHTHS))) if draw.random() < chance else (0.0,)


def short_of_memory(problem: Problem, predictions: Sequence[Prediction]) -> Problem:
    """The same with a little less memory than the fastest of the plans needs."""
    fastest = min(predictions, key=lambda one: one.iteration_s)
    allocator = problem.cluster.hardware.allocator
    assert allocator is not None
    peak = fastest.peak_reserved_bytes + allocator.outside_bytes
    cluster = replace(problem.cluster, memory_gib=0.99 * peak / GIB_BYTES)
    return replace(problem, cluster=cluster)
