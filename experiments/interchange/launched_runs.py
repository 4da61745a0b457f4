"""Measured runs with launch files: the plan of each run is imported from the file that launched it.

A folder holds a file for each run, with the name of the run: a launch script, or a DeepSpeed JSON
file; for the latter, the table of runs gives model, sequence length and attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.calibration.published import PublishedRun
from experiments.interchange.source_files import source_of
from mistlab.core.files import about
from mistlab.core.values import reject
from mistlab.engines.engine import ENGINES
from mistlab.export.given import Given
from mistlab.formats.file_formats import format_of
from mistlab.stages.stage_batch import StageBatch


def launched_runs(runs: Sequence[PublishedRun], folder: Path) -> list[PublishedRun]:
    """The measured runs for which a folder has a launch file, each with the plan in that file."""
    if not folder.is_dir():
        reject(f"--launch {folder}: is not a folder: give one with a launch file for each run")
    files = {path.stem: path for path in sorted(folder.glob("*")) if path.is_file()}
    launched = list(_launched(runs, files))
    if not launched:
        names = ", ".join([*dict.fromkeys(one.name for one in runs)][:3])
        reject(
            f"--launch {folder}: has no file named after a run, such as {names}: rename its files, "
            "or give --tables with the runs that they are named after"
        )
    return launched


def _launched(runs: Sequence[PublishedRun], files: dict[str, Path]) -> Iterator[PublishedRun]:
    for run in runs:
        path = files.get(run.name)
        if path is None:
            continue
        with about(path):
            source = source_of(path)
            row = format_of(source)
            job = row.read(source, _given(run, is_whole=row.name == "megatron")).job
        yield replace(
            run,
            set=f"{run.set}, launch lines",
            workload=job.workload,
            cluster=job.cluster,
            engine=job.plan.engine,
            overlap_communication=job.plan.overlap_communication,
            ran_by=ENGINES[job.plan.engine],
            micro_batches=job.plan.micro_batches,
            stages=StageBatch.of_plan(job.plan),
            plan=job.plan,
        )


def _given(run: PublishedRun, *, is_whole: bool) -> Given:
    """The settings that a run's launch file lacks, such as the machine, from the table of runs."""
    cluster, workload = run.cluster, run.workload
    if is_whole:
        return Given(hardware=cluster.hardware)
    return Given(
        hardware=cluster.hardware,
        model=workload.model,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        sequence_length=workload.sequence_length,
        attention=workload.attention,
    )
