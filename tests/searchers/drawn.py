"""Random problems of every named space, so small that each of their plans can be predicted.

A space is thinned until it has few plans: of each list some values stay, at least one.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.cost.memory import allocator_of
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import SPACES, space_of
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import ModelSpec, Workload
from searchers.methods.exhaustive import count_plans
from searchers.parts import parts_of
from tests.workloads import workload_of

# The first of these is another's name, the second a part of ``megatron-today``, the third has a
# test of its own, and the fourth is ``fsdp`` with fewer degrees.
ALIKE = ("+imbalance", "megatron-core", "tempo", "trainer")
NAMES = tuple(name for name in SPACES if name not in ALIKE)
# Models of blocks with experts, and others.
WITH_EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b")
# Models whose kinds of blocks take turns, by a period or once, and clusters that divide badly.
TURNING = (
    *("gpt-oss-20b", "deepseek-v2-lite", "llama4-maverick", "qwen3-next-80b-a3b"),
    *("nemotron-h-8b", "nemotron-3-nano"),
)
DIVIDING_BADLY = ((1, 5), (1, 7), (5, 2))
DENSE = ("gpt3-350m", "gpt3-2.7b", "llama-1.3b", "llama3-8b", "falcon-1.3b", "qwen3-1.7b")
# The first one has no bf16.
HARDWARE = ("v100-32gb", "l4-24gb", "a100-40gb", "h100-80gb")
CLUSTERS = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (2, 1), (2, 2), (2, 3), (2, 4))
# A space has at most this many plans, and at least one of these numbers.
MOST, FEWEST = 2000, (8, 100, 800, 800, 800)
TRIES = 1000
# Lists of a space of which some values stay.
THINNED = ("sequence_parallel", "context_parallel", "expert_parallel", "orders")


def drawn_problem(seed: int, names: Sequence[str] = NAMES) -> tuple[Problem, SearchSpace]:
    """A problem and a space of a few plans; neighbouring seeds have different spaces."""
    draw = np.random.default_rng(seed)
    for _ in range(TRIES):
        space = _space(draw, names[seed % len(names)])
        problem = _problem(draw, space)
        if draw.choice(FEWEST) <= count_plans(problem, space, MOST) <= MOST:
            return problem, space
    message = f"{TRIES} spaces like {names[seed % len(names)]} have too few or too many plans"
    raise AssertionError(message)


def drawn_turning(seed: int, names: Sequence[str]) -> tuple[Problem, SearchSpace]:
    """The same with blocks whose kinds take turns, and every third time with GPUs that divide
    badly, some of which plans may leave idle."""
    draw = np.random.default_rng(seed)
    nodes, gpus = DIVIDING_BADLY[draw.integers(len(DIVIDING_BADLY))]
    for attempt in range(TRIES):
        problem, space = drawn_problem(seed + attempt * len(names) * TRIES, names)
        name = str(draw.choice(TURNING))
        work = workload_of(
            name,
            problem.workload.sequence_length,
            problem.workload.global_batch,
            "bf16",
            layers=int(draw.integers(3, 7)),
        )
        if ENGINES[space.engine].precision_problem("bf16"):
            work = replace(work, precision="fp16")
        cluster = replace(problem.cluster, hardware=catalog.hardware("h100-80gb"))
        if seed % 3 == 0:
            cluster = replace(cluster, nodes=nodes, gpus_per_node=gpus)
        problem = replace(problem, workload=work, cluster=cluster)
        every = (problem, *parts_of(problem, has_plans=True))
        if 2 <= sum(count_plans(one, space, MOST) for one in every) <= MOST:
            return problem, space
    message = f"{TRIES} spaces like {names[seed % len(names)]} have too few or too many plans"
    raise AssertionError(message)


def with_less_memory(problem: Problem, predictions: Sequence[Prediction], share: float) -> Problem:
    """The same with GPUs that hold a share of the plans' different peaks, the smallest at least."""
    peaks = sorted({p.peak_reserved_bytes for p in predictions})
    peak = peaks[int(share * (len(peaks) - 1))] + allocator_of(problem.cluster).outside_bytes
    memory_gib = (peak + 1) / GIB_BYTES
    return replace(problem, cluster=replace(problem.cluster, memory_gib=memory_gib))


def _problem(draw: np.random.Generator, space: SearchSpace) -> Problem:
    has_experts = space.expert_parallel != (1,) and draw.random() < 0.7
    nodes, gpus = CLUSTERS[draw.integers(len(CLUSTERS))]
    precision = "bf16" if ENGINES[space.engine].precision_problem("fp16") else "fp16"
    return Problem(
        workload=Workload(
            model=_model(draw, WITH_EXPERTS if has_experts else DENSE),
            sequence_length=int(draw.choice([512, 1024, 2048])),
            global_batch=int(draw.choice([2, 4, 6, 8, 16])),
            attention="flash",
            precision=precision,  # type: ignore[arg-type]
        ),
        cluster=Cluster(
            hardware=catalog.hardware(str(draw.choice(HARDWARE[precision == "bf16" :]))),
            nodes=nodes,
            gpus_per_node=gpus,
            host_memory_gib=float(draw.uniform(4, 40)) if draw.random() < 0.2 else None,
        ),
    )


def _model(draw: np.random.Generator, names: Sequence[str]) -> ModelSpec:
    return replace(catalog.model(str(draw.choice(names))), name="", layers=int(draw.integers(2, 6)))


def _space(draw: np.random.Generator, name: str) -> SearchSpace:
    space = space_of(name)
    ratios = {one.name: getattr(space.offload, one.name) for one in fields(space.offload)}
    return replace(
        space,
        **{one: _some(draw, getattr(space, one)) for one in THINNED},
        # No level goes with every engine and pipeline but the lowest.
        zero=tuple({min(space.zero), *_some(draw, space.zero)}),
        micro_batch=_some(draw, [1, 2, 4]) if draw.random() < 0.7 else space.micro_batch,
        micro_batches=_some(draw, [1, 2, 4, 8]) if draw.random() < 0.5 else None,
        offload=OffloadRatios(**{kind: _some(draw, own) for kind, own in ratios.items()}),
    )


def _some(draw: np.random.Generator, values: Sequence[object]) -> tuple[object, ...]:
    """Some of the values, in order; few of many."""
    number = int(draw.integers(1, min(len(values), draw.choice([1, 2, 3, 9])) + 1))
    return tuple(values[place] for place in sorted(draw.choice(len(values), number, replace=False)))
