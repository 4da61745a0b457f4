"""A measured run's configuration as a job: a workload, a cluster and a plan of this package."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from mistlab import catalog
from mistlab.cost.confidence import RunKind
from mistlab.engines.engine import ENGINES, Precision
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster, Profile
from mistlab.machine.hardware import Hardware
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Attention, Workload
from mistlab.runs.ahead import host_is_ahead
from mistlab.runs.configuration import GPUS_OF_A_NODE, Configuration
from mistlab.runs.gpu_names import Gpus
from mistlab.runs.partition import blocks_of_stages, unrunnable
from mistlab.runs.recomputed import recomputed
from mistlab.runs.shapes import Shape
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, order_problem
from mistlab.schedule.placement import most_chunks

# Runs take so many GPUs of a rack.
RACK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A run's job, the assumptions with which it was made, and why it cannot run, if so.

    A step runs the job ``times``. With ``saves_unsaid`` nothing tells what the run recomputes.
    Bounds depend on its ``kind``.
    """

    job: Job
    notes: tuple[str, ...]
    kind: RunKind
    times: int = 1
    unrunnable: str = ""
    saves_unsaid: bool = False


def job_of(
    run: Configuration, profile: Profile | None = None, hardware: Hardware | None = None
) -> RunJob:
    """The job of a run, on a cluster with a profile; refuses what no plan here can say.

    A ``hardware`` stands in for that of its name in the catalogue.
    """
    notes = list(run.notes)
    drops_tokens = run.drops_tokens and run.shape.model.experts is not None
    workload = _workload(
        run.shape,
        run.sequence_length,
        run.global_batch,
        run.attention,
        run.precision,
        drops_tokens=drops_tokens,
    )
    blocks = blocks_of_stages(run, notes)
    order = _order(run, blocks, notes)
    mesh = {
        "data_parallel": run.data_parallel,
        "tensor_parallel": run.tensor_parallel,
        "micro_batch": run.micro_batch,
        "zero": run.zero if run.data_parallel * run.context_parallel > 1 else 0,
        "state_replicas": run.state_replicas,
        "context_parallel": run.context_parallel,
        "sequence_parallel": int(run.sequence_parallel),
        "expert_parallel": run.expert_parallel,
        "expert_tensor_parallel": run.expert_tensor_parallel,
    }
    stages = tuple(
        StagePlan.of_values({"layers": layers, **mesh, **recomputed(run, layers)})
        for layers in blocks
    )
    network = run.node_gbytes_per_s
    cluster = _cluster(run.gpus, run.num_gpus, run.gpus_per_node, network, profile, hardware)
    waits = run.otherwise and not host_is_ahead(run, blocks, cluster)
    plan = Plan(
        engine=run.otherwise if waits else run.engine,
        micro_batches=run.micro_batches,
        overlap_communication=_overlaps(run),
        order=order,
        stages=stages,
    )
    return RunJob(
        job=Job(workload=workload, cluster=cluster, plan=plan),
        notes=tuple(notes),
        kind=run.kind,
        times=run.fillings,
        unrunnable=unrunnable(run, blocks),
        saves_unsaid=run.saves_unsaid,
    )


def _overlaps(run: Configuration) -> bool:
    """Whether gradients and weights go on beside passes.

    Those of experts, which are most of a rank's, do not where they cross nodes: gpt-oss 120B on
    eight nodes, each with all experts, takes 2.7 s a step besides its micro-batches.
    """
    if ENGINES[run.engine].afterwards is None:
        return True
    in_node = run.gpus_per_node or GPUS_OF_A_NODE
    copies = run.data_parallel * run.tensor_parallel * run.context_parallel
    copies //= run.expert_parallel * run.expert_tensor_parallel
    crosses = copies > 1 and run.num_gpus > in_node
    has_experts = dict(run.shape.parts).get("experts") is not None
    is_rack = catalog.hardware(run.gpus.hardware).node.is_rack
    is_bridge = ENGINES[run.engine].system == "megatron-bridge"
    return run.overlaps and not (is_bridge and has_experts and crosses and not is_rack)


def _order(run: Configuration, blocks: Sequence[int], notes: list[str]) -> str:
    """The order of the run's passes; where it cannot be said, the nearest one is noted."""
    if run.pipeline_parallel == 1:
        return DEFAULT_ORDER
    if run.order:
        return run.order
    if run.chunks == 1:
        return DEFAULT_ORDER
    engine, most = ENGINES[run.engine], most_chunks(blocks)
    for name, chunks in sorted(INTERLEAVED.items(), key=lambda one: -one[1]):
        problem = engine.order_problem(name, default=DEFAULT_ORDER) or order_problem(
            name, run.pipeline_parallel, run.micro_batches, most
        )
        if chunks <= run.chunks and not problem:
            if chunks < run.chunks:
                notes.append(f"{run.chunks} chunks a stage are predicted as {chunks}")
            return name
    notes.append(f"{run.chunks} chunks a stage are predicted as one")
    return DEFAULT_ORDER


@cache
def _workload(
    shape: Shape,
    sequence_length: int,
    global_batch: int,
    attention: Attention,
    precision: Precision,
    *,
    drops_tokens: bool,
) -> Workload:
    return Workload(
        model=shape.model,
        sequence_length=sequence_length,
        global_batch=global_batch,
        attention=attention,
        precision=precision,
        # Every expert takes as many tokens as come in the mean.
        expert_capacity=1.0 if drops_tokens else None,
        expert_padding=drops_tokens,
    )


@cache
def _cluster(
    gpus: Gpus,
    num_gpus: int,
    gpus_per_node: int,
    node_gbytes_per_s: float | None,
    profile: Profile | None,
    own: Hardware | None,
) -> Cluster:
    """The fewest whole nodes that hold the GPUs."""
    if own is not None and own.name == gpus.hardware:
        hardware = own
    else:
        hardware = _with_products(catalog.hardware(gpus.hardware), gpus.products_share)
    in_node = RACK if hardware.node.is_rack else gpus_per_node or hardware.node.gpus
    used = min(num_gpus, in_node, hardware.node.gpus)
    return Cluster(
        hardware=hardware,
        nodes=-(-num_gpus // used),
        gpus_per_node=used,
        memory_gib=gpus.memory_gib,
        inter_node_gbytes_per_s=node_gbytes_per_s,
        profile=profile,
    )


def _with_products(hardware: Hardware, share: float) -> Hardware:
    """A hardware whose products in 16 bits keep up a share of their rate."""
    compute = hardware.compute
    if share == 1 or compute is None:
        return hardware
    rates = tuple(
        replace(rate, tflops=rate.tflops * share)
        if rate.operators in ("matmul", "batched_matmul", "grouped_matmul") and rate.tflops
        else rate
        for rate in compute.rates
    )
    return replace(hardware, compute=replace(compute, rates=rates))
