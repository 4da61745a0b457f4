"""One process of a world that serves random requests by phases, several jobs in turn."""

import pickle
import sys
from pathlib import Path

import torch
from torch import distributed

from runtime.comm.processes import World
from runtime.serving.phased_session import serve_joined
from tests.runtime.drawn_phases import drawn_phases


def main() -> None:
    rank, size, folder, count = *map(int, sys.argv[1:3]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    world = World(rank=rank, size=size, local_rank=rank)
    for seed in range(count):
        _, job = drawn_phases(seed, size)
        done = serve_joined(job, world, timeout_s=600)
        (folder / f"{seed} {rank}.pickle").write_bytes(pickle.dumps(done))
    distributed.destroy_process_group()
