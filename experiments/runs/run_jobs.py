"""Turns configurations of measured runs into jobs: divides blocks among stages, sets recomputation,
and finds whether the host runs ahead of the GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from experiments.runs.attention_kernels import AttentionKernel, with_kernel
from experiments.runs.configuration import GPUS_OF_A_NODE, Configuration
from experiments.runs.copy_engines import with_copy_engines
from experiments.runs.dialects.gpu_names import Gpus
from experiments.runs.impossible import Limits, limits_of
from experiments.runs.kept_elsewhere import ALL_KEPT, KeptElsewhere
from experiments.runs.named_recomputation import freed_share
from experiments.runs.sequences import ASSUMED_MICRO_BATCH
from experiments.runs.shapes import Shape
from mistlab import catalog
from mistlab.core.values import refuse, shown
from mistlab.cost.confidence import RunKind, slowest_cluster
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster, Profile
from mistlab.machine.hardware import Hardware
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, order_problem
from mistlab.schedule.placement import even_shares, most_chunks

# Finds whether the host of a run's first stage runs ahead of its GPU; if it does, tensors of
# collectives stay in memory longer.


def host_is_ahead(run: Configuration, blocks: Sequence[int], cluster: Cluster) -> bool:
    """Whether the host of the first stage runs ahead of its GPU.

    Without a pipeline it does. In a pipeline it does if the GPU often waits for neighbouring
    stages. The GPU of a first stage with more blocks than any other never waits, so its host does
    not run ahead. If sends are late on the slowest cluster on which the engine was measured, hosts
    wait for sends too.
    """
    if len(blocks) == 1:
        return True
    if blocks[0] > max(blocks[1:]):
        return False
    known = slowest_cluster(cluster, ENGINES[run.engine]) or cluster
    if known.profile is None:
        return True
    late_s = known.profile.send_s(np.array([run.tensor_parallel]), known.num_gpus)
    return not late_s.any()


# Translates a run's recomputation into numbers of blocks of a stage, recomputed whole or in part.


# The plan dimension that counts the blocks recomputed as a whole.
WHOLE_BLOCKS = "checkpointed_layers"


def recomputed(run: Configuration, layers: int) -> dict[str, int]:
    """How many of a stage's ``layers`` blocks are recomputed, by the plan dimension that counts
    them (blocks recomputed whole, attention cores, ...).
    """
    way = run.recompute.way
    if way == "unknown":
        refuse(
            "recompute",
            f"{shown(run.recompute.text)} is unknown: give none, full, selective, core_attn, "
            "selective:moe or block N",
        )
    if way == "selective":
        # By default, torchtitan's selective recomputation recomputes single operators, and
        # Megatron's the attention core.
        way = "selective op" if ENGINES[run.engine].system == "fsdp" else "core"
    if way == "recipe":
        # With fused attention, the attention core saves nothing that could be recomputed.
        way = "core" if run.attention == "math" else "cheap"
    treated = {
        "full": (WHOLE_BLOCKS, layers),
        "half": (WHOLE_BLOCKS, layers // 2),
        "blocks": (WHOLE_BLOCKS, min(layers, run.recompute.blocks * run.chunks)),
        "experts": (WHOLE_BLOCKS, _blocks_of_experts(run, layers)),
        "selective op": ("products_recomputed_layers", layers),
        "core": ("core_recomputed_layers", layers),
    }
    return dict([treated[way]]) if way in treated else {}


def _blocks_of_experts(run: Configuration, layers: int) -> int:
    """The mean number of blocks with experts on a stage; in hybrid models a block is a single mixer
    or MLP.
    """
    pattern = run.shape.model.pattern
    if not pattern:
        return layers
    return round(layers * sum(letter in "EGA" for letter in pattern) / len(pattern))


# Divides a model's blocks among pipeline stages in the way of each engine.


LAST_PARTS = ("head", "cast", "loss")
# The largest number of stages that is accepted: more than in any published pipeline.
MOST_STAGES = 1024


def blocks_of_stages(run: Configuration, notes: list[str]) -> list[int]:
    """The number of blocks of each stage; a stage without blocks is left out, and a note says
    so.
    """
    stages, layers = run.pipeline_parallel, run.shape.layers
    if stages == 1:
        return [layers]
    is_by_cost = ENGINES[run.engine].system == "nanotron"
    most = MOST_STAGES if is_by_cost else layers
    if stages > most:
        refuse("pp", f"{stages} stages for {layers} blocks: give at most {most}")
    if run.stages:
        blocks = [*run.stages]
    elif is_by_cost:
        blocks = _by_cost(run)
    elif run.ends is not None and stages > 2:
        inner, rest = divmod(layers - sum(run.ends), stages - 2)
        if rest:
            refuse(
                "pp",
                f"{layers} blocks, less those of the first and last stage ({run.ends[0]} and "
                f"{run.ends[1]}), cannot be divided equally among the {stages - 2} stages between "
                "them: give another pp, or other blocks of the first or last stage",
            )
        blocks = [run.ends[0], *([inner] * (stages - 2)), run.ends[1]]
    elif run.short_ends:
        inner = -(-(layers + 2) // stages)
        blocks = [inner - 1, *([inner] * (stages - 2)), inner - 1]
        if sum(blocks) != layers:
            refuse(
                "pp",
                f"{layers} blocks do not divide over {stages} stages of which the first and last "
                f"have one block fewer: give pp for which layers + 2 is a multiple of pp",
            )
    else:
        # The first stages get the blocks that are left over, since the last stage has the head.
        blocks = [*even_shares(layers, stages)]
    if empty := blocks.count(0):
        notes.append(f"{empty} of {stages} stages have no blocks")
    return blocks


def _by_cost(run: Configuration) -> list[int]:
    """The number of blocks of each stage as nanotron divides them: in order, so that the numbers of
    weights (with those of the head) are balanced.

    Each stage takes parts of the model until it exceeds its share of all weights
    (nanotron/models/base.py). The head may get a stage of its own, and the stages after it nothing.
    If a stage would be empty, the head is put on the last stage here: measured runs of 32 blocks on
    16 stages take the time of three blocks, not that of two blocks and the head.
    """
    shape, stages = run.shape, run.pipeline_parallel
    block = 4 * shape.hidden * shape.hidden + 3 * shape.ffn * shape.hidden
    whole = shape.layers * block + shape.vocab * shape.hidden
    counts, reached = [0], 0
    for _ in range(shape.layers):
        if reached * stages > whole * len(counts):
            counts.append(0)
        counts[-1] += 1
        reached += block
    return counts + [0] * (stages - len(counts))


def unrunnable(run: Configuration, blocks: Sequence[int]) -> str:
    """The reason why an engine cannot run a pipeline with these numbers of blocks; empty if it can.

    Nanotron's pipeline ends with the head, a cast and the loss, each on a separate stage if there
    are stages left. If even more stages are left, one is empty and nanotron does not start. Of the
    measured runs in which stages share an embedding table, without ZeRO and with several
    data-parallel ranks and micro-batches, five in six failed, whatever their memory.
    """
    if ENGINES[run.engine].system != "nanotron":
        return ""
    spare = list(blocks).count(0) - len(LAST_PARTS)
    if spare > 0:
        return f"{spare} of {len(blocks)} stages would have nothing: nanotron does not start"
    shares_table = run.shape.tied_embeddings and run.pipeline_parallel > 1
    if shares_table and run.zero == 0 and run.data_parallel > 1 and run.micro_batches > 1:
        return "stages share a table of tokens without ZeRO: most such runs of nanotron failed"
    return ""


# Tries alternatives for settings that a row leaves open; the fastest that fits counts.
#
# A benchmark that was published without its micro-batch size, or without its chunks per stage, was
# tuned for speed. Such a row stands for several configurations, and is predicted as the fastest of
# those that leave memory free.


# The numbers of sequences per micro-batch that are tried.
SEQUENCES = (1, 2, 4, 8, 16)


def ways_of(run: Configuration) -> tuple[Configuration, ...]:
    """The configurations that a run may have had, those with smaller micro-batches and fewer chunks
    first; if its row leaves nothing open, only the run's own.
    """
    if not run.unsaid:
        return (run,)
    return tuple(
        replace(way, unsaid=(), notes=_assumption_notes(way, run.unsaid))
        for batch in _of_micro_batches(run)
        for way in _of_chunks(batch)
    )


def _of_micro_batches(run: Configuration) -> Iterator[Configuration]:
    """The run with each possible micro-batch size: each that divides the sequences of a rank in a
    step.
    """
    if not run.leaves_open("micro_batch"):
        yield run
        return
    of_rank = run.micro_batch * run.micro_batches
    for sequences in SEQUENCES:
        if of_rank % sequences == 0:
            yield replace(run, micro_batch=sequences, micro_batches=of_rank // sequences)


def _of_chunks(run: Configuration) -> Iterator[Configuration]:
    """The run with each number of model chunks per stage that is possible."""
    most = run.shape.layers // run.pipeline_parallel if run.leaves_open("vpp") else 1
    for chunks in (1, *sorted(INTERLEAVED.values())):
        if chunks <= most:
            yield replace(run, chunks=chunks)


def _assumption_notes(way: Configuration, unsaid: tuple[str, ...]) -> tuple[str, ...]:
    """A run's notes with the values that are assumed for settings that its row leaves open."""
    taken = {"micro_batch": way.micro_batch, "vpp": way.chunks}
    others = (note for note in way.notes if note != ASSUMED_MICRO_BATCH)
    return (
        *others,
        *(f"{name} is empty: {taken[name]} is the fastest that fits" for name in unsaid),
    )


