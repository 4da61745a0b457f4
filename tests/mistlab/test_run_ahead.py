"""Runs of nanotron hold whole tensors where the first stage's host gets ahead of its GPU."""

import pytest

from experiments.runs.configuration import configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.job.job import Job

RUN = {
    "engine": "nanotron",
    "hardware": "H100",
    "gpus_per_node": "8",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "sequence_length": "4096",
    "global_batch": "256",
    "micro_batch": "1",
    "tp": "8",
    "zero": "1",
    "recompute": "none",
    "notes": "tied embeddings",
}


def job(**changes: str) -> Job:
    row = TableRow(file="runs.csv", number=1, line=2, cells={**RUN, **changes})
    return job_of(configuration_of(row)).job


# Sixteen blocks on four stages are 6, 5, 5 and the head; on eight 3, 3, 2, 3, 2, 3 and the head.
@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"pp": "1", "dp": "8"}, "nanotron-whole-inputs"),
        ({"pp": "4", "dp": "2"}, "nanotron"),
        ({"pp": "8", "dp": "2"}, "nanotron-whole-inputs"),
        ({"pp": "8", "dp": "8"}, "nanotron"),
        ({"pp": "8", "dp": "1", "tp": "32"}, "nanotron"),
        ({"pp": "8", "dp": "8", "tp": "1"}, "nanotron"),
    ],
    ids=[
        "no pipeline",
        "a first stage that never waits",
        "a first stage that waits for its neighbour",
        "late sends on 512 GPUs",
        "late sends where 32 ranks share a block",
        "no tensor parallelism",
    ],
)
def test_a_stage_holds_whole_tensors_where_its_host_gets_ahead(
    changes: dict[str, str], engine: str
) -> None:
    assert job(**changes).plan.engine == engine


def test_memory_of_a_run_does_not_depend_on_whether_its_cluster_is_named() -> None:
    row = TableRow(
        file="runs.csv", number=1, line=2, cells={**RUN, "pp": "8", "dp": "8", "gpus": "512"}
    )
    run = configuration_of(row)
    engines = {job_of(run, name).job.plan.engine for name in (None, catalog.profile("ultrascale"))}
    assert engines == {"nanotron"}
