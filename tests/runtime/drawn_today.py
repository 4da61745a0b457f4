"""Random plans of everything that the runtime trains: all families and parts of models, all
dimensions of plans, orders and ways to train."""

from dataclasses import replace
from typing import Any

import numpy as np

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from runtime.engine.training import Training
from runtime.runnable import check_runnable
from tests.runtime.worlds import ON_HOST, TRAINING, plainly, ratios, stage, workload

Case = tuple[Workload, Plan, Training]
ORDERS = ("1f1b", "1f1b", "gpipe", "zb-h1", "interleaved-2")
TRAININGS = (TRAINING, replace(TRAINING, clip_norm=0.3), ON_HOST)
DROPOUTS: tuple[dict[str, Any], ...] = (
    {"dropout": 0.1, "attention_dropout": 0.0},
    {"dropout": 0.1, "attention_dropout": 0.2, "attention": "math"},
)
SCALINGS: tuple[dict[str, Any], ...] = (
    {"kind": "linear", "factor": 4.0},
    {"kind": "llama3", "factor": 8.0, "positions": 64},
    {"kind": "yarn", "factor": 16.0, "positions": 8, "low": 1.0, "high": 32.0, "amplitude": 1.2},
    {"kind": "dynamic", "factor": 4.0, "positions": 8},
)
LATENT = {"head_dim": 12, "rotary_fraction": 1 / 3}
# Four roundings of numbers of 32 bits near 1.
NEAREST = 2.0**-22


def case(seed: int, *, ranks: int | None = None, most_ranks: int = 8) -> Case:
    """A workload, its plan and training; on so many ``ranks``, or at most so many.

    A plain run comes nowhere so near to a jump, as of a token from one expert to another, that
    rounding decides what it does.
    """
    draw = np.random.default_rng((seed, 40))
    while True:
        try:
            work, plan = _drawn(draw)
            gpus = plan.num_gpus
            if gpus > most_ranks or (ranks is not None and gpus != ranks):
                continue
            hardware = catalog.hardware("a100-80gb")
            cluster = Cluster(hardware=hardware, nodes=1, gpus_per_node=8)
            check_runnable(Job(workload=work, cluster=cluster, plan=plan))
        except InputError:
            continue
        training = TRAININGS[int(draw.integers(len(TRAININGS)))]
        if work.model.experts and plainly(work, training).nearest < NEAREST:
            continue
        return work, plan, training


def _drawn(draw: np.random.Generator) -> tuple[Workload, Plan]:
    stages, order = int(draw.integers(1, 4)), str(draw.choice(ORDERS))
    chunks = 2 if order == "interleaved-2" else 1
    sizes = [chunks * int(draw.integers(1, 3)) for _ in range(stages)]
    if chunks > 1:
        sizes = sizes[:1] * stages
    micro_batches = int(draw.choice([1, 2, 4])) if chunks == 1 else stages * 2
    context = int(draw.choice([1, 1, 2]))
    batch = int(draw.choice([2, 4]))
    made = [_stage(draw, size, batch, context) for size in sizes]
    work = _workload(draw, sum(sizes), batch * micro_batches)
    return work, Plan(micro_batches=micro_batches, stages=tuple(made), order=order)


def _stage(draw: np.random.Generator, layers: int, batch: int, context: int) -> StagePlan:
    data, tensor = int(draw.choice([1, 2])), int(draw.choice([1, 2]))
    return stage(
        layers,
        data_parallel=data,
        tensor_parallel=tensor,
        sequence_parallel=int(draw.choice([0, 1])) * (tensor > 1),
        context_parallel=context,
        context_exchange=int(draw.choice([0, 1, 2])) * (context > 1),
        expert_parallel=int(draw.choice([1, 1, 2])),
        expert_tensor_parallel=int(draw.choice([1, 1, 2])),
        micro_batch=batch // data,
        zero=int(draw.integers(0, 4)),
        checkpointed_layers=int(draw.integers(0, layers + 1)),
        offload=ratios(*(float(draw.choice([0.0, 0.0, 0.37, 1.0])) for _ in range(4))),
    )


def _workload(draw: np.random.Generator, layers: int, batch: int) -> Workload:
    family = str(draw.choice(["gpt", "falcon", "nemotron", *["llama"] * 9]))
    fields: dict[str, Any] = {"kv_heads": int(draw.choice([2, 4])), "vocab": 96}
    fields["tied_embeddings"] = bool(draw.random() < 0.3)
    if draw.random() < 0.2:
        fields["vocab"] = 97
    if family == "llama":
        fields |= _parts(draw, layers)
    elif draw.random() < 0.3:
        fields["biases"] = True
    if draw.random() < 0.3:
        fields["further_tokens"] = int(draw.integers(1, 3))
    if draw.random() < 0.4:
        fields |= DROPOUTS[int(draw.integers(len(DROPOUTS)))]
    capacity = float(draw.choice([0.6, 1.0])) if draw.random() < 0.4 else None
    if "experts" not in fields:
        capacity = None
    return replace(workload(family, layers=layers, batch=batch, **fields), expert_capacity=capacity)


def _parts(draw: np.random.Generator, layers: int) -> dict[str, Any]:
    """Parts that some models have."""
    parts: dict[str, Any] = {}
    if draw.random() < 0.4:
        parts |= {**LATENT, "kv_heads": 4, "latent": {"key_rank": 8, "value_dim": 8}}
        if draw.random() < 0.5:
            parts["latent"] = {**parts["latent"], "query_rank": 16}
    else:
        parts |= {name: bool(draw.random() < 0.3) for name in ("qk_norm", "sinks")}
        parts["attention_gate"] = bool(draw.random() < 0.2)
        if draw.random() < 0.3:
            parts["window"] = {"size": 5, "full_every": int(draw.choice([0, 2]))}
    if draw.random() < 0.7:
        experts = {"count": 4, "active": int(draw.integers(1, 4)), "ffn": 24}
        experts["shared_ffn"] = int(draw.choice([0, 16]))
        if draw.random() < 0.2 and "window" not in parts and "sinks" not in parts:
            parts["pattern"] = str(draw.choice(["DA", "AD", "DDA"]))
        else:
            experts["dense_blocks"] = int(draw.integers(0, layers))
        parts["experts"] = experts | _routed(draw)
        parts["biases"] = bool(draw.random() < 0.3)
    if draw.random() < 0.3:
        parts["rotary_scaling"] = SCALINGS[int(draw.integers(len(SCALINGS)))]
    return parts


def _routed(draw: np.random.Generator) -> dict[str, Any]:
    """How tokens choose experts, and how gates are cut off."""
    routed: dict[str, Any] = {}
    if draw.random() < 0.3:
        routed["gate_limit"] = 0.05
    if draw.random() < 0.3:
        return routed
    router: dict[str, Any] = {"scores": str(draw.choice(["softmax", "sigmoid"]))}
    router["normalized"] = bool(draw.random() < 0.6)
    router["weighs_inputs"] = bool(draw.random() < 0.3)
    router["scale"] = float(draw.choice([1.0, 2.5]))
    if draw.random() < 0.5:
        router |= {"correction": True, "correction_rate": float(draw.choice([0.0, 0.05]))}
    if draw.random() < 0.5:
        router |= {"groups": 2, "active_groups": int(draw.choice([1, 2]))}
        router["best_of_group"] = int(draw.choice([1, 2]))
    router["balance_loss"] = float(draw.choice([0.0, 0.3]))
    router["z_loss"] = float(draw.choice([0.0, 0.1]))
    return {**routed, "router": router}