# Makes a job (workload, cluster and plan) from the configuration of a measured run.


# The engines whose GPUs exchange data within a node by copy engines.
BY_COPY_ENGINES = ("llmq",)
# The number of GPUs in a rack that a run may use.
RACK = 64
# If a node has less network bandwidth per GPU than this, it has fewer network adapters than GPUs.
ADAPTER_GBYTES_PER_S = 12.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The job of a run, the assumptions made and, if the run is impossible, the reason.

    A step runs the job ``times`` times. With ``saves_unsaid`` the row does not say what the run
    recomputes; with ``states_stay`` it says that no states are on the host. Bounds depend on the
    ``kind`` of run. Figures beyond the ``limits`` are impossible on the GPUs that the row names.
    """

    job: Job
    notes: tuple[str, ...]
    kind: RunKind
    times: int = 1
    unrunnable: str = ""
    saves_unsaid: bool = False
    states_stay: bool = False
    limits: Limits | None = None
    elsewhere: KeptElsewhere = ALL_KEPT


def job_of(
    run: Configuration, profile: Profile | None = None, hardware: Hardware | None = None
) -> RunJob:
    """The job (workload, cluster and plan) that describes a measured run, with its machine's fitted
    rates (``profile``); refuses a run that no plan can express.

    ``hardware`` replaces the hardware of the same name in the catalogue.
    """
    notes = list(run.notes)
    workload = _workload(run)
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
    on_host = run.elsewhere.of_stages if _leaves_inputs_alone(run) else {}
    stages = tuple(
        StagePlan.of_values(
            {"layers": layers, **mesh, **dict(run.choices), **on_host, **recomputed(run, layers)}
        )
        for layers in blocks
    )
    network = run.node_gbytes_per_s
    share = ENGINES[run.engine].shares(run.gpus.hardware)[1]
    copies = run.engine in BY_COPY_ENGINES
    kernels = run.attention_kernel, share, run.sequence_length, copies
    cluster = _cluster(
        run.gpus, run.num_gpus, run.gpus_per_node, network, profile, hardware, kernels
    )
    waits = run.otherwise and not host_is_ahead(run, blocks, cluster)
    plan = Plan(
        engine=run.otherwise if waits else run.engine,
        micro_batches=run.micro_batches,
        overlap_communication=_overlaps(run),
        order=order,
        stages=stages,
    )
    job = Job(workload=workload, cluster=cluster, plan=plan)
    return RunJob(
        job=job,
        notes=tuple(notes),
        kind=run.kind,
        times=run.fillings,
        unrunnable=unrunnable(run, blocks),
        saves_unsaid=run.saves_unsaid,
        states_stay=run.states_stay,
        limits=limits_of(run, job, run.fillings, _recomputed_share(run, blocks)),
        elsewhere=replace(
            run.elsewhere,
            leave_by_copies=_copies_inputs(run),
            freed_share=freed_share(
                workload, stages[0], run.recompute, in_sequence=run.sequence_parallel
            ),
        ),
    )


def _recomputed_share(run: Configuration, blocks: Sequence[int]) -> float:
    """The share of a stage's blocks that are recomputed as a whole."""
    return sum(recomputed(run, layers).get(WHOLE_BLOCKS, 0) for layers in blocks) / sum(blocks)


