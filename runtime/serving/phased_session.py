"""Processes that serve a model alternating between two layouts: they connect, serve, and return a
record of each process's run.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mistlab.core.values import reject
from mistlab.serving.changing_run import ChangingRun
from mistlab.serving.load import ServingLoad
from runtime.comm.group import Alone, Group
from runtime.comm.processes import (
    World,
    everybody,
    gathered,
    join,
    leave,
    maker,
    meet,
    world_of_launcher,
)
from runtime.failure import let_go
from runtime.runnable import check_model, check_usual
from runtime.serving.phased_rank import HostMemory, PhasedJob, PhasedRank, ServedRun
from runtime.serving.served_weights import drawn_by
from runtime.threads import with_share

CPU = torch.device("cpu")
# A folder whose files are in memory, where the system has it.
MEMORY_FOLDER = Path("/dev/shm")


def drawn_prompts(run: ChangingRun, load: ServingLoad, seed: int) -> list[list[int]]:
    """Random prompt tokens for all requests."""
    draw = torch.Generator().manual_seed(seed)
    vocab = run.model.vocab
    return [torch.randint(vocab, (one,), generator=draw).tolist() for one in load.prompts]


def job_of(run: ChangingRun, load: ServingLoad, seed: int) -> PhasedJob:
    """The inputs of all ranks for serving; prompts and weights are drawn by a seed."""
    return PhasedJob(
        workload=run.workload,
        layouts=(run.prefill.layout, run.decode.layout),
        limits=run.limits,
        load=load,
        prompts=drawn_prompts(run, load, seed),
        start=drawn_by(run.workload, seed),
        weights_from_host=run.weights_from == "host",
    )


def serve(run: ChangingRun, job: PhasedJob, timeout_s: float) -> tuple[World, list[ServedRun]]:
    """Serve a job on all processes that a launcher started; returns this process's ranks, and the
    record of each process's run.
    """
    world = world_of_launcher()
    _check_started(run, world)
    check_model(run.workload)
    check_usual(run.workload)
    if further := run.workload.model.further_tokens:
        reject(
            f"workload.model.further_tokens: {further}, but models that predict further tokens "
            "cannot be served yet: give 0"
        )
    with with_share(None):
        try:
            join(world, CPU, timeout_s)
            runs = gathered(serve_joined(job, world, timeout_s))
        except BaseException:
            let_go(CPU, None)
            raise
        leave(world)
    return world, runs


def serve_joined(job: PhasedJob, world: World, timeout_s: float) -> ServedRun:
    """Serve a job on connected processes; returns the record of this process's run."""
    with _host_memory(world) as host_memory:
        rank = PhasedRank(
            job,
            world=_everybody(world),
            maker=maker(world, timeout_s),
            host_memory=host_memory,
        )
    return rank.run()


def _everybody(world: World) -> Group:
    return Alone() if world.size == 1 else everybody()


def _check_started(run: ChangingRun, world: World) -> None:
    ranks = run.prefill.layout.gpus
    if world.size != ranks:
        were = "1 was" if world.size == 1 else f"{world.size} were"
        reject(
            f"the layouts take {ranks} rank{'s' if ranks > 1 else ''}, {were} started: start "
            f"torchrun --nproc-per-node {ranks} -m experiments.run_serving ..."
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) != world.size:
        reject(
            f"--nnodes: {world.size} ranks are not on one node, whose memory is the host's tier: "
            "start all on one node"
        )


@contextmanager
def _host_memory(world: World) -> Iterator[HostMemory]:
    """Within the ``with`` block, memory that all processes of the node share; it is freed when the
    last of them ends.
    """
    folder_made = None
    if world.rank == 0:
        parent = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
        folder_made = tempfile.mkdtemp(prefix="mistlab-", dir=parent)
    folder = next(one for one in gathered(folder_made) if one is not None)

    def shared(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        file = str(Path(folder, name))
        return torch.from_file(file, shared=True, size=count, dtype=dtype).view(shape)

    try:
        yield shared
        # All processes have mapped the memory by now, so its files can be removed.
        meet()
    finally:
        if folder_made is not None:
            shutil.rmtree(folder_made, ignore_errors=True)
