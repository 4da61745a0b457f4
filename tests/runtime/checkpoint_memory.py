"""One process of a world that trains, saves and loads, and says how much memory that took.

Its arguments are its rank, the number of ranks, a folder, the ratio of the optimizer's state that
is offloaded, and ``away`` where a box must be copied before it is written, as from a device. It
says how many bytes it held beyond those of the interpreter, as JSON in the folder.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
from torch import distributed

from mistlab.values.plan import Plan
from mistlab.values.workload import Workload
from runtime.checkpoints import boxes, checkpoint
from runtime.comm.processes import World, maker
from runtime.comm.topology import connected
from runtime.engine.executor import Executor
from runtime.engine.streams.device_streams import SimulatedStreams
from tests.runtime.worlds import TRAINING, begun, ratios, run_step, stage, workload

# 15 million parameters: 180 MB of masters and moments, the largest tensor of 6 MB.
SIZES = {"hidden": 640, "ffn": 2560, "layers": 3}
# Of glibc's malloc.h.
M_ARENA_MAX = -8


def main() -> None:
    rank, size, folder, offloaded, place = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    # One heap for all threads: with several, how much they keep for later differs from run to run.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    boxes.is_away = lambda _: place == "away"
    if size > 1:
        meeting = f"file://{folder}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    world = World(rank=rank, size=size, local_rank=rank)
    said = measured(world, Path(folder), float(offloaded))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    if size > 1:
        distributed.destroy_process_group()


def measured(world: World, folder: Path, offloaded: float) -> dict[str, int]:
    # What is imported and made once is not a checkpoint's.
    small = trained(world, workload("gpt"), offloaded)
    checkpoint.load(small, checkpoint.save(small, folder / "small"))
    before = held_bytes()
    executor = trained(world, workload("gpt", batch=8, **SIZES), offloaded)
    held = held_bytes()
    begin_peak()
    path = checkpoint.save(executor, folder)
    saving = peak_bytes()
    begin_peak()
    checkpoint.load(executor, path)
    loading = peak_bytes()
    parts = (m for layer in executor.state.layers.values() for m in layer.optimizer)
    state = sum(split.resident.nbytes + split.tail.nbytes for split in parts)
    return {
        "state": state,
        "held": held - before,
        "saving": saving - before,
        "loading": loading - before,
    }


def trained(world: World, work: Workload, offloaded: float) -> Executor:
    """A rank after two steps: where all memory of training has been taken once."""
    layers = work.model.layers
    own = stage(
        layers,
        data_parallel=world.size,
        micro_batch=4 // world.size,
        zero=1,
        offload=ratios(0.0, 0.0, offloaded, 0.0),
    )
    plan = Plan(micro_batches=2, stages=(own,))
    connections = connected(plan, world.rank, maker(world, timeout_s=600))
    streams = SimulatedStreams(spoils=False)
    executor = begun(work, plan, connections, streams, TRAINING)
    for step in range(2):
        run_step(executor, work, connections, step)
    executor.flush()
    # The log of what has run holds what was sent.
    streams.spans()
    return executor


def held_bytes() -> int:
    """Resident memory, without what was freed and might be used again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def begin_peak() -> None:
    """Let the kernel count the peak of this process anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
