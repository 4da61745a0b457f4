"""A survey of a space: every mesh's candidates evaluated, as rows, a table and a picture."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from experiments.cli.commandline import (
    DONE,
    NO_ANSWER,
    print_json,
    progress,
)
from experiments.cli.problem import problem_of
from experiments.cli.rundir import RunDirectory
from experiments.reports import plots
from mistlab.cost.survey import Surveyed, meshes, survey
from mistlab.symbolic.stage_model import StageModel
from mistlab.values.units import GIB_BYTES

EIGHTHS = tuple(i / 8 for i in range(9))


def surveyed(options: argparse.Namespace) -> int:
    """Survey, print a table, write rows and a picture."""
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
