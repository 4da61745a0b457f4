"""Random jobs of models with experts, latent attention, windows and further tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.placement import even_shares

MODELS = (
    *("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "deepseek-v3-mtp", "deepseek-v2"),
    *("gpt-oss-20b", "qwen3-8b", "llama3-8b", "qwen3-235b-a22b"),
)
ENGINES = ("mistlab", "megatron", "megatron-core", "megatron-fsdp", "megatron-bridge", "fsdp")
HARDWARE = ("h100-80gb", "b200-180gb", "a100-80gb", "mi300x-192gb")


def jobs_of_today(count: int, seed: int) -> Iterator[Job]:
    """So many valid jobs, the same for the same seed."""
    draw = np.random.default_rng(seed)
    found = 0
    while found < count:
        try:
            job = _drawn(draw)
        except InputError:
            continue
        found += 1
        yield job


def _drawn(draw: np.random.Generator) -> Job:
    def one(*options: Any) -> Any:
        return options[draw.integers(len(options))]

    model = catalog.model(one(*MODELS))
    capacity = one(None, None, 1.25) if model.experts is not None else None
    stages = one(1, 1, 2, 4)
    shape = {"tensor_parallel": one(1, 1, 2, 4), "context_parallel": one(1, 1, 2)}
    batches, micro_batch, data = one(4, 8), one(1, 2), one(1, 2, 4, 8)
    engine = one(*ENGINES)
    return Job(
        workload=Workload(
            model=model,
            sequence_length=4096,
            global_batch=batches * micro_batch * data,
            attention="flash",
            precision=one("bf16", "bf16", "fp8", "fp4", "fp16"),
            optimizer=one("adamw", "adamw", "adamw-bf16", "adamw-8bit"),
            expert_imbalance=one(1.0, 1.0, 1.2) if model.experts is not None else 1.0,
            expert_capacity=capacity,
            expert_padding=capacity is not None and one(True, False),
        ),
        cluster=Cluster(hardware=catalog.hardware(one(*HARDWARE)), nodes=32, gpus_per_node=8),
        plan=Plan(
            engine=engine,
            micro_batches=batches,
            stages=tuple(
                StagePlan(
                    layers=layers,
                    data_parallel=data,
                    micro_batch=micro_batch,
                    sequence_parallel=one(0, 1),
                    expert_parallel=one(1, 2, 4, 8),
                    expert_tensor_parallel=one(1, 1, 2),
                    zero=one(0, 1, 1, 3),
                    checkpointed_layers=one(0, 0, 2, layers),
                    **shape,
                )
                for layers in _divided(draw, model, stages)
            ),
        ),
    )


def _divided(draw: np.random.Generator, model: ModelSpec, stages: int) -> list[int]:
    layers = [*even_shares(model.layers, stages)]
    if stages > 1 and draw.random() < 0.3:
        layers[0] -= 1
        layers[-1] += 1
    return layers


def job_of(
    model: str = "qwen3-30b-a3b",
    *stages: Mapping[str, Any],
    hardware: str = "h100-80gb",
    engine: str = "megatron-core",
    **workload: Any,
) -> Job:
    """A job whose stages all have eight GPUs at least."""
    shape, layers = catalog.model(model), catalog.model(model).layers
    given = stages or ({},)
    whole = {"layers": layers // len(given), "data_parallel": 8, "tensor_parallel": 1}
    made = [StagePlan.of_values({**whole, "micro_batch": 1, **values}) for values in given]
    precision = workload.pop("precision", "bf16")
    return Job(
        workload=Workload(
            model=shape,
            sequence_length=4096,
            global_batch=4 * made[0].data_parallel,
            attention="flash",
            precision=precision,
            **workload,
        ),
        cluster=Cluster(hardware=catalog.hardware(hardware), nodes=8, gpus_per_node=8),
        plan=Plan(engine=engine, micro_batches=4, stages=tuple(made)),
    )
