"""The plans that each training system tries for a workload, from a grid of its own; those predicted
to be fastest come first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from experiments.bench.problem import order_of, predicted
from mistlab.core.files import read_yaml
from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from searchers.methods.exhaustive import all_plans
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

OURS = "mistlab"
# For each training system, the export format that must be able to express its plans.
TARGET = {
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "deepcompile": "deepspeed",
    "fsdp": "accelerate",
}
MICRO_BATCHES = (1, 2, 4, 8, 16)
SHARES = (0.0, 0.5, 1.0)
_GRIDS = read_yaml(Path(__file__).with_name("grids.yaml"))
# For each training system, its choices of how optimizer states are sharded and offloaded.
STATES: Mapping[str, Sequence[Mapping[str, float]]] = _GRIDS["states"]
# The grid of Megatron-core's users: all kinds of parallelism, with a sharded optimizer.
_FIXED: dict[str, Any] = {name: tuple(values) for name, values in _GRIDS["megatron"].items()}
MEGATRON = replace(space_of("megatron-core"), name="megatron", **_FIXED)
BUDGET = Budget(evaluations=2_000, seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that a training system tries, and its prediction; None if it cannot be predicted."""

    job: Job
    prediction: Prediction | None


def contenders(
    system: str, workload: Workload, cluster: Cluster, count: int, seed: int
) -> list[Contender]:
    """The first plans that a training system should try, as many as ``count`` says: plans predicted
    to fit first, fastest first.
    """
    if system == OURS:
        return _searched(workload, cluster, count, seed)
    jobs = dict.fromkeys(_of_grid(system, workload, cluster))
    answers = ((job, predicted(job)) for job in jobs)
    candidates = [
        Contender(job=job, prediction=None if isinstance(answer, InputError) else answer)
        for job, answer in answers
    ]
    if system == "megatron":
        candidates += _of_megatron(workload, cluster)
    return sorted(candidates, key=_order)[:count]


def _order(contender: Contender) -> tuple[bool, float]:
    """A sort key for a system's plans: the best first, those without a prediction last."""
    prediction = contender.prediction
    return (True, float("inf")) if prediction is None else order_of(prediction)


def _searched(workload: Workload, cluster: Cluster, count: int, seed: int) -> list[Contender]:
    """The best plan that this package's search finds in its own search space, followed by the
    fastest of the other plans that this search or a local search has predicted.
    """
    problem = Problem(workload=workload, cluster=cluster)
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    plans: dict[Plan, None] = {}
    for name in ("mist", "aceso"):
        if len(plans) < count:
            searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
            result = searcher.search(problem, space_of("mist"), BUDGET, seed)
            best = [] if result.plan is None else [result.plan]
            plans |= dict.fromkeys([*best, *(rival.plan for rival in result.rivals)])
    searched = [
        Contender(
            job=Job(workload=workload, cluster=cluster, plan=plan),
            prediction=predictor.predict(plan),
        )
        for plan in plans
    ]
    return [*searched[:1], *sorted(searched[1:], key=_order)][:count]


def _of_megatron(workload: Workload, cluster: Cluster) -> list[Contender]:
    """Every plan of the search space ``MEGATRON`` that recomputes none, half or all of its
    blocks.
    """
    plans = [
        plan
        for plan in all_plans(Problem(workload=workload, cluster=cluster), MEGATRON)
        if plan.stages[0].checkpointed_layers / plan.stages[0].layers in SHARES
    ]
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    return [
        Contender(job=Job(workload=workload, cluster=cluster, plan=plan), prediction=prediction)
        for plan, prediction in zip(plans, predictor.predict_many(plans), strict=True)
    ]


def _of_grid(system: str, workload: Workload, cluster: Cluster) -> Iterator[Job]:
    """The plans of a system's grid, each in the form that the system's framework can express."""
    if system in ("deepspeed", "deepcompile") and workload.precision == "bf16":
        # DeepSpeed accumulates gradients in 32 bits here, as all other systems do.
        workload = replace(workload, gradients="32bit")
    ranks, layers = cluster.num_gpus, workload.model.layers
    sequences, rest = divmod(workload.global_batch, ranks)
    if rest:
        return
    for micro_batch, share, states in product(MICRO_BATCHES, SHARES, STATES[system]):
        if sequences % micro_batch or _lacks(system, states, cluster):
            continue
        values: dict[str, Any] = {
            "layers": layers,
            "data_parallel": ranks,
            "tensor_parallel": 1,
            "micro_batch": micro_batch,
            "checkpointed_layers": round(share * layers),
            **states,
        }
        plan = Plan(micro_batches=sequences // micro_batch, stages=(StagePlan.of_values(values),))
        job = Job(workload=workload, cluster=cluster, plan=plan)
        sayable = nearest(job, TARGETS[TARGET[system]]).job
        # Only FSDP2 can recompute any set of blocks; for other systems the plan is reduced to what
        # they can express.
        yield job if system == "fsdp" else replace(sayable, cluster=cluster)


def _lacks(system: str, states: Mapping[str, float], cluster: Cluster) -> bool:
    """Whether a system lacks the package that it needs for offloading optimizer states.

    Megatron-core needs a package for it, and a GPU. DeepSpeed steps offloaded states with its own
    optimizer only on GPUs, and compiles whole steps only for GPUs.
    """
    offloaded = states.get("offload_optimizer", 0.0)
    is_cpu = cluster.hardware.gpu.cores is not None
    if system == "megatron":
        return offloaded > 0 and (is_cpu or find_spec("transformer_engine") is None)
    if system == "deepcompile":
        return is_cpu
    return system == "deepspeed" and is_cpu and 0 < offloaded < 1
