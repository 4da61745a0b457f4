"""Finds the kernels and rates with which an engine runs an operator, counts the floating-point
operations of a training step, and derives how much streams slow one another down, and with that a
pipeline's round trips.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from mistlab.core.arrays import Column, Floats, Ints
from mistlab.core.values import reject
from mistlab.engines.adapters import BASE_BYTES, Train
from mistlab.engines.engine import (
    BATCHED_PRODUCTS,
    ENGINES,
    PLAIN,
    Engine,
    HostTime,
    KernelRule,
    Precision,
)
from mistlab.graph.compiled import Compiled, compile_sums, kept
from mistlab.graph.graph import JOINS, LayerGraph, Operator
from mistlab.graph.layer_types import graphs_of
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import DTYPE, DTYPE_OF_4, StoredGraph
from mistlab.graph.sums import Sum, names_in, where
from mistlab.graph.symbols import constants_of, sizes_of_candidates
from mistlab.job.job import Job
from mistlab.machine.hardware import Compute, Hardware, OperatorClass, PeakTflops, Rate
from mistlab.machine.slowdowns import SHARED_SETS, GroupSlowdowns, Interference, Slowdown
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.context_ways import LAUNCHES
from mistlab.stages.plan_orders import ends_of_plan

# Finds an operator's class, by which hardware files give rates, and the rule by which an engine
# runs it.


def class_of(operator: Operator) -> OperatorClass:
    """The class of an operator, by which hardware files give rates."""
    if operator.kind == "matmul":
        return _class_of_product(operator)
    if operator.kind == "scan":
        return "scan"
    if operator.kind == "attention":
        return "attention_forward" if operator.phase == "forward" else "attention_backward"
    return "memory"


def _class_of_product(operator: Operator) -> OperatorClass:
    if operator.name in BATCHED_PRODUCTS:
        return "batched_matmul"
    if operator.dtype == DTYPE_OF_4:
        return "matmul_4bit"
    is_grouped = operator.name.startswith("mistlab.grouped_product")
    if operator.dtype == DTYPE:
        return "grouped_matmul_8bit" if is_grouped else "matmul_8bit"
    return "grouped_matmul" if is_grouped else "matmul"


def rule_of(
    operator: Operator, layer: LayerGraph, rules: Sequence[KernelRule], attention: str
) -> KernelRule:
    """The first of an engine's kernel rules that applies to an operator of a layer.

    ``attention`` is the attention of the layer's graph.
    """
    about = (rule for rule in rules if _is_about(rule, operator, layer, attention))
    return next(about, PLAIN)


def _is_about(rule: KernelRule, operator: Operator, layer: LayerGraph, attention: str) -> bool:
    wanted = (rule.kind, rule.name, rule.module, rule.phase, rule.attention)
    given = (operator.kind, operator.name, operator.module, operator.phase, attention)
    return (
        all(one in ("", other) for one, other in zip(wanted, given, strict=True))
        and rule.adds in ("", _adds(operator, layer))
        and rule.broadcasts in (None, _broadcasts(operator))
        and (not rule.makes or makes_weight_gradient(operator))
        and (not rule.behind or rule.behind == _behind(operator, layer))
    )


def _behind(operator: Operator, layer: LayerGraph) -> str:
    """The name of the operator that runs just before this one, if this one's first input may be its
    output, judging by shape and by whether it broadcasts; otherwise "".
    """
    of_pass = layer.of_phase(operator.phase)
    index = next((n for n, one in enumerate(of_pass) if one is operator), 0)
    if not index:
        return ""
    before = of_pass[index - 1]
    is_whole = not before.name.startswith("aten.add") or not _broadcasts(before)
    return before.name if is_whole and before.outputs[0] == operator.inputs[0] else ""


def makes_weight_gradient(operator: Operator) -> bool:
    """Whether an operator is a GEMM that computes a weight gradient: it is in a backward pass, and
    its result has no token dimension.
    """
    if operator.kind != "matmul" or operator.phase != "backward":
        return False
    return not any({"b", "s"} & names_in(size) for size in operator.outputs[0])


def _broadcasts(operator: Operator) -> bool:
    return len({len(shape) for shape in operator.inputs}) > 1


def _adds(operator: Operator, layer: LayerGraph) -> str:
    """The kind of parameter whose gradient an operator accumulates (weight, vector or table), or ""
    if it accumulates none.
    """
    if operator.kind != "accumulate":
        return ""
    if len(operator.outputs[0]) == 1:
        return "vector"
    products = (one for one in layer.of_phase("backward") if one.kind == "matmul")
    of_weight = (operator.module, operator.outputs)
    return "weight" if of_weight in ((one.module, one.outputs) for one in products) else "table"


def kernels_of_join(operator: Operator) -> Sum:
    """The number of kernels and messages that exchanging keys between context-parallel ranks adds
    to a pass, as an expression of the number of ranks.
    """
    of_way = LAUNCHES[JOINS[operator.name]]
    launches = of_way.forward if operator.phase == "forward" else of_way.backward
    kernels: Sum = launches.beside(Sum.named("cp") + Sum.of(-1))
    return where("numpy.greater(cp, 1)") * kernels


# Finds the rates that an engine's kernels reach on a hardware, and how much slower than 16 bits
# other precisions are.


def compute_of(hardware: Hardware, compute: Compute, engine: Engine) -> Compute:
    """The rates that an engine's kernels reach on a hardware.

    If the engine's host is modelled separately, launching a kernel takes no time in these rates.
    """
    products, attention, memory = engine.shares(hardware.name)
    eight_bit = engine.eight_bit_on.get(hardware.name, 1.0)
    if engine.host is None and products == attention == memory == eight_bit == 1:
        return compute
    shares = {
        "matmul": products,
        "matmul_8bit": eight_bit,
        "batched_matmul": products,
        "attention_forward": attention,
        "attention_backward": attention,
    }
    rates = tuple(
        replace(
            rate,
            tflops=rate.tflops and rate.tflops * shares.get(rate.operators, 1.0),
            gbytes_per_s=rate.gbytes_per_s and rate.gbytes_per_s * memory,
        )
        for rate in compute.rates
    )
    launch_us = compute.launch_us if engine.host is None else 0.0
    return replace(compute, rates=rates, launch_us=launch_us)


def captured(job: Job) -> Job:
    """The job with its iterations replayed as a CUDA graph, so that the host launches no kernels.

    The gaps between the kernels of a graph are part of the GPU's measured rates.
    """
    if not ENGINES[job.plan.engine].runs_here:
        reject(
            f"plan.engine: {job.plan.engine}, but --cuda-graphs works only in this package's "
            "runtime: give mistlab, or leave --cuda-graphs out"
        )

    def launched(hardware: Hardware) -> Hardware:
        compute = hardware.compute
        return (
            hardware
            if compute is None
            else replace(hardware, compute=replace(compute, launch_us=0.0))
        )

    cluster = job.cluster
    others = tuple(replace(one, hardware=launched(one.hardware)) for one in cluster.others)
    return replace(
        job, cluster=replace(cluster, hardware=launched(cluster.hardware), others=others)
    )


def with_dequantised(compute: Compute, hardware: Hardware, workload: Workload) -> Compute:
    """The hardware's rates with slower GEMMs for frozen weights that are stored in few bits, such
    as 4.

    Before each GEMM, its weights are read and written in 16 bits at the memory bandwidth. The
    factor is that of a micro-batch of one sequence.
    """
    if workload.train == "all" or workload.base == "16bit":
        return compute
    moved = BASE_BYTES[workload.base] + BASE_BYTES["16bit"]
    seconds = moved / hardware.gpu.memory_bytes_per_s

    def slower(rate: Rate) -> Rate:
        if rate.operators not in WEIGHTED or rate.tflops is None:
            return rate
        product_s = 2 * workload.sequence_length / (rate.tflops * 1e12)
        return replace(rate, tflops=rate.tflops * product_s / (product_s + seconds))

    return replace(compute, rates=tuple(map(slower, compute.rates)))


# GEMMs with weights are of these operator classes.
WEIGHTED = ("matmul", "grouped_matmul")


def host_of(engine: Engine, block_operators: float, compute: Compute) -> HostTime | None:
    """The seconds in which an engine's host issues a block's forward pass and its backward pass,
    from the numbers of operators; None if the engine's host is not modelled.
    """
    if engine.host is None:
        return None
    return replace(engine.host.of_blocks(block_operators), launch_s=compute.launch_s)


def slowdown_of(peaks: PeakTflops, precision: Precision) -> float:
    """The factor by which arithmetic in a precision is slower than in 16 bits.

    In 8-bit and 4-bit training, only GEMMs are in that precision; all else is in 16 bits.
    """
    peak: float | None = peaks.bf16 if precision in ("fp8", "fp4") else getattr(peaks, precision)
    return 1.0 if peak is None else peaks.fp16 / peak


def slowdown_of_8_bits(peaks: PeakTflops) -> float:
    """The factor by which 8-bit GEMMs are slower than 16-bit GEMMs; below 1 where they are
    faster.
    """
    return 1.0 if peaks.fp8 is None else peaks.fp16 / peaks.fp8


# Counts the floating-point operations of a training step, which do not depend on the plan.


PRODUCTS = frozenset(("matmul", "attention"))
GEMMS = frozenset(("matmul",))


@cache
def model_flop(workload: Workload) -> float:
    """The floating-point operations of a step's GEMMs, forward and backward, without
    recomputation.
    """
    return _step_flop(workload, range(workload.model.layers), 1, 1)


@cache
def gemm_flop(workload: Workload, *, ends: bool = True) -> float:
    """The floating-point operations of a step's GEMMs as ``model_flop`` counts them, but without
    fused attention, whose kernels skip what the causal mask hides; in blocks alone without
    ``ends``.
    """
    blocks = range(workload.model.layers)
    return _step_flop(workload, blocks, int(ends), int(ends), kinds=GEMMS)


def stage_flop(workload: Workload, plan: Plan, stage: int) -> float:
    """The floating-point operations of a step's GEMMs in one pipeline stage, forward and backward,
    without recomputation.
    """
    first = sum(one.layers for one in plan.stages[:stage])
    blocks = range(first, first + plan.stages[stage].layers)
    embedding, head = ends_of_plan(plan)
    return _step_flop(workload, blocks, int(stage == embedding), int(stage == head))


def mfu_of(job: Job, stage: int | None, seconds: float) -> float:
    """The model FLOP utilization (MFU) of a step or of one stage of it, relative to the peak rate
    of the hardware that the job names.
    """
    peak = job.cluster.peak_flop_per_s(job.workload.precision)
    if stage is not None:
        return stage_flop(job.workload, job.plan, stage) / (seconds * peak)
    return model_flop(job.workload) / (seconds * job.plan.num_gpus * peak)


def megatron_flop(
    *, batch: int, sequence_length: int, layers: int, hidden: int, vocab: int
) -> float:
    """The floating-point operations of a step as Megatron-LM counts them, with full recomputation
    (Narayanan et al., SC 2021).
    """
    b, s, l, h = batch, sequence_length, layers, hidden  # noqa: E741 (as in the paper)
    return 96 * b * s * l * h**2 * (1 + s / (6 * h) + vocab / (16 * l * h))


def rough_state_bytes(model: ModelSpec) -> int:
    """A rough estimate of the bytes of a model's weights, gradients and optimizer states.

    16 bytes for each of the 12 h^2 parameters of a block, where h is the hidden size.
    """
    return 16 * 12 * model.layers * model.hidden**2


def _step_flop(
    workload: Workload,
    blocks: range,
    embeddings: int,
    heads: int,
    kinds: frozenset[str] = PRODUCTS,
) -> float:
    """The floating-point operations of a training step in the given blocks, embeddings and
    heads.
    """
    embedding, *of_kinds, head = _sequence_flop(workload, kinds)
    pattern = graph_of(workload).pattern
    places = [[*dict.fromkeys(pattern)].index(kind) for kind in pattern]
    flop = embeddings * embedding
    for kind, flop_of_kind in enumerate(of_kinds):
        count = sum(places[block % len(pattern)] == kind for block in blocks)
        flop += count * flop_of_kind
    return (flop + heads * head) * workload.global_batch


@cache
def _sequence_flop(workload: Workload, kinds: frozenset[str]) -> tuple[float, ...]:
    """The floating-point operations for one sequence in the embedding, in a block of each kind, and
    in the head, if all experts get equally many tokens.
    """
    workload = replace(workload, expert_imbalance=1.0, expert_capacity=None, expert_padding=False)
    ones = dict.fromkeys(sizes_of_candidates(), 1)
    sizes = {**constants_of(workload), **ones, "V": workload.model.padded_vocab(1)}
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    compiled = _flop(graph_of(workload), tuple(columns), workload.train, kinds)
    return tuple(float(flop) for (flop,) in compiled(columns))


@kept
def _flop(
    graph: StoredGraph, columns: tuple[str, ...], train: Train, kinds: frozenset[str]
) -> Compiled:
    """The floating-point operations of the GEMMs in the embedding, in a block of each kind, and in
    the head.

    If only adapters are trained, GEMMs that compute weight gradients are not counted.
    """
    is_all = train == "all"
    flop = {
        name: Sum.total(
            o.flop
            for o in layer.operators
            if o.kind in kinds and (is_all or not makes_weight_gradient(o))
        )
        for name, layer in graphs_of(graph.counts, ()).items()
    }
    return compile_sums(flop, columns=columns)


def of_ranks(host: HostTime, ranks: Column, way: Column) -> tuple[Floats, Floats]:
    """The seconds in which a host issues a block's forward and backward pass on one of several
    context-parallel ranks, for each candidate; ``way`` says how the ranks exchange keys and values.
    """
    forward, backward = np.full(len(ranks), host.forward_s), np.full(len(ranks), host.backward_s)
    for number, launches in LAUNCHES.items():
        rows = (ranks > 1) & (way == number)
        further = ranks[rows] - 1
        forward[rows] += host.launch_s * launches.forward.beside(further)
        backward[rows] += host.launch_s * launches.backward.beside(further)
    return forward, backward


# Derives how much streams slow one another down while a group of ranks of any size communicates,
# from the sizes that were measured.


# Of the measured sizes of groups, nearer ones count more: a size that is this many doublings away
# has its weight divided by e.
NEAR_DOUBLINGS = 0.5
# The ridge penalty of the regression of slowdown factors on the size of the group; it limits
# extrapolation far from all measured sizes.
DAMPING = 0.02


def slowdowns_of_group(machine: Interference, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of ranks of this shape (GPUs in a node, nodes)
    communicates: measured, or derived from other shapes.
    """
    for group in machine.groups:
        if (group.gpus_in_node, group.nodes) == (gpus_in_node, nodes):
            return group
    return _derived(
        machine.groups,
        gpus_in_node=gpus_in_node,
        nodes=nodes,
        shared_links=machine.shared_links,
    )


