"""Analyses each stage of a plan: what fills its memory, its work, and whether it fits."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from experiments.bench.problem import check_equal
from experiments.cli.commandline import batch_status, print_json, progress
from experiments.pages.tables import aligned
from mistlab.core.files import about
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.memory import host_bytes_of_fullest_node
from mistlab.graph.stage_model import StageModel
from mistlab.job.job import Job, load_job
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch, StageFigures

HOLDINGS = ("weights", "gradients", "optimizer", "activations", "buffers")
PEAKS = ("forward", "backward", "step")
# For each workload and engine, the compiled expressions for the costs of a stage.
Models = dict[tuple[Workload, str], StageModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The predicted figures of a plan, beside what its cluster offers."""

    job: Job
    figures: StageFigures
    host_bytes_of_fullest_node: float

    @property
    def tensors_fit(self) -> bool:
        """Whether every GPU has room for the plan's tensors, and every node for the states that are
        offloaded.
        """
        cluster = self.job.cluster
        return bool(
            self.figures.feasible.all()
            and (self.figures.peak_bytes <= cluster.memory_bytes).all()
            and self.host_bytes_of_fullest_node <= cluster.host_memory_bytes
        )


def analyse(options: argparse.Namespace) -> int:
    """Show for each stage of a plan what fills its memory, the memory's peak, its host memory and
    its operations.

    The bytes are those of tensors, as the layer graphs count them exactly. Times, and the bytes
    that the allocator and the GPU's runtime take beyond tensors, are shown by the command predict.
    """
    models: Models = {}
    refused, unreadable = 0, 0
    for path in options.plans:
        job = None
        try:
            job = load_job(path)
            check_equal(job, path)
            with about(path):
                analysis = analysis_of(job, models)
        except InputError as error:
            refused, unreadable = refused + 1, unreadable + (job is None)
            if options.json:
                print_json({"plan": str(path), "error": str(error)})
            else:
                progress(f"error: {error}")
            continue
        if options.json:
            print_json({"plan": str(path), **_mapping(analysis)})
        else:
            print(f"{path}\n{_table(analysis)}")
    return batch_status(len(options.plans), unreadable, all_answered=not refused)


def analysis_of(job: Job, models: Models) -> Analysis:
    """The predicted figures of a job's stages; ``models`` caches the compiled expressions of each
    workload.
    """
    key = job.workload, job.plan.engine
    if key not in models:
        models[key] = StageModel.of(*key)
    figures = models[key].figures(StageBatch.of_plan(job.plan))
    gpus = np.array([stage.num_gpus for stage in job.plan.stages])
    fullest = host_bytes_of_fullest_node(figures.host_bytes, gpus, job.cluster)
    return Analysis(job=job, figures=figures, host_bytes_of_fullest_node=fullest)


def _mapping(analysis: Analysis) -> dict[str, Any]:
    figures, cluster = analysis.figures, analysis.job.cluster
    columns = {entry.name: getattr(figures, entry.name).tolist() for entry in fields(figures)}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {
        "tensors_fit": analysis.tensors_fit,
        "memory_bytes": cluster.memory_bytes,
        "host_bytes_of_fullest_node": analysis.host_bytes_of_fullest_node,
        "host_memory_bytes": cluster.host_memory_bytes,
        "stages": rows,
    }


def _table(analysis: Analysis) -> str:
    figures, job = analysis.figures, analysis.job
    head = ["GiB a GPU", *HOLDINGS, *(f"{phase} peak" for phase in PEAKS), "host", "recomputed"]
    rows = [head]
    for index, stage in enumerate(job.plan.stages):
        values = [getattr(figures, f"{name}_bytes")[index] for name in HOLDINGS]
        values += [getattr(figures, f"{phase}_peak_bytes")[index] for phase in PEAKS]
        values.append(figures.host_bytes[index])
        again = stage.checkpointed_layers / stage.layers
        texts = [f"{value / GIB_BYTES:.2f}" for value in values]
        rows.append([f"stage {index}", *texts, f"{again:.0%}"])
    cluster = job.cluster
    verdict = "fit" if analysis.tensors_fit else "do not fit"
    total = float((figures.forward_flop + figures.backward_flop).sum())
    node = (
        f"{analysis.host_bytes_of_fullest_node / GIB_BYTES:.1f} of "
        f"{cluster.host_memory_bytes / GIB_BYTES:.0f} GiB of host memory on the fullest node"
    )
    work = f"{total / 1e12:.1f} TFLOP a micro-batch on one rank of each stage"
    capacity = f"{cluster.memory_bytes / GIB_BYTES:.1f} GiB a GPU"
    return "\n".join([*aligned(rows, left=()), f"tensors {verdict}: {capacity}; {node}; {work}"])
