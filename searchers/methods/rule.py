"""Rules of thumb for parallel degrees, without a search: the rule of Megatron-LM's authors (SC
2021, section 3), and where weights are frozen the rule of Hugging Face's programs.

By the first rule, the tensor-parallel degree is as large as a node and the model's sizes allow. The
pipeline has the fewest stages with which a plan fits in memory. Data parallelism uses the remaining
GPUs, every block is recomputed, and nothing is sharded over the replicas. By the second rule, all
GPUs are replicas that shard the weights, and every block is recomputed. Of the micro-batch sizes
that fit, the fastest is taken.
"""

from collections.abc import Iterator

from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction, Predictor
from mistlab.job.search import Problem
from mistlab.plan.dimension import degree_problem
from mistlab.plan.dimensions import RECOMPUTED
from mistlab.plan.plan import Plan, StagePlan

ENGINE = "megatron"
# Megatron-LM as its users have it today, for optimizers that the published one lacks.
ENGINE_OF_OPTIMIZERS = "megatron-core"
# The engine where weights are frozen, and its level of sharding weights (FSDP, ZeRO-3).
ENGINE_OF_ADAPTERS, SHARDS_WEIGHTS = "trainer", 3
MICRO_BATCHES = (1, 2, 4, 8)


def plan_by_rule(problem: Problem, predictor: Predictor) -> tuple[Plan, Prediction] | None:
    """The best plan that the rule gives; None if none of its plans fits in memory."""
    if problem.workload.train == "adapters":
        return _fastest([*_of_replicas(problem)], predictor)
    layers = problem.workload.model.layers
    for stages in range(1, layers + 1):
        plans = [*_plans(problem, stages)] if layers % stages == 0 else []
        if (best := _fastest(plans, predictor)) is not None:
            return best
    return None


def _fastest(plans: list[Plan], predictor: Predictor) -> tuple[Plan, Prediction] | None:
    predicted = zip(plans, predictor.predict_many(plans), strict=True) if plans else ()
    fitting = [one for one in predicted if one[1].fits]
    return min(fitting, key=lambda one: one[1].iteration_s) if fitting else None


def _of_replicas(problem: Problem) -> Iterator[Plan]:
    """The plans of the rule for adapters, one for each micro-batch size."""
    gpus = problem.cluster.num_gpus
    layers = problem.workload.model.layers
    stage = StagePlan(
        layers=layers,
        data_parallel=gpus,
        tensor_parallel=1,
        micro_batch=1,
        zero=SHARDS_WEIGHTS if gpus > 1 else 0,
    ).with_values({RECOMPUTED: layers})
    yield from _sized(problem, ENGINE_OF_ADAPTERS, stage, 1)


def _plans(problem: Problem, stages: int) -> Iterator[Plan]:
    """The rule's plans with ``stages`` stages, one for each micro-batch size."""
    model, gpus = problem.workload.model, problem.cluster.num_gpus
    tensor = _tensor_parallel(problem)
    replicas, rest = divmod(gpus, tensor * stages)
    if rest:
        return
    layers = model.layers // stages
    stage = StagePlan(
        layers=layers, data_parallel=replicas, tensor_parallel=tensor, micro_batch=1
    ).with_values({RECOMPUTED: layers})
    has_optimizer = problem.workload.optimizer in ENGINES[ENGINE].optimizers
    engine = ENGINE if has_optimizer else ENGINE_OF_OPTIMIZERS
    yield from _sized(problem, engine, stage, stages)


def _sized(problem: Problem, engine: str, stage: StagePlan, stages: int) -> Iterator[Plan]:
    """Plans of equal stages, one for each micro-batch size that divides the batch."""
    for size in MICRO_BATCHES:
        replicas = stage.data_parallel
        count, rest = divmod(problem.workload.global_batch, replicas * size)
        if count and not rest:
            sized = stage.with_values({"micro_batch": size})
            yield Plan(engine=engine, micro_batches=count, stages=(sized,) * stages)


def _tensor_parallel(problem: Problem) -> int:
    """The largest tensor-parallel degree within a node by which the model can be split evenly."""
    model, cluster = problem.workload.model, problem.cluster
    return max(
        degree
        for degree in range(1, cluster.gpus_per_node + 1)
        if cluster.gpus_per_node % degree == 0 and not degree_problem(model, degree)
    )