def _copies_inputs(run: Configuration) -> bool:
    """Whether the run offloads the inputs of blocks although plans of its engine cannot express
    that.
    """
    is_left = run.elsewhere.activations and run.recompute.way == "full"
    return is_left and not ENGINES[run.engine].offloads_activations


def _leaves_inputs_alone(run: Configuration) -> bool:
    """Whether blocks save nothing but their inputs for the backward pass, and the engine can
    offload these.
    """
    return run.recompute.way == "full" and ENGINES[run.engine].offloads_activations


def _overlaps(run: Configuration) -> bool:
    """Whether communication of gradients and weights overlaps with computation in a run.

    Communication of experts, which hold most of a rank's weights, does not overlap if it crosses
    nodes: gpt-oss 120B on eight nodes, each with all experts, takes 2.7 s a step besides its
    micro-batches.
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
    """The pipeline schedule of a run; one that is not supported is replaced by the most similar
    one, and a note says so.
    """
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


def _workload(run: Configuration) -> Workload:
    drops_tokens = run.drops_tokens and run.shape.model.experts is not None
    return _equal(
        Workload(
            model=_model(run.shape),
            sequence_length=run.sequence_length,
            global_batch=run.global_batch,
            attention=run.attention,
            precision=run.precision,
            optimizer=run.optimizer,
            # With a capacity factor of 1, an expert takes at most the mean number of tokens.
            expert_capacity=1.0 if drops_tokens else None,
            expert_padding=drops_tokens,
            train=run.train,
            adapter_rank=run.adapter_rank,
            adapter_targets=run.adapter_targets,
            base=run.base,
            loss=run.loss,
            states=run.states,
        )
    )


@cache
def _model(shape: Shape) -> ModelSpec:
    return shape.model


@cache
def _equal(workload: Workload) -> Workload:
    """Replaces equal workloads by the same object, so that jobs can be grouped by it."""
    return workload


@cache
def _cluster(
    gpus: Gpus,
    num_gpus: int,
    gpus_per_node: int,
    node_gbytes_per_s: float | None,
    profile: Profile | None,
    of_caller: Hardware | None,
    kernels: tuple[AttentionKernel, float, int, bool],
) -> Cluster:
    """The cluster with the fewest whole nodes that have these GPUs; ``kernels`` are the attention
    kernel, the engine's fraction of its rate, the tokens of a sequence, and whether GPUs use copy
    engines.
    """
    if of_caller is not None and of_caller.name == gpus.hardware:
        hardware = of_caller
    else:
        hardware = _with_gemm_rate(catalog.hardware(gpus.hardware), gpus.products_share)
    attention_kernel, engine_share, tokens, by_copy_engines = kernels
    hardware = with_kernel(hardware, attention_kernel, engine_share, tokens)
    if by_copy_engines:
        hardware = with_copy_engines(hardware)
    in_node = RACK if hardware.node.is_rack else gpus_per_node or hardware.node.gpus
    used = min(num_gpus, in_node, hardware.node.gpus)
    return Cluster(
        hardware=hardware,
        nodes=-(-num_gpus // used),
        gpus_per_node=used,
        memory_gib=gpus.memory_gib,
        inter_node_gbytes_per_s=node_gbytes_per_s or _of_smaller_nodes(hardware, gpus_per_node),
        profile=profile,
    )


def _of_smaller_nodes(hardware: Hardware, gpus_per_node: int) -> float | None:
    """The network bandwidth in GB/s of nodes with fewer GPUs than usual for the hardware, and so
    with fewer network adapters. None for usual nodes, inside a rack, or if GPUs share adapters.

    A network slower than one adapter is that of a cloud machine, which is not such a node.
    """
    node = hardware.node
    of_gpu = node.inter_node_gbytes_per_s / node.gpus
    if node.is_rack or not 0 < gpus_per_node < node.gpus:
        return None
    if node.inter_node_gbytes_per_s < ADAPTER_GBYTES_PER_S:
        return ADAPTER_GBYTES_PER_S
    if of_gpu < ADAPTER_GBYTES_PER_S:
        return None
    return node.inter_node_gbytes_per_s * gpus_per_node / node.gpus


def _with_gemm_rate(hardware: Hardware, share: float) -> Hardware:
    """The hardware with 16-bit GEMMs that sustain a given share of their rate."""
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