def _derived(
    groups: Sequence[GroupSlowdowns], *, gpus_in_node: int, nodes: int, shared_links: bool
) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of this shape communicates, derived from those
    of the measured shapes.
    """
    alike = [group for group in groups if (group.nodes > 1) == (nodes > 1)] or groups
    influence = _influence([(g.gpus_in_node, g.nodes) for g in alike], (gpus_in_node, nodes))
    slowdowns = []
    for streams in SHARED_SETS:
        factors = np.array([group.factors(streams) for group in alike])
        work = [_work(streams, g.gpus_in_node * g.nodes, shared_links) for g in alike]
        capacities = np.sum(work / factors, axis=1)
        expected = np.exp(influence @ np.log(factors))
        capacity = np.exp(influence @ np.log(capacities))
        of_shape = _work(streams, gpus_in_node * nodes, shared_links)
        scaled = expected * np.where(of_shape > 0, np.sum(of_shape / expected) / capacity, 1)
        slowdowns.append(
            Slowdown(streams=streams, factors=tuple(float(f) for f in np.maximum(scaled, 1)))
        )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def _work(streams: tuple[str, ...], gpus: int, shared_links: bool) -> Floats:
    """How much each stream of a set loads the links if it runs alone; a host copy counts as 1.

    Communication uses both directions, and sends all but the GPU's own part of a message.
    """
    copies = sum(stream in ("host_to_device", "device_to_host") for stream in streams)
    traffic = (1 - 1 / gpus) if shared_links and copies else 1
    work = {"compute": 0, "gpu_to_gpu": traffic * max(copies, 1)}
    return np.array([work.get(stream, 1) for stream in streams], dtype=np.float64)


def _influence(measured: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Floats:
    """The weights by which values of measured shapes are averaged to get one of another shape."""
    sizes, size = _sizes(measured), _sizes([shape])[0]
    doublings = np.abs(np.log2(np.array(measured) / shape)).sum(axis=1)
    near = np.exp(-doublings / NEAR_DOUBLINGS)
    mean = near / near.sum()
    centred = sizes - mean @ sizes
    weighted = near * centred.T
    slopes = np.linalg.solve(weighted @ centred + DAMPING * np.eye(len(size)), weighted)
    # The slopes have no effect on a value that is equal for all measured shapes.
    return np.asarray(mean + (size - mean @ sizes) @ slopes)


def _sizes(shapes: Iterable[tuple[int, int]]) -> Floats:
    return np.array([(gpus / 2, np.log2(nodes)) for gpus, nodes in shapes])


# Computes by how much a micro-batch's round trip through the pipeline (to the last stage and back)
# gets longer because sends and passes slow one another down.


def within_round_s(send_s: Floats, slowed: Floats, stages: Ints) -> Floats:
    """The seconds that one stage adds to a micro-batch's round trip (to the last stage and back)
    because sends and passes slow each other down, for each candidate.

    In a pipeline bound by its sends, a stage idles between passes. After a gradient has been sent
    back, the first stage of a round starts its next forward pass at once, and the last stage its
    backward pass. In between, the gaps differ: with equal stages, each stage's gap before its
    forward pass is longer than the gap of the stage in front. A pass whose gap is shorter than the
    send before it overlaps with the rest of the send, and both slow down.

    For K equal stages, in units of one send, with u(i) the gap of stage i before its forward pass,
    and ``slowed`` the share of their overlap that a pass and a send lose:

        u(0) = 0, u(K) = 2, u(i+1) = u(i) + short + slowed (max(1 - u(i), 0) + max(u(i+1) - 1, 0))

    where a micro-batch takes ``short`` less than both passes and both sends of a stage in sequence.
    The first stage sends nothing back, and so loses nothing. A round is therefore 2 - K short
    longer than without interference.

    A round trip that begins at the stage in front contains one stage more than one that begins at
    this stage, so this stage adds the difference of the two.
    """
    return send_s * (_lost(slowed, stages + 1) - _lost(slowed, stages))


def _lost(slowed: Floats, stages: Ints) -> Floats:
    """How much longer a micro-batch's round trip through this many equal stages takes because sends
    and passes slow each other down, in multiples of one send's seconds.
    """
    kept = 1 - slowed
    # Half of the stages lose time before their forward passes, the other half before their backward
    # passes; the middle one of an odd number of stages loses time before both.
    rest = kept ** np.maximum(stages // 2 - 1, 0)
    both = np.where(stages % 2 == 1, 2 * kept, 1.0)
    below = both + np.where(stages % 2 == 1, slowed, 0.0) - both * kept * rest
    loses = (stages > 2) & (slowed > 0)
    short = slowed * rest * both / np.where(loses, below, 1.0)
    return np.where(loses, np.maximum(2 - stages * short, 0.0), 0.0)
