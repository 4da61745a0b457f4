"""A run that somebody measured and published: what ran, and how long an iteration took."""

from dataclasses import dataclass

import numpy as np

from mistlab.engines.engine import Engine
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import in_flight
from mistlab.stages.stage_batch import StageBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedRun:
    """A run that was measured: what ran, and how long an iteration took.

    ``stages`` has fractional layers where the run split single operators; then ``plan`` is None.
    ``set`` is what the run is reported with, ``fold`` what a fit leaves out together. ``ran_by`` is
    the engine that ran it. ``engine`` names the engine of plans that are compared with this run.
    """

    name: str
    set: str
    fold: str
    workload: Workload
    cluster: Cluster
    engine: str
    ran_by: Engine
    overlap_communication: bool
    micro_batches: int
    stages: StageBatch
    plan: Plan | None
    iteration_s: float
    allocated_bytes: tuple[float, ...] = ()
    reserved_bytes: tuple[float, ...] = ()


def stage_columns(*, ratios: np.ndarray, micro_batches: int, **values: np.ndarray) -> StageBatch:
    """Columns of a pipeline's stages, whose places say the rest; ``ratios`` are of ``OFFLOADS``."""
    num_stages = len(values["layers"])
    stages = np.arange(num_stages)
    gpus = values["data_parallel"] * values["tensor_parallel"]
    return StageBatch(
        **values,
        **dict(zip(OFFLOADS, ratios.T, strict=True)),
        in_flight=np.array([in_flight(int(i), num_stages, micro_batches) for i in stages]),
        has_embedding=(stages == 0).astype(int),
        has_head=(stages == num_stages - 1).astype(int),
        first_rank=np.cumsum(gpus) - gpus,
    )


def plan_of(batch: StageBatch, micro_batches: int, engine: str, overlaps: bool) -> Plan:
    """The plan of whole layers that columns of stages say."""
    stages = tuple(
        StagePlan.of_values({name: batch.value(name)[i] for name in DIMENSIONS})
        for i in range(len(batch))
    )
    return Plan(
        engine=engine, micro_batches=micro_batches, overlap_communication=overlaps, stages=stages
    )
