"""Random plans for fine-tuning, drawn from what a framework's recipe can express."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import canonical, with_engine
from mistlab.export.target import Target
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload

# The parallel degrees that some recipes have besides replicas.
AXES = ("tensor_parallel", "context_parallel", "sequence_parallel")
# What the recipes built on Hugging Face's Trainer can express.
OF_TRAINER: Mapping[str, tuple[Any, ...]] = {
    "model": ("llama3-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "falcon-7b", "llama-7b"),
    "precision": ("bf16", "bf16", "fp16", "fp32"),
    "states": ("mixed", "mixed", "16bit"),
    "base": ("16bit", "8bit", "4bit"),
    "optimizer": ("adamw", "adamw-8bit"),
    "attention": ("flash", "flash", "math"),
    "zero": (0, 2, 3),
    "loss": ("whole", "chunked"),
    "offloads": (False, False, True),
    "offloads_inputs": (False, True),
}
# What differs for those that name classes: their data types, axes and models.
OF_TORCHTUNE: Mapping[str, tuple[Any, ...]] = {
    **OF_TRAINER,
    "model": ("llama3-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b"),
    "precision": ("bf16", "bf16", "fp32"),
    "states": ("16bit",),
    "base": ("16bit", "4bit"),
    "attention": ("flash",),
    "zero": (2, 3),
    "state_replicas": (1, 1, 2),
}
OF_AUTOMODEL: Mapping[str, tuple[Any, ...]] = {
    **OF_TRAINER,
    "precision": ("bf16", "bf16", "fp32"),
    "states": ("mixed", "16bit"),
    "adapters_states": ("16bit",),
    "offloads_inputs": (False,),
    "state_replicas": (1, 1, 2),
    "tensor_parallel": (1, 1, 2, 4),
    "context_parallel": (1, 1, 2),
    "sequence_parallel": (0, 1),
}
SPACES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "torchtune": OF_TORCHTUNE,
    "automodel": OF_AUTOMODEL,
    "axolotl": OF_TRAINER,
    "llama-factory": OF_TRAINER,
    "trl": OF_TRAINER,
}


def drawn_recipes(target: Target, count: int, seed: int) -> Iterator[Job]:
    """So many random jobs, the same for the same seed, that the target can express exactly."""
    draw = np.random.default_rng(seed)
    made = 0
    while made < count:
        try:
            job = _drawn(target, draw, SPACES[target.name])
        except InputError:
            continue
        made += 1
        yield job


def _drawn(target: Target, draw: np.random.Generator, space: Mapping[str, tuple[Any, ...]]) -> Job:
    def pick(*options: Any) -> Any:
        return options[draw.integers(len(options))]

    chosen = {name: pick(*options) for name, options in space.items()}
    model = catalog.model(chosen["model"])
    trained: dict[str, Any] = {"loss": chosen["loss"], "states": chosen["states"]}
    zero, offloads = chosen["zero"], chosen["offloads"]
    if draw.random() < 0.65:
        trained |= {"train": "adapters", "adapter_rank": pick(4, 8, 16, 64)}
        trained |= {"adapter_targets": pick("all", "attention"), "base": chosen["base"]}
        trained["states"] = chosen.get("adapters_states", chosen["states"])
        if chosen["base"] == "8bit":
            zero, offloads = 0, False
    if chosen["precision"] != "bf16":
        trained["states"] = "mixed"
    gpus, nodes, micro_batch, steps = pick(1, 2, 8), pick(1, 1, 2), pick(1, 2, 4), pick(1, 2, 8)
    is_8_bit = trained.get("base") == "8bit"
    axes = {name: chosen[name] for name in AXES if name in chosen and not is_8_bit}
    ranks = math.prod(degree for name, degree in axes.items() if name != "sequence_parallel")
    if offloads or ranks > 1:
        zero = zero or 2
    recomputed = pick(0, model.layers)
    states = dict.fromkeys(("offload_weights", "offload_gradients", "offload_optimizer"), 1.0)
    replicas = gpus * nodes
    # More replicas than one of states that are sharded over more than one.
    copies = chosen.get("state_replicas", 1)
    copies = copies if zero and replicas > copies else 1
    stage = StagePlan.of_values(
        {
            "layers": model.layers,
            "data_parallel": replicas,
            "tensor_parallel": 1,
            **axes,
            "state_replicas": copies,
            "micro_batch": micro_batch,
            "zero": zero,
            "checkpointed_layers": recomputed,
            **(states if offloads else {}),
            "offload_activations": float(bool(recomputed) and chosen["offloads_inputs"]),
        }
    )
    world = replicas * ranks
    in_node = min(world, 8)
    job = Job(
        workload=Workload(
            model=model,
            sequence_length=pick(1024, 2048),
            global_batch=replicas * micro_batch * steps,
            attention=chosen["attention"],
            precision=chosen["precision"],
            optimizer=chosen["optimizer"],
            **trained,
        ),
        cluster=Cluster(
            hardware=catalog.hardware("h100-80gb"),
            nodes=world // in_node,
            gpus_per_node=in_node,
        ),
        plan=Plan(engine="mistlab", micro_batches=steps, stages=(stage,)),
    )
    # As the target's engine runs it, and without levels of ZeRO that a single GPU cannot have.
    job = canonical(job, shares_experts=False)
    return with_engine(job, target.engines_for(job), overlaps=True)
