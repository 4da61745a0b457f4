"""One process of a world that trains random plans of everything, in turn."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from runtime.comm.processes import World, maker
from runtime.comm.topology import connected
from runtime.engine.streams.device_streams import SimulatedStreams
from tests.runtime.drawn_today import Case, case
from tests.runtime.worlds import STEPS, begun, run_step, whole_weights


def cases_of(ranks: int, count: int) -> list[Case]:
    """So many plans for a number of ranks."""
    return [case(seed, ranks=ranks) for seed in range(count)]


def main() -> None:
    rank, size, folder, count = *map(int, sys.argv[1:3]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    make = maker(World(rank=rank, size=size, local_rank=rank), timeout_s=600)
    for number, (work, plan, training) in enumerate(cases_of(size, count)):
        model = work.model
        connections = connected(
            plan, rank, make, tied=model.tied_embeddings, experts=model.experts is not None
        )
        executor = begun(work, plan, connections, SimulatedStreams(), training)
        reports = [run_step(executor, work, connections, step) for step in range(STEPS)]
        executor.flush()
        said = [[report.loss, report.skipped] for report in reports]
        (folder / f"{number} {rank}.json").write_text(json.dumps(said), encoding="utf-8")
        torch.save(whole_weights(work, [executor]), folder / f"{number} {rank}.pt")
    distributed.destroy_process_group()
