"""Every candidate of a space at once: what fits, and what it costs to make it fit.

A candidate is a pipeline of equal stages: its depth, data and tensor parallel degrees, micro-batch,
ZeRO level, checkpointed blocks and the four offload ratios. The survey evaluates the first and the
last stage of each and keeps, for every mesh, the least recomputation that fits for a given use of
host memory. It knows bytes and work, not times: those need a calibrated predictor.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.cli.commandline import (
    DONE,
    NO_ANSWER,
    PROBLEM,
    parser_of,
    print_json,
    problem_of,
    progress,
    run,
)
from experiments.cli.rundir import RunDirectory
from experiments.reports import plots
from mistlab.cost.memory import reserved_bytes, room_bytes
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.orders import in_flight
from mistlab.symbolic.stage_model import StageModel
from mistlab.values.model import ModelSpec
from mistlab.values.stages import StageBatch, StageFigures
from mistlab.values.units import GIB_BYTES
from mistlab.values.workload import Workload

EIGHTHS = tuple(i / 8 for i in range(9))
KINDS = ("weights", "gradients", "optimizer", "activations")
LARGEST_MICRO_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How GPUs and the batch are divided, before memory is saved."""

    stages: int
    data_parallel: int
    tensor_parallel: int
    micro_batch: int
    micro_batches: int

    @property
    def label(self) -> str:
        """The mesh in a few words."""
        return (
            f"pp {self.stages} · dp {self.data_parallel} · tp {self.tensor_parallel}"
            f" · micro-batch {self.micro_batch}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """One mesh: how many candidates there are and fit, and its frontier.

    ``frontier`` has rows of host bytes a GPU, recomputed share of the blocks, peak bytes: each the
    least recomputation for no more host memory.
    """

    mesh: Mesh
    candidates: int
    fitting: int
    frontier: tuple[tuple[float, float, float], ...]


def main(arguments: Sequence[str]) -> int:
    """Survey, print a table, write rows and a picture."""
    options = parser().parse_args(arguments)
    workload, cluster = problem_of(options)
    directory = RunDirectory.make(options.out, "survey", vars(options))
    model = StageModel.of(workload)
    ratios = (0.0, 0.5, 1.0) if options.quick else EIGHTHS
    started = time.perf_counter()
    surveyed = []
    for mesh in meshes(workload, cluster):
        surveyed.append(survey(model, cluster, mesh, ratios))
        progress(f"{mesh.label}: {surveyed[-1].fitting:,} of {surveyed[-1].candidates:,} fit")
    seconds = time.perf_counter() - started
    candidates = sum(s.candidates for s in surveyed)
    fitting = sum(s.fitting for s in surveyed)
    rows = [_row(s) for s in surveyed]
    summary = {
        "candidates": candidates,
        "fitting": fitting,
        "meshes": rows,
        "timing": {"seconds": seconds, "stage_rows_per_s": 2 * candidates / seconds},
    }
    directory.write_rows(rows)
    title = f"{options.model} on {cluster.num_gpus} {options.hardware}"
    plots.frontiers(rows, directory.path / "survey.svg", title)
    if options.json:
        print_json(summary)
    else:
        print(_table(surveyed))
        print(
            f"{fitting:,} of {candidates:,} candidates fit "
            f"({2 * candidates / seconds / 1e6:.1f} million stage rows a second); "
            f"picture and rows: {options.out}"
        )
    return DONE if fitting else NO_ANSWER


def meshes(workload: Workload, cluster: Cluster) -> Iterator[Mesh]:
    """Every way to divide all GPUs of a cluster into equal stages, and the batch into sequences."""
    gpus, model = cluster.num_gpus, workload.model
    for stages in _divisors(gpus):
        if model.layers % stages:
            continue
        for tensor_parallel in _divisors(gpus // stages):
            data_parallel = gpus // stages // tensor_parallel
            for micro_batch in _divisors(workload.global_batch // data_parallel):
                if workload.global_batch % data_parallel or micro_batch > LARGEST_MICRO_BATCH:
                    continue
                yield Mesh(
                    stages=stages,
                    data_parallel=data_parallel,
                    tensor_parallel=tensor_parallel,
                    micro_batch=micro_batch,
                    micro_batches=workload.global_batch // data_parallel // micro_batch,
                )


def survey(model: StageModel, cluster: Cluster, mesh: Mesh, ratios: Sequence[float]) -> Surveyed:
    """Evaluate every way to save memory on one mesh."""
    layers = model.workload.model.layers // mesh.stages
    grid = candidates_of(model.workload.model, mesh, ratios)
    fits, ends = np.ones(len(grid), dtype=bool), []
    for first in (True, False):
        batch = _stage(mesh, layers, grid, first=first)
        figures = model.figures(batch)
        reserved = reserved_bytes(figures, batch, cluster, ENGINES[model.engine])
        fits &= figures.feasible & (reserved <= room_bytes(cluster))
        ends.append(figures)
    peak, host = (
        np.maximum(*(getattr(figures, name) for figures in ends))
        for name in ("peak_bytes", "host_bytes")
    )
    fits &= _first_node_bytes(mesh, cluster, ends) <= cluster.host_memory_bytes
    return Surveyed(
        mesh=mesh,
        candidates=len(grid),
        fitting=int(fits.sum()),
        frontier=_frontier(host[fits], grid[fits, 1] / layers, peak[fits]),
    )


def _first_node_bytes(
    mesh: Mesh, cluster: Cluster, ends: Sequence[StageFigures]
) -> NDArray[np.float64]:
    """What the host of the first node holds, which is the fullest: its stages have most
    micro-batches in flight, and hold as much more than the last one as they have more of these."""
    first, last = (figures.host_bytes for figures in ends)
    ranks = np.arange(min(cluster.gpus_per_node, cluster.num_gpus))
    held = [
        in_flight(int(stage), mesh.stages, mesh.micro_batches)
        for stage in ranks // (mesh.data_parallel * mesh.tensor_parallel)
    ]
    most = in_flight(0, mesh.stages, mesh.micro_batches)
    shares = [(count - 1) / (most - 1) if most > 1 else 1.0 for count in held]
    return np.asarray(len(ranks) * last + sum(shares) * (first - last))


def candidates_of(model: ModelSpec, mesh: Mesh, ratios: Sequence[float]) -> NDArray[np.float64]:
    """Rows of ZeRO level, checkpointed blocks and the four ratios."""
    levels = (1, 2, 3) if mesh.data_parallel > 1 else (0,)
    checkpointed = np.arange(model.layers // mesh.stages + 1)
    axes = np.meshgrid(levels, checkpointed, *([ratios] * len(KINDS)), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


def _stage(mesh: Mesh, layers: int, grid: NDArray[np.float64], *, first: bool) -> StageBatch:
    rows = len(grid)
    place = 0 if first else mesh.stages - 1
    return StageBatch(
        layers=np.full(rows, layers),
        data_parallel=np.full(rows, mesh.data_parallel),
        tensor_parallel=np.full(rows, mesh.tensor_parallel),
        micro_batch=np.full(rows, mesh.micro_batch),
        zero=grid[:, 0],
        checkpointed_layers=grid[:, 1],
        in_flight=np.full(rows, in_flight(place, mesh.stages, mesh.micro_batches)),
        has_embedding=np.full(rows, place == 0),
        has_head=np.full(rows, place == mesh.stages - 1),
        first_rank=np.full(rows, place * mesh.data_parallel * mesh.tensor_parallel),
        **{f"offload_{kind}": grid[:, 2 + i] for i, kind in enumerate(KINDS)},
    )


def _frontier(
    host: NDArray[np.float64], recomputed: NDArray[np.float64], peak: NDArray[np.float64]
) -> tuple[tuple[float, float, float], ...]:
    order = np.lexsort((peak, recomputed, host))
    rows = np.stack([host, recomputed, peak], axis=1)[order]
    best = np.minimum.accumulate(np.append(np.inf, rows[:-1, 1])) if len(rows) else np.empty(0)
    return tuple((float(h), float(r), float(p)) for h, r, p in rows[rows[:, 1] < best])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    return parser_of(
        "survey",
        __doc__,
        **PROBLEM,
        out=Path("runs/survey"),
        json=False,
        quick=False,
    )


def _row(surveyed: Surveyed) -> dict[str, Any]:
    mesh = surveyed.mesh
    return {
        **{entry.name: getattr(mesh, entry.name) for entry in fields(mesh)},
        "candidates": surveyed.candidates,
        "fitting": surveyed.fitting,
        "frontier": [
            {"host_bytes": host, "recomputed_share": share, "peak_bytes": peak}
            for host, share, peak in surveyed.frontier
        ],
    }


def _table(surveyed: Sequence[Surveyed]) -> str:
    lines = [
        f"{'mesh':44} {'candidates':>10} {'fit':>9}  recomputed, without offload -> at most offload"
    ]
    for entry in surveyed:
        line = f"{entry.mesh.label:44} {entry.candidates:>10,} {entry.fitting:>9,}  "
        if entry.frontier:
            (host, share, _), (most, least, _) = entry.frontier[0], entry.frontier[-1]
            line += f"{share:.0%} with {host / GIB_BYTES:.1f} GiB of host memory a GPU"
            if len(entry.frontier) > 1:
                line += f" -> {least:.0%} with {most / GIB_BYTES:.1f}"
        else:
            line += "nothing fits"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
