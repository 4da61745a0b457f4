"""Published runs as jobs: rows of an end-to-end table (docs/reference/measurement-tables.md)."""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mistlab import catalog
from mistlab.cluster import Cluster
from mistlab.errors import InputError
from mistlab.job import Job
from mistlab.plan import Offload, Plan, StagePlan
from mistlab.workload import Workload

NEEDED = (
    *("id", "hardware", "nodes", "gpus", "system", "model", "flash", "seq", "vocab"),
    *("global_batch", "grad_accum", "num_stages", "layers", "ckpt_layers", "mbs", "dp", "tp"),
    *("zero_wgo", "offload_wgoa", "iter_s", "peak_alloc_mb", "peak_reserved_mb"),
)
MIB_BYTES = 2**20

# The published tables write the family of GPT-3's shapes as gpt2.
CATALOGUE_FAMILY = {"gpt2": "gpt3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run of a plan: its job, and torch's peak of allocated bytes on each stage."""

    name: str
    job: Job
    peak_allocated_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    """The runs of a table with memory, and how many rows say nothing of it."""

    path: Path
    sha256: str
    runs: tuple[PublishedRun, ...]
    without_memory: int


def read_published(path: Path) -> PublishedRuns:
    """Read the runs whose memory was measured and whose plan is written out in whole blocks."""
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}: check the path"
        raise InputError(message) from None
    reader = csv.DictReader(content.decode("utf-8", errors="replace").splitlines())
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        message = (
            f"{path}: column {', '.join(missing)} is missing: give a table as in "
            "docs/reference/measurement-tables.md"
        )
        raise InputError(message)
    runs, without = [], 0
    for row in reader:
        if row["system"] != "mist" or not row["peak_alloc_mb"]:
            without += 1
            continue
        try:
            runs.append(_run(row))
        except (ValueError, IndexError) as error:
            message = f"{path}: line {reader.line_num}: {error}: correct the row"
            raise InputError(message) from None
    return PublishedRuns(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        runs=tuple(runs),
        without_memory=without,
    )


def _run(row: Mapping[str, str]) -> PublishedRun:
    family, _, size = row["model"].partition("-")
    model = catalog.model(f"{CATALOGUE_FAMILY.get(family, family)}-{size}")
    workload = Workload(
        model=replace(model, name="", vocab=int(row["vocab"])),
        sequence_length=int(row["seq"]),
        global_batch=int(row["global_batch"]),
        attention="flash" if row["flash"] == "True" else "math",
        precision="fp16",
    )
    nodes = int(row["nodes"])
    cluster = Cluster(
        hardware=catalog.hardware(row["hardware"]),
        nodes=nodes,
        gpus_per_node=int(row["gpus"]) // nodes,
    )
    plan = Plan(micro_batches=int(row["grad_accum"]), stages=_stages(row))
    peaks = tuple(float(text) * MIB_BYTES for text in row["peak_alloc_mb"].split())
    if len(peaks) != plan.num_stages:
        message = f"peak_alloc_mb: {len(peaks)} peaks for {plan.num_stages} stages"
        raise InputError(message)
    return PublishedRun(
        name=row["id"],
        job=Job(workload=workload, cluster=cluster, plan=plan),
        peak_allocated_bytes=peaks,
    )


def _stages(row: Mapping[str, str]) -> tuple[StagePlan, ...]:
    def of_stage(name: str) -> Sequence[str]:
        texts = row[name].split()
        return texts * int(row["num_stages"]) if len(texts) == 1 else texts

    stages = []
    for index in range(int(row["num_stages"])):
        ratios = [float(ratio) for ratio in of_stage("offload_wgoa")[index].split("/")]
        if len(ratios) == 1:
            ratios *= 4
        stages.append(
            StagePlan(
                layers=int(of_stage("layers")[index]),
                data_parallel=int(of_stage("dp")[index]),
                tensor_parallel=int(of_stage("tp")[index]),
                micro_batch=int(of_stage("mbs")[index]),
                zero=of_stage("zero_wgo")[index].count("1"),
                checkpointed_layers=int(of_stage("ckpt_layers")[index]),
                offload=Offload(
                    weights=ratios[0],
                    gradients=ratios[1],
                    optimizer=ratios[2],
                    activations=ratios[3],
                ),
            )
        )
    return tuple(stages)
