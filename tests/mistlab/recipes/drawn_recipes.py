"""Random plans for fine-tuning, drawn from what a framework's recipe can express."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import canonical, nearest, with_engine
from mistlab.export.target import Target
from mistlab.formats.recipes.bridge_exports import BRIDGE
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import order_of_chunks
from mistlab.schedule.placement import even_shares

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
            is_bridge = target.name == BRIDGE.name
            job = _piped(draw) if is_bridge else _drawn(target, draw, SPACES[target.name])
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


# The models of Megatron-Bridge's plans: dense, with experts, with latent attention.
PIPED_MODELS = ("llama3-8b", "qwen3-8b", "llama-7b", "qwen3-30b-a3b", "deepseek-v2-lite")


def _piped(draw: np.random.Generator) -> Job:
    """A random job with pipelines and all degrees, as Megatron-Bridge comes closest to it."""

    def pick(*options: Any) -> Any:
        return options[draw.integers(len(options))]

    model = catalog.model(pick(*PIPED_MODELS))
    data, tensor, context, stages = pick(1, 2, 4), pick(1, 1, 2, 4), pick(1, 1, 2), pick(1, 2, 4)
    micro_batch, steps = pick(1, 2), pick(4, 8)
    layers = [*even_shares(model.layers, stages)]
    if stages > 1 and draw.random() < 0.3:
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
    shape = {
        "data_parallel": data,
        "tensor_parallel": tensor,
        "context_parallel": context,
        "sequence_parallel": int(tensor > 1 and draw.random() < 0.5),
        "expert_parallel": pick(1, 2) if model.experts is not None and data % 2 == 0 else 1,
        "micro_batch": micro_batch,
        "zero": pick(0, 1) if stages > 1 else pick(0, 1, 2, 3),
        "offload_optimizer": pick(0.0, 0.0, 0.5, 1.0),
        "offload_activations": pick(0.0, 0.0, 0.25) if stages == 1 else 0.0,
    }
    recomputed = pick(0.0, 0.0, 0.5, 1.0)
    counts = [int(recomputed * count) for count in layers]
    trained: dict[str, Any] = {}
    if draw.random() < 0.5:
        trained = {"train": "adapters", "adapter_rank": pick(8, 32)}
        trained["adapter_targets"] = pick("all", "attention")
    world = data * tensor * context * stages
    job = Job(
        workload=Workload(
            model=model,
            sequence_length=pick(2048, 4096),
            global_batch=data * micro_batch * steps,
            attention=pick("flash", "flash", "math"),
            precision=pick("bf16", "bf16", "fp16", "fp32", "fp8"),
            **trained,
        ),
        cluster=Cluster(
            hardware=catalog.hardware("h100-80gb"),
            nodes=-(-world // 8),
            gpus_per_node=min(world, 8),
        ),
        plan=Plan(
            engine=pick("mistlab", "megatron", "megatron-core", "megatron-bridge"),
            micro_batches=steps,
            order=pick("1f1b", order_of_chunks(2)),
            stages=tuple(
                StagePlan.of_values({"layers": own, "checkpointed_layers": count, **shape})
                for own, count in zip(layers, counts, strict=True)
            ),
        ),
    )
    return nearest(job, BRIDGE).job
