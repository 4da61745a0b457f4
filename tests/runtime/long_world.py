"""One process of two that share a long sequence, and count the most that is on their device."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from mistlab.plan.plan import Offload, Plan
from mistlab.plan.workload import Workload
from runtime.comm.group import GroupMaker
from runtime.comm.processes import World, maker
from runtime.comm.topology import connected
from runtime.engine.work import optimizer
from tests.runtime.taken_memory import taken_bytes
from tests.runtime.worlds import ratios, stage, workload

# A rank's tokens are two chunks of the loss.
TOKENS, LAYERS = 16_384, 4
WORK = replace(
    workload(
        "llama",
        batch=1,
        layers=LAYERS,
        hidden=64,
        ffn=256,
        vocab=4096,
        kv_heads=2,
        sequence_length=TOKENS,
    ),
    loss="chunked",
)
INPUTS_AWAY = ratios(0, 0, 0, 1)
# Ranks that share tokens everywhere, and those that do so between products alone.
SPLITS: dict[str, dict[str, int]] = {
    "context": {"context_parallel": 2},
    "sequence": {"tensor_parallel": 2, "sequence_parallel": 1},
}


def long_plan(split: str, offload: Offload = INPUTS_AWAY) -> Plan:
    """All blocks are recomputed from their inputs, which are on the host."""
    one = stage(LAYERS, micro_batch=1, checkpointed_layers=LAYERS, offload=offload, **SPLITS[split])
    return Plan(micro_batches=1, stages=(one,))


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    # As small beside this model as it is beside one of a million tokens.
    optimizer.CHUNK = 2**14
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    make = maker(World(rank=rank, size=size, local_rank=rank), timeout_s=600)
    taken = {split: _taken(WORK, long_plan(split), rank, make) for split in SPLITS}
    (folder / f"{rank}.json").write_text(json.dumps(taken), encoding="utf-8")
    distributed.destroy_process_group()


def _taken(work: Workload, plan: Plan, rank: int, make: GroupMaker) -> int:
    return taken_bytes(work, plan, connected(plan, rank, make))
