"""Random plans of all families of models, to be exported: the same for the same seed."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.table import ENGINES
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.placement import even_shares

# Models by family, each family drawn as often as the others.
MODELS: Mapping[str, tuple[str, ...]] = {
    "dense": ("gpt3-2.7b", "llama-7b", "llama3-8b", "qwen3-8b", "llama3.2-1b", "falcon-7b"),
    "experts": ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"),
    "latent": ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"),
    "hybrid": ("nemotron-h-8b", "nemotron-3-nano", "nemotron-h-56b"),
}
_HARDWARE = ("a100-80gb", "h100-80gb", "b200-180gb", "l4-24gb")
_ENGINES = ("mistlab", "mistlab", "megatron", "megatron-core", "deepspeed", "fsdp")
_RATIOS = (0.0, 0.0, 0.0, 0.5, 1.0)


def drawn_exports(count: int, seed: int) -> Iterator[tuple[str, Job]]:
    """So many jobs, each with its family, the families in turns."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        family = [*MODELS][number % len(MODELS)]
        while (job := _drawn(draw, family)) is None:
            pass
        yield family, job


def _drawn(draw: np.random.Generator, family: str) -> Job | None:
    """A random job of a family; none where its choices do not go together."""

    def pick(*options: Any) -> Any:
        return options[draw.integers(len(options))]

    model = catalog.model(pick(*MODELS[family]))
    num_stages, batches = pick(1, 2, 3, 4), pick(2, 4, 6, 8)
    sequences = pick(1, 2, 4, 8, 12)
    layers = [*even_shares(model.layers, num_stages)]
    if num_stages > 1 and draw.random() < 0.3:
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
    alike = draw.random() < 0.75
    engine, shape = pick(*_ENGINES), _shape(draw, sequences)
    stages = []
    try:
        for own in layers:
            shape = shape if alike else _shape(draw, sequences)
            savings = _savings(draw, own, offloads=ENGINES[engine].offloads)
            stages.append(StagePlan.of_values({"layers": own, **shape, **savings}))
        gpus = sum(stage.num_gpus for stage in stages)
        in_node = min(gpus, 8)
        return Job(
            workload=Workload(
                model=model,
                sequence_length=pick(2048, 4096),
                global_batch=sequences * batches,
                attention=pick("flash", "flash", "math"),
                precision=pick("bf16", "bf16", "fp16", "fp32", "fp8", "fp4"),
                optimizer=pick("adamw", "adamw", "adamw-bf16"),
            ),
            cluster=Cluster(
                hardware=catalog.hardware(pick(*_HARDWARE)),
                nodes=-(-gpus // in_node),
                gpus_per_node=in_node,
            ),
            plan=Plan(engine=engine, micro_batches=batches, stages=tuple(stages)),
        )
    except InputError:
        return None


def _shape(draw: np.random.Generator, sequences: int) -> dict[str, Any]:
    data = int(draw.choice([each for each in (1, 2, 3, 4, 8) if sequences % each == 0]))
    tensor = int(draw.choice([1, 1, 2, 4, 8]))
    return {
        "data_parallel": data,
        "micro_batch": sequences // data,
        "tensor_parallel": tensor,
        "context_parallel": int(draw.choice([1, 1, 1, 2])),
        "sequence_parallel": int(tensor > 1 and draw.random() < 0.5),
        "expert_parallel": int(draw.choice([1, 1, 2, 4])),
    }


def _savings(draw: np.random.Generator, layers: int, *, offloads: bool) -> dict[str, Any]:
    names = ("weights", "gradients", "optimizer", "activations") if offloads else ()
    return {
        "zero": int(draw.choice([0, 1, 1, 2, 3])),
        "checkpointed_layers": int(draw.choice([0, 0, layers // 2, layers])),
        **{f"offload_{name}": float(draw.choice(_RATIOS)) for name in names},
    }
