"""Lists all plans with equal stages in a search space: which of them fit in memory, and which
memory savings would make the others fit.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from experiments.bench.problem import problem_of
from experiments.cli.commandline import DONE, NO_ANSWER, progress
from experiments.pages.charts import Drawn
from experiments.pages.study import Report, Study
from experiments.pages.tables import table_of
from experiments.prediction import plots
from mistlab.core.arrays import Floats
from mistlab.core.units import GIB_BYTES
from mistlab.cost.memory import reserved_bytes, room_bytes
from mistlab.engines.engine import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.orders import in_flight
from mistlab.stages.stage_batch import StageBatch, StageFigures

# Evaluates all pipelines of equal stages on a mesh in one batch, to find those that fit in memory.
#
# A candidate is a pipeline of equal stages, with its number of stages, parallel degrees,
# micro-batch size, ZeRO level, recomputed blocks and four offload ratios. Its first and its last
# stage are evaluated. The frontier is the least recomputation with which a candidate fits, for each
# amount of host memory.


KINDS = ("weights", "gradients", "optimizer", "activations")
LARGEST_MICRO_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A division of GPUs and batch among stages, replicas and tensor-parallel ranks, before memory
    savings are chosen.
    """

    stages: int
    data_parallel: int
    tensor_parallel: int
    micro_batch: int
    micro_batches: int

    @property
    def label(self) -> str:
        """A short description of how GPUs and batch are divided."""
        return (
            f"pp {self.stages} · dp {self.data_parallel} · tp {self.tensor_parallel}"
            f" · micro-batch {self.micro_batch}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """The result for one division of GPUs and batch: how many candidates there are, how many fit in
    memory, and how much recomputation is needed for each amount of host memory.

    A row of ``frontier`` has host bytes for each GPU, the share of recomputed blocks, and peak
    bytes. Every candidate with at most these host bytes recomputes at least as much.
    """

    mesh: Mesh
    candidates: int
    fitting: int
    frontier: tuple[tuple[float, float, float], ...]


def meshes(workload: Workload, cluster: Cluster) -> Iterator[Mesh]:
    """All ways to divide a cluster's GPUs into equal stages, and the batch into micro-batches."""
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
    """Evaluate all combinations of memory savings for one division of GPUs and batch."""
    layers = model.workload.model.layers // mesh.stages
    grid = candidates_of(model.workload.model, mesh, ratios)
    fits, ends = np.ones(len(grid), dtype=bool), []
    for first in (True, False):
        batch = rows_of_mesh(mesh, layers, grid, first=first)
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


def _first_node_bytes(mesh: Mesh, cluster: Cluster, ends: Sequence[StageFigures]) -> Floats:
    """The bytes of host memory that are used on the first node, which uses the most.

    Its stages have the most micro-batches in flight. A stage's host bytes lie between those of the
    first and of the last stage, in proportion to its micro-batches in flight.
    """
    first, last = (figures.host_bytes for figures in ends)
    ranks = np.arange(min(cluster.gpus_per_node, cluster.num_gpus))
    held = [
        in_flight(int(stage), mesh.stages, mesh.micro_batches)
        for stage in ranks // (mesh.data_parallel * mesh.tensor_parallel)
    ]
    most = in_flight(0, mesh.stages, mesh.micro_batches)
    shares = [(count - 1) / (most - 1) if most > 1 else 1.0 for count in held]
    return np.asarray(len(ranks) * last + sum(shares) * (first - last))


def candidates_of(model: ModelSpec, mesh: Mesh, ratios: Sequence[float]) -> Floats:
    """All combinations of ZeRO level, number of recomputed blocks and four offload ratios, as
    candidates for one division of GPUs and batch.
    """
    levels = (1, 2, 3) if mesh.data_parallel > 1 else (0,)
    checkpointed = np.arange(model.layers // mesh.stages + 1)
    axes = np.meshgrid(levels, checkpointed, *([ratios] * len(KINDS)), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


def rows_of_mesh(mesh: Mesh, layers: int, grid: Floats, *, first: bool) -> StageBatch:
    """The first or the last stage of a pipeline, once for each combination of ``candidates_of``."""
    rows = len(grid)
    stage = 0 if first else mesh.stages - 1
    return StageBatch(
        layers=np.full(rows, layers),
        data_parallel=np.full(rows, mesh.data_parallel),
        tensor_parallel=np.full(rows, mesh.tensor_parallel),
        micro_batch=np.full(rows, mesh.micro_batch),
        zero=grid[:, 0],
        checkpointed_layers=grid[:, 1],
        in_flight=np.full(rows, in_flight(stage, mesh.stages, mesh.micro_batches)),
        has_embedding=np.full(rows, stage == 0),
        has_head=np.full(rows, stage == mesh.stages - 1),
        first_rank=np.full(rows, stage * mesh.data_parallel * mesh.tensor_parallel),
        **{f"offload_{kind}": grid[:, 2 + i] for i, kind in enumerate(KINDS)},
    )


def _frontier(
    host: Floats, recomputed: Floats, peak: Floats
) -> tuple[tuple[float, float, float], ...]:
    order = np.lexsort((peak, recomputed, host))
    rows = np.stack([host, recomputed, peak], axis=1)[order]
    best = np.minimum.accumulate(np.append(np.inf, rows[:-1, 1])) if len(rows) else np.empty(0)
    return tuple((float(h), float(r), float(p)) for h, r, p in rows[rows[:, 1] < best])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# Surveys a search space: evaluates the candidates of each division of GPUs and batch, and makes
# rows, a table and a picture.


EIGHTHS = tuple(i / 8 for i in range(9))


def surveyed(options: argparse.Namespace) -> int:
    """Evaluate every plan with equal stages of a search space: which plans fit, and what it costs
    to make the others fit.

    A candidate is a pipeline of equal stages: its number of stages, data and tensor parallel
    degrees, micro-batch size, ZeRO level, recomputed blocks and four offload ratios. The first and
    the last stage of each are evaluated. For every mesh, the survey shows the least recomputation
    that fits with a given amount of host memory. It shows memory and work, but no times, so it
    needs no calibrated hardware.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("survey", options)
    model = StageModel.of(workload)
    ratios = (0.0, 0.5, 1.0) if options.quick else EIGHTHS
    started = time.perf_counter()
    surveyed_meshes = []
    for mesh in meshes(workload, cluster):
        entry = survey(model, cluster, mesh, ratios)
        surveyed_meshes.append(entry)
        study.add(_row(entry))
        progress(f"{mesh.label}: {entry.fitting:,} of {entry.candidates:,} fit")
    seconds = time.perf_counter() - started
    candidates, fitting = (sum(row[name] for row in study.rows) for name in COUNTS)
    title = f"{options.model} on {cluster.num_gpus} {options.hardware}"
    sentence = (
        f"{fitting:,} of {candidates:,} candidates fit "
        f"({2 * candidates / seconds / 1e6:.1f} million stage rows a second)."
    )
    report = Report(
        title=f"What fits: {title}",
        words=[_table(surveyed_meshes), sentence],
        summary={
            "candidates": candidates,
            "fitting": fitting,
            "timing": {"stage_rows_per_s": 2 * candidates / seconds},
        },
        pictures=[
            Drawn(
                name="survey",
                caption="The least recomputation that fits for a given use of host memory.",
                draw=partial(plots.frontiers, study.rows, title),
            )
        ],
    )
    return study.end(report, DONE if fitting else NO_ANSWER)


COUNTS = ("candidates", "fitting")


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
    return table_of(
        surveyed,
        ("mesh", "{mesh.label}"),
        ("candidates", "{candidates:,}"),
        ("fit", "{fitting:,}"),
        ("recomputed, without offload -> at most offload", _recomputed),
    )


def _recomputed(entry: Surveyed) -> str:
    if not entry.frontier:
        return "nothing fits"
    (host, share, _), (most, least, _) = entry.frontier[0], entry.frontier[-1]
    text = f"{share:.0%} with {host / GIB_BYTES:.1f} GiB of host memory a GPU"
    if len(entry.frontier) > 1:
        text += f" -> {least:.0%} with {most / GIB_BYTES:.1f}"
    return text
