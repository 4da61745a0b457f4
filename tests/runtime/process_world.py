"""One process of a world that runs split models and several plans in turn."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from runtime.comm.group import GroupMaker
from runtime.comm.processes import World, maker
from runtime.comm.topology import connected
from runtime.engine.streams.device_streams import SimulatedStreams
from runtime.engine.training import Training
from tests.runtime import split_models
from tests.runtime.worlds import (
    EPSILON,
    LEARNING_RATE,
    MIXED,
    OVERFLOWING,
    STEPS,
    TRAINING,
    begun,
    run_step,
    stage,
    whole_weights,
    workload,
)

CLIPPING = Training(learning_rate=LEARNING_RATE, epsilon=EPSILON, clip_norm=0.3)
Case = tuple[Workload, Plan, Training]


def one_stage(**fields: object) -> Plan:
    return Plan(micro_batches=2, stages=(stage(**fields),))


MIXTURE = workload(
    "llama", kv_heads=2, experts={"count": 4, "active": 2, "ffn": 24, "dense_blocks": 1}
)
SPREAD = {"data_parallel": 2, "tensor_parallel": 2, "micro_batch": 2}
CASES: dict[str, Case] = {
    **{
        f"8 ranks: ZeRO-{zero}, 4 data x 2 tensor": (
            workload("llama", batch=16, kv_heads=2),
            one_stage(data_parallel=4, tensor_parallel=2, zero=zero, offload=MIXED),
            TRAINING,
        )
        for zero in range(4)
    },
    "8 ranks: 2 stages x 2 data x 2 tensor, tied, clipped": (
        workload("gpt", batch=16, tied_embeddings=True, biases=True),
        Plan(
            micro_batches=4,
            stages=(
                stage(3, data_parallel=2, tensor_parallel=2, zero=3, checkpointed_layers=1),
                stage(1, data_parallel=2, tensor_parallel=2, zero=2, offload=MIXED),
            ),
        ),
        CLIPPING,
    ),
    "8 ranks: 3 stages of unlike degrees, padded vocabulary": (
        workload("falcon", batch=16, vocab=97),
        Plan(
            micro_batches=4,
            stages=(
                stage(1, data_parallel=4, micro_batch=1, zero=1, offload=MIXED),
                stage(2, data_parallel=1, tensor_parallel=2, micro_batch=4, checkpointed_layers=2),
                stage(1, data_parallel=2, micro_batch=2, zero=3),
            ),
        ),
        CLIPPING,
    ),
    "4 ranks: 4 stages": (
        workload("gpt", batch=8),
        Plan(micro_batches=4, stages=tuple(stage(1, offload=MIXED) for _ in range(4))),
        TRAINING,
    ),
    "4 ranks: 2 stages x 2 data, chunks in a V with passes for weights, tied": (
        workload("llama", tied_embeddings=True),
        Plan(
            micro_batches=4,
            stages=(
                stage(2, data_parallel=2, micro_batch=1, zero=2, offload=MIXED),
                stage(2, data_parallel=2, micro_batch=1),
            ),
            order="zb-v",
        ),
        CLIPPING,
    ),
    "4 ranks: 2 data x 2 tensor, ZeRO-1, tied": (
        workload("gpt", tied_embeddings=True, vocab=97),
        one_stage(data_parallel=2, tensor_parallel=2, zero=1, offload=MIXED),
        TRAINING,
    ),
    "4 ranks: 2 stages of unlike degrees, overflow": (
        workload("llama", biases=True, tied_embeddings=True),
        Plan(
            micro_batches=2,
            stages=(
                stage(3, tensor_parallel=2, micro_batch=4, checkpointed_layers=2),
                stage(1, data_parallel=2, zero=3, offload=MIXED),
            ),
        ),
        OVERFLOWING,
    ),
    "3 ranks: 2 stages of unlike tensor degrees": (
        workload("gpt", tied_embeddings=True),
        Plan(micro_batches=4, stages=(stage(3, tensor_parallel=2), stage(1))),
        TRAINING,
    ),
    "2 ranks: two chunks a stage, tied": (
        workload("llama", tied_embeddings=True),
        Plan(micro_batches=4, stages=(stage(2, offload=MIXED), stage(2)), order="interleaved-2"),
        TRAINING,
    ),
    "2 ranks: tensor parallel": (
        workload("falcon", vocab=97),
        one_stage(tensor_parallel=2, micro_batch=4, offload=MIXED),
        TRAINING,
    ),
    "4 ranks: 2 stages that split tokens": (
        workload("llama", batch=8),
        Plan(
            micro_batches=4,
            stages=(
                stage(2, tensor_parallel=2, sequence_parallel=1, checkpointed_layers=1),
                stage(2, tensor_parallel=2, sequence_parallel=1),
            ),
        ),
        TRAINING,
    ),
    "4 ranks: 2 stages that split tokens, with W": (
        workload("llama", batch=8, tied_embeddings=True),
        Plan(
            micro_batches=4,
            stages=(
                stage(2, tensor_parallel=2, sequence_parallel=1, checkpointed_layers=1),
                stage(2, tensor_parallel=2, sequence_parallel=1, offload=MIXED),
            ),
            order="zb-v",
        ),
        TRAINING,
    ),
    "2 ranks: tensor parallel, tokens split": (
        workload("gpt", biases=True),
        one_stage(tensor_parallel=2, micro_batch=4, sequence_parallel=1),
        CLIPPING,
    ),
    "2 ranks: ZeRO-2": (workload("llama"), one_stage(data_parallel=2, zero=2), CLIPPING),
    "2 ranks: ZeRO-1, stepped on the host": (
        workload("gpt", tied_embeddings=True),
        one_stage(data_parallel=2, zero=1, offload=MIXED),
        replace(CLIPPING, steps_on_host=True),
    ),
    "8 ranks: experts over data and tensor ranks, 2 stages, ZeRO-3": (
        replace(MIXTURE, global_batch=16),
        Plan(
            micro_batches=4,
            stages=(
                stage(2, **SPREAD, expert_parallel=2, zero=3, checkpointed_layers=1),
                stage(2, **SPREAD, expert_parallel=2, expert_tensor_parallel=2, offload=MIXED),
            ),
        ),
        CLIPPING,
    ),
    "4 ranks: experts and their widths, parts of sequences": (
        MIXTURE,
        one_stage(
            **SPREAD,
            sequence_parallel=1,
            expert_parallel=2,
            expert_tensor_parallel=2,
        ),
        CLIPPING,
    ),
    "4 ranks: experts in a V, passes for weights": (
        MIXTURE,
        Plan(
            micro_batches=4,
            stages=(
                stage(2, data_parallel=2, micro_batch=1, expert_parallel=2, zero=2),
                stage(2, tensor_parallel=2, micro_batch=2, expert_parallel=2),
            ),
            order="zb-v",
        ),
        TRAINING,
    ),
    "2 ranks: experts, ZeRO-1": (
        MIXTURE,
        one_stage(data_parallel=2, expert_parallel=2, zero=1, offload=MIXED),
        CLIPPING,
    ),
    "2 ranks: experts over tensor ranks": (
        MIXTURE,
        one_stage(tensor_parallel=2, micro_batch=4, expert_parallel=2, checkpointed_layers=2),
        TRAINING,
    ),
    "2 ranks: ZeRO-3, overflow": (
        workload("gpt", biases=True),
        one_stage(data_parallel=2, zero=3, offload=MIXED),
        OVERFLOWING,
    ),
}


def cases_of(ranks: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if case[1].num_gpus == ranks}


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    if size in split_models.SPLITS:
        errors = split_models.errors_of_world()
        (folder / f"split {rank}.json").write_text(json.dumps(errors), encoding="utf-8")
    world = World(rank=rank, size=size, local_rank=rank)
    train(cases_of(size).values(), rank, folder, maker(world, timeout_s=600))
    distributed.destroy_process_group()


def train(cases: Iterable[Case], rank: int, folder: Path, make: GroupMaker) -> None:
    """All cases in turn; what they came to goes to the folder."""
    for number, (work, plan, training) in enumerate(cases):
        model = work.model
        tied, experts = model.head_has_table, model.experts is not None
        connections = connected(plan, rank, make, tied=tied, experts=experts)
        executor = begun(work, plan, connections, SimulatedStreams(), training)
        reports = [run_step(executor, work, connections, step) for step in range(STEPS)]
        executor.flush()
        said = [[report.loss, report.skipped] for report in reports]
        (folder / f"{number} {rank}.json").write_text(json.dumps(said), encoding="utf-8")
        torch.save(whole_weights(work, [executor]), folder / f"{number} {rank}.pt")
