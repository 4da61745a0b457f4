"""One process of a world that trains random plans of everything, in turn."""

import sys
from pathlib import Path

import torch
from torch import distributed

from runtime.comm.processes import World, maker
from tests.runtime.drawn_today import Case, case
from tests.runtime.process_world import train


def cases_of(ranks: int, count: int) -> list[Case]:
    """So many plans for a number of ranks."""
    return [case(seed, ranks=ranks) for seed in range(count)]


def main() -> None:
    rank, size, folder, count = *map(int, sys.argv[1:3]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    make = maker(World(rank=rank, size=size, local_rank=rank), timeout_s=600)
    train(cases_of(size, count), rank, folder, make)
    distributed.destroy_process_group()
