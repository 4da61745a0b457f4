"""Users' own models, trained plainly and by plans; one process of a world that does so."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy

from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload
from runtime.comm.processes import World, maker
from runtime.comm.topology import Connections, connected
from runtime.engine.executor import Executor, Report
from runtime.engine.streams.device_streams import SimulatedStreams
from runtime.engine.training import Training
from runtime.engine.work.own_layers import built
from tests.runtime.thread_ranks import Meeting, run_threads
from tests.runtime.worlds import (
    CPU,
    MIXED,
    SEED,
    STEPS,
    TRAINING,
    Trained,
    run_step,
    sequences,
    stage,
    thread_groups,
)

HERE = "tests.runtime.own_modules"
SHARDED = {"data_parallel": 2, "micro_batch": 1}
# Plans for two processes: all levels of ZeRO, recomputation, offloading, and two stages.
PLANS: dict[str, tuple[dict[str, Any], ...]] = {
    "ZeRO-0": ({**SHARDED, "zero": 0},),
    "ZeRO-1, offloaded": ({**SHARDED, "zero": 1, "offload": MIXED},),
    "ZeRO-2, run again": ({**SHARDED, "zero": 2, "checkpointed_layers": 3},),
    "ZeRO-3, run again, offloaded": (
        {**SHARDED, "zero": 3, "checkpointed_layers": 2, "offload": MIXED},
    ),
    "two stages": ({"checkpointed_layers": 1}, {"offload": MIXED}),
}


def own_workload(factory: str, **fields: Any) -> Workload:
    spec = {"hidden": 32, "layers": 4, "heads": 1, "vocab": 96, **fields}
    spec = {"family": "custom", "graph_file": "own.json", "factory": f"{HERE}:{factory}", **spec}
    return Workload(
        model=ModelSpec.of(**spec),
        sequence_length=16,
        global_batch=8,
        attention="flash",
        precision="fp32",
    )


def plan_of(name: str) -> Plan:
    stages = PLANS[name]
    return Plan(micro_batches=4, stages=tuple(stage(4 // len(stages), **one) for one in stages))


def trained_plainly(work: Workload, training: Training = TRAINING) -> Trained:
    """The user's module as it is, and torch's own optimizer."""
    model = built(work, SEED).model
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=training.weight_decay,
    )
    reports = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = sequences(work, step)[:, :-1], sequences(work, step)[:, 1:]
        if work.model.factory.endswith("with_loss"):
            _, loss = model(tokens, targets)
        else:
            loss = cross_entropy(model(tokens)["logits"].flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        reports.append(Report(loss=loss.item(), gradient_norm=None, loss_scale=1.0, skipped=False))
    weights = {name: one.detach() for name, one in model.named_parameters()}
    return Trained(reports=reports, weights=weights)


def trained_rank(
    work: Workload, plan: Plan, connections: Connections, rank: int
) -> tuple[list[Report], Executor]:
    """Some steps of one rank."""
    streams = SimulatedStreams(progress="random", seed=rank)
    executor = Executor(work, plan, connections, streams, TRAINING, device=CPU, seed=SEED)
    reports = [run_step(executor, work, connections, step) for step in range(STEPS)]
    executor.flush()
    return reports, executor


def trained_by(work: Workload, plan: Plan) -> Trained:
    """All ranks as threads."""

    def rank_of(rank: int, meeting: Meeting) -> tuple[list[Report], Executor]:
        return trained_rank(
            work, plan, connected(plan, rank, thread_groups(meeting, rank), tied=False), rank
        )

    results = run_threads(plan.num_gpus, rank_of)
    parts = [weights_of(executor, work) for _, executor in results]
    return Trained(reports=results[0][0], weights=joined(parts))


def weights_of(executor: Executor, work: Workload) -> dict[str, Tensor]:
    """What a rank has of the model's weights, and NaN elsewhere."""
    found = {
        name: torch.full(one.shape, float("nan"))
        for name, one in built(work, SEED).model.named_parameters()
    }
    for layer in executor.layers:
        masters = executor.parameters.masters(layer)
        for piece in executor.parameters.pieces(layer):
            pairs = zip(piece.offsets, piece.sizes, strict=True)
            box = tuple(slice(at, at + size) for at, size in pairs)
            flat = masters[piece.begin : piece.begin + piece.numel]
            found[piece.name][box] = flat.view(piece.sizes)
    return found


def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Weights of which each rank has some."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            before = whole.get(name, tensor)
            whole[name] = torch.where(before.isnan(), tensor, before)
    return whole


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    make = maker(World(rank=rank, size=size, local_rank=rank), timeout_s=600)
    for name in PLANS:
        work, plan = own_workload("decoder"), plan_of(name)
        connections = connected(plan, rank, make, tied=False)
        reports, executor = trained_rank(work, plan, connections, rank)
        said = [report.loss for report in reports]
        (folder / f"{name} {rank}.json").write_text(json.dumps(said), encoding="utf-8")
        torch.save(weights_of(executor, work), folder / f"{name} {rank}.pt")
    distributed.destroy_process_group()
