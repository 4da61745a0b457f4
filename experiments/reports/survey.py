"""A survey of a space: every mesh's candidates evaluated, as rows, a table and a picture."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from experiments.cli.commandline import DONE, NO_ANSWER, progress
from experiments.cli.problem import problem_of
from experiments.frame.charts import Drawn
from experiments.frame.study import Report, Study
from experiments.frame.tables import table_of
from experiments.reports import plots
from mistlab.cost.survey import Surveyed, meshes, survey
from mistlab.symbolic.stage_model import StageModel
from mistlab.values.units import GIB_BYTES

EIGHTHS = tuple(i / 8 for i in range(9))


def surveyed(options: argparse.Namespace) -> int:
    """Every candidate of a space at once: what fits, and what it costs to make it fit.

    A candidate is a pipeline of equal stages: its depth, data and tensor parallel degrees,
    micro-batch, ZeRO level, checkpointed blocks and the four offload ratios. The survey
    evaluates the first and the last stage of each and keeps, for every mesh, the least
    recomputation that fits for a given use of host memory. It knows bytes and work, not times:
    those need a calibrated predictor.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("survey", options)
    model = StageModel.of(workload)
    ratios = (0.0, 0.5, 1.0) if options.quick else EIGHTHS
    started = time.perf_counter()
    found = []
    for mesh in meshes(workload, cluster):
        found.append(survey(model, cluster, mesh, ratios))
        study.add(_row(found[-1]))
        progress(f"{mesh.label}: {found[-1].fitting:,} of {found[-1].candidates:,} fit")
    seconds = time.perf_counter() - started
    candidates, fitting = (sum(row[name] for row in study.rows) for name in COUNTS)
    title = f"{options.model} on {cluster.num_gpus} {options.hardware}"
    words = (
        f"{fitting:,} of {candidates:,} candidates fit "
        f"({2 * candidates / seconds / 1e6:.1f} million stage rows a second)."
    )
    report = Report(
        title=f"What fits: {title}",
        words=[_table(found), words],
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
    words = f"{share:.0%} with {host / GIB_BYTES:.1f} GiB of host memory a GPU"
    if len(entry.frontier) > 1:
        words += f" -> {least:.0%} with {most / GIB_BYTES:.1f}"
    return words
