"""The time of a serving engine's step on one rank, for columns of layouts (parallel degrees).

A step runs decoded tokens and prompt tokens through all blocks. Its parts are summed from the work
of a rank (``rank_work``) and the rates of kernels (``gpu_facts``), and multiplied by factors that
are fitted for the engine (``engine_constants``).

Axes: C rows, each a layout under a load.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import NormalDist
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.core.units import GBYTES
from mistlab.graph.compiled import Compiled, compile_sums
from mistlab.graph.graph import LayerGraph, Operator, Parameter
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.sums import Sum
from mistlab.graph.symbols import constants_of, size_names
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.serving.gpu_facts import (
    CACHE_BYTES,
    EVENNESS,
    FORMATS,
    ROW_BYTES,
    KernelRate,
    ServingGpu,
    gpu_named,
    kernel_rate,
    reached_share,
)

# The sequence length of layer graphs; weights do not depend on it, and no window is longer.
GRAPH_TOKENS = 32768
# Kinds of operators that run as separate small kernels between GEMMs when a model is served.
SMALL = frozenset(("normalization", "softmax", "elementwise", "reduction", "gather", "copy"))


# The assumed share of peak arithmetic that attention to shared latent vectors achieves.
LATENT_SHARE = 0.4
# Engines whose attention-data-parallel ranks choose prompts independently: since all ranks exchange
# tokens in each block of experts, one rank's prompt delays all. SGLang and TensorRT-LLM let their
# ranks prefill together.
LOCKSTEP = frozenset(("vllm",))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The parameters, operations and kernels of one rank when it serves a model.

    ``dense_parameters`` are the weights of ``dense_products`` GEMMs, which may have few bits;
    ``wide_parameters`` (routers and the head) those of GEMMs that stay in 16 bits. ``dense_depth``
    and ``wide_depth`` are the sums, over these GEMMs, of the number of values that a GEMM sums for
    each output. In each of ``expert_layers`` blocks the rank holds ``experts_on_rank`` of
    ``experts``, each with ``expert_parameters``; a token uses ``active`` of them. There are
    ``full_layers`` of full attention and ``window_layers`` that attend to ``window`` tokens; a
    token keeps ``cache_elements`` in each. For each attended token, attention costs ``decode_flop``
    when one token is decoded, and ``prefill_flop`` in a whole prompt. ``scan_layers`` keep
    ``state_elements`` per sequence instead.
    """

    hidden: int
    layers: int
    dense_parameters: float
    dense_products: float
    dense_depth: float
    wide_parameters: float
    wide_products: float
    wide_depth: float
    table_parameters: float
    expert_layers: float
    expert_parameters: float
    experts_on_rank: float
    experts: float
    active: float
    full_layers: float
    window_layers: float
    window: float
    cache_elements: float
    decode_flop: float
    prefill_flop: float
    scan_layers: float
    state_elements: float
    kernels: float
    all_reduces: float

    @property
    def resident_parameters(self) -> float:
        """The number of experts' parameters that the rank holds, in all blocks."""
        return self.expert_layers * self.experts_on_rank * self.expert_parameters


@cache
def rank_work(model: ModelSpec, *, tp: int, ep: int = 1, expert_tp: int = 1) -> RankWork:
    """The work of a rank whose attention and dense networks are split ``tp`` ways, and whose
    experts are divided over ``ep`` ranks, with each expert split ``expert_tp`` ways.
    """
    graph = serving_graph(model)
    turns = Counter(graph.pattern[block % len(graph.pattern)] for block in range(model.layers))
    sizes = graph_sizes(model, tp=tp, ep=ep, expert_tp=expert_tp)
    totals: defaultdict[str, float] = defaultdict(float)
    for kind, blocks in turns.items():
        of_kind = _values(graph, kind, sizes)
        for name, value in of_kind.items():
            totals[name] += value if name in _LARGEST else blocks * value
        attends = of_kind["attends"]
        has_window = of_kind["windowed"]
        totals["full_layers"] += blocks * attends * (1 - has_window)
        totals["window_layers"] += blocks * attends * has_window
    head = _values(graph, "head", sizes)
    attention = _attention(model, tp)
    lost = attention["repeated"] * (totals["full_layers"] + totals["window_layers"])
    experts = model.experts
    return RankWork(
        hidden=model.hidden,
        layers=model.layers,
        dense_parameters=totals["dense"] + lost,
        dense_products=totals["products"],
        dense_depth=totals["dense_depth"],
        wide_parameters=totals["router"] + head["dense"],
        wide_products=totals["routers"] + 1,
        wide_depth=totals["router_depth"] + head["dense_depth"],
        table_parameters=0.0 if model.tied_embeddings else sizes["V"] * model.hidden / tp,
        expert_layers=totals["expert_layers"],
        expert_parameters=0.0 if experts is None else _of_expert(model) / expert_tp,
        experts_on_rank=0.0 if experts is None else experts.count / ep,
        experts=0.0 if experts is None else float(experts.count),
        active=0.0 if experts is None else float(experts.active),
        full_layers=totals["full_layers"],
        window_layers=totals["window_layers"],
        window=float(model.window.size) if model.window else 0.0,
        cache_elements=attention["cache"],
        decode_flop=attention["decode"],
        prefill_flop=attention["prefill"],
        scan_layers=totals["scans"],
        state_elements=_state_elements(model) / tp,
        kernels=totals["kernels"],
        all_reduces=0.0 if tp * expert_tp * ep == 1 else totals["all_reduces"],
    )


def parameters_of(model: ModelSpec) -> float:
    """The total number of a model's parameters, from the work of a single rank."""
    work = rank_work(model, tp=1)
    held = work.dense_parameters + work.wide_parameters + work.table_parameters
    return held + work.resident_parameters


# Flags of a kind of block (has attention, has a window): no sums over blocks.
_LARGEST = frozenset(("attends", "windowed"))


@cache
def serving_graph(model: ModelSpec) -> StoredGraph:
    """The layer graphs (operators and parameters) of a model as it is served."""
    workload = Workload(
        model=model,
        sequence_length=model.learned_positions or GRAPH_TOKENS,
        global_batch=1,
        attention="flash",
        precision="bf16",
    )
    return graph_of(workload)


def graph_sizes(model: ModelSpec, *, tp: int, ep: int = 1, expert_tp: int = 1) -> dict[str, float]:
    """The values of layer graphs' size symbols for a model on ranks that share its tensors."""
    workload = Workload(
        model=model, sequence_length=1, global_batch=1, attention="flash", precision="bf16"
    )
    sizes = dict.fromkeys(size_names(), 1.0) | dict(constants_of(workload))
    return sizes | {"tp": tp, "ep": ep, "et": expert_tp, "V": model.padded_vocab(tp), "b": 1.0}


def _values(graph: StoredGraph, kind: str, sizes: Mapping[str, float]) -> dict[str, float]:
    compiled, counts = _compiled(graph, kind)
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    values = (float(value[0]) for value in compiled(columns))
    return {**dict(zip(compiled.names, values, strict=True)), **counts}


@cache
def _compiled(graph: StoredGraph, kind: str) -> tuple[Compiled, Mapping[str, float]]:
    """Compiled parameter counts of a kind of block, and its numbers of operators by kind."""
    counts = graph.counts
    layer = counts.head if kind == "head" else counts.kinds[kind]
    forward = layer.of_phase("forward")
    products = [one for one in forward if one.kind == "matmul" and not _is_batched(one)]
    routers = [one for one in products if "router" in one.module]
    experts = [one for one in products if one.name == "mistlab.grouped_product"]
    scans = [one for one in forward if one.kind == "scan"]
    attends = any(one.kind == "attention" for one in forward)
    small = [one for one in forward if one.kind in SMALL and "experts" not in one.module]
    operators = {
        "products": len(products) - len(routers) - len(experts),
        "routers": len(routers),
        "expert_layers": min(1, len(experts)),
        "scans": len(scans),
        "attends": float(attends),
        "windowed": float(attends and any("w" in one.flop.names for one in forward)),
        "kernels": len(small),
        # Where ranks do not exchange tokens, one all-reduce combines the outputs of their experts.
        "all_reduces": sum(one.name == "mistlab.all_reduce_" for one in forward)
        + (min(1, len(experts)) if not _shares(layer) else 0),
    }
    weights = {
        name: list(_weights_of(layer, is_router=name == "router")) for name in ("dense", "router")
    }
    counts_of = {name: Sum.total(one.count for one in of) for name, of in weights.items()}
    depths = {
        f"{name}_depth": Sum.total(one.shape[-1] for one in of) for name, of in weights.items()
    }
    sums = counts_of | depths
    return compile_sums(sums, columns=size_names()), operators


def _is_batched(operator: Operator) -> bool:
    return operator.name in ("aten.bmm", "aten.baddbmm")


def _shares(layer: LayerGraph) -> bool:
    """Whether a block has a shared expert, whose all-reduce includes other experts' outputs."""
    return any(one.module.startswith("shared") for one in layer.operators)


def _weights_of(layer: LayerGraph, *, is_router: bool) -> Iterator[Parameter]:
    for parameter in layer.parameters:
        is_expert = parameter.name.startswith("experts.") and "router" not in parameter.name
        is_product = len(parameter.shape) > 1 and not is_expert
        if is_product and ("router" in parameter.name) == is_router:
            yield parameter


def _of_expert(model: ModelSpec) -> float:
    assert model.experts is not None
    matrices = 3 if model.mlp_type == "gated_mlp" else 2
    width = model.experts.hidden or model.hidden
    return float(matrices * width * model.experts.ffn)


def _attention(model: ModelSpec, tp: int) -> dict[str, float]:
    """Attention of one block on a rank: cached values per token, operations per attended token, and
    the parameters of keys and values that ranks hold in addition, because they replicate heads.
    """
    heads = max(1.0, model.heads / tp)
    if model.latent is not None:
        # Decoding attends directly to the latent vectors, which every rank holds whole.
        rank, rotated = model.latent.key_rank, model.rotated_channels
        return {
            "cache": float(rank + rotated),
            "decode": 2 * heads * (2 * rank + rotated),
            "prefill": 2 * heads * (model.head_dim + model.latent.value_dim),
            "repeated": 0.0,
        }
    keys = max(1.0, model.kv_heads / tp)
    each = 4 * heads * model.head_dim
    repeated = 2 * model.head_dim * model.hidden * (keys - model.kv_heads / tp)
    cache_elements = 2 * keys * model.head_dim
    return {"cache": cache_elements, "decode": each, "prefill": each, "repeated": repeated}


def _state_elements(model: ModelSpec) -> float:
    scan = model.state_space
    return 0.0 if scan is None else float(scan.heads * scan.channels * scan.states)


# Operations per element of a state-space scan's state, for each token: decay, outer product, query.
SCAN_FLOP = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A serving replica as each of its ranks sees it: model, GPU, engine, parallel degrees and
    precisions.
    """

    model: ModelSpec
    gpu: str
    engine: str
    weights: str
    cache: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        """The number of GPUs of the replica."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """The number of ranks among which each expert is split."""
        return max(1, self.tp * self.dp // self.ep)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumns:
    """Figures by which serving steps are timed: arrays with an entry per candidate replica."""

    tp: Floats
    pp: Floats
    dp: Floats
    batches: Floats
    ep: Floats
    layers: Floats
    dense_s: Floats
    dense_s_per_token: Floats
    dense_depth_s: Floats
    wide_s: Floats
    wide_s_per_token: Floats
    wide_depth_s: Floats
    product_floors_s: Floats
    expert_s: Floats
    expert_s_per_row: Floats
    expert_s_per_row_moved: Floats
    expert_floors_s: Floats
    experts: Floats
    experts_on_rank: Floats
    active: Floats
    expert_share: Floats
    fullest: Floats
    attention_floors_s: Floats
    prompt_floors_s: Floats
    full_layers: Floats
    window_layers: Floats
    window: Floats
    look_s: Floats
    look_flop_s: Floats
    prompt_flop_s: Floats
    state_s: Floats
    scan_s_per_token: Floats
    kernels: Floats
    reduces: Floats
    reduce_floor_s: Floats
    reduce_s_per_token: Floats
    exchange_s_per_token: Floats
    send_s_per_token: Floats
    weight_bytes: Floats
    cache_bytes: Floats
    state_bytes: Floats
    memory_bytes: Floats

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> Self:
        """The figures of several replicas as columns, with one row for each."""
        known: dict[RankLayout, Mapping[str, float]] = {}
        rows = []
        for layout in layouts:
            if layout not in known:
                known[layout] = _numbers(layout)
            rows.append(known[layout])
        names = [one.name for one in fields(cls)]
        return cls(**{name: np.array([row[name] for row in rows]) for name in names})

    def rows(self, index: Rows) -> Self:
        """The figures of the candidate replicas with these indices."""
        names = [one.name for one in fields(self)]
        return type(self)(**{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingStep:
    """The seconds of each part of a serving step (GEMMs, ...) for each candidate replica."""

    products: Floats
    experts: Floats
    attention: Floats
    links: Floats
    floors: Floats
    kernels: Floats

    def summed(self, factors: Mapping[str, Floats]) -> Floats:
        """The seconds of a serving step: the sum of its parts, each times its fitted factor."""
        names = [one.name for one in fields(self)]
        total = sum(getattr(self, name) * factors.get(name, 1.0) for name in names)
        return np.asarray(total)


def decode_parts(of: LayoutColumns, sequences: Floats, context: Floats) -> ServingStep:
    """The seconds of each part of a decode step, for each candidate replica."""
    on_rank = np.maximum(sequences / of.dp, np.minimum(sequences, 1.0)) / of.pp
    together = np.maximum(sequences / of.pp, np.minimum(sequences, 1.0))
    seen = of.full_layers * context + of.window_layers * np.minimum(context, of.window)
    looks = on_rank * seen
    attention = _roofs(looks * of.look_s, looks * of.look_flop_s) + on_rank * of.state_s
    return ServingStep(
        products=_products(of, on_rank),
        experts=_experts(of, together),
        attention=attention,
        links=_links(of, on_rank, together),
        floors=of.product_floors_s + of.expert_floors_s + of.attention_floors_s,
        kernels=of.kernels,
    )


def prefill_parts(of: LayoutColumns, tokens: Floats, looked: Floats) -> ServingStep:
    """The seconds of each part of a prefill pass, for each candidate replica; a token attends to
    ``looked`` tokens on average.
    """
    full = tokens * looked
    window = tokens * np.minimum(looked, of.window)
    pairs = of.full_layers * full + of.window_layers * window
    attention = pairs * of.prompt_flop_s + tokens * of.scan_s_per_token
    return ServingStep(
        products=_products(of, tokens),
        experts=_experts(of, tokens),
        attention=attention,
        links=_links(of, tokens, tokens),
        floors=of.product_floors_s + of.expert_floors_s + of.prompt_floors_s,
        kernels=of.kernels,
    )


def _products(of: LayoutColumns, tokens: Floats) -> Floats:
    dense = _roofs(of.dense_s, tokens * of.dense_s_per_token, of.dense_depth_s)
    wide_s_of_tokens = np.minimum(tokens, 256) * of.wide_s_per_token
    wide = _roofs(of.wide_s, wide_s_of_tokens, of.wide_depth_s)
    return np.asarray(dense + wide)


def _experts(of: LayoutColumns, tokens: Floats) -> Floats:
    """The seconds of all blocks' experts for a batch, for each candidate replica."""
    reached, rows = fullest_rank(of, tokens)
    roofs = _roofs(reached * of.expert_s, rows * of.expert_s_per_row)
    return np.asarray(roofs + rows * of.expert_s_per_row_moved)


def fullest_rank(of: LayoutColumns, tokens: Floats) -> tuple[Floats, Floats]:
    """The experts used and the tokens on the rank with the most tokens."""
    share = of.active / np.maximum(of.experts, 1.0)
    touched = reached_share(share, tokens)
    reached = of.experts_on_rank * touched
    reached = reached + of.fullest * np.sqrt(reached * (1 - touched))
    rows = tokens * of.active * of.expert_share
    # The variance of the number of tokens on a rank: from randomly chosen experts, and from experts
    # that are not equally likely.
    uneven = rows**2 / (EVENNESS * np.maximum(of.experts_on_rank, 1.0))
    rows = rows + of.fullest * np.sqrt(rows * (1 - share) + uneven)
    return np.minimum(reached, of.experts_on_rank), rows


def _links(of: LayoutColumns, on_rank: Floats, together: Floats) -> Floats:
    reduced = of.reduces * (of.reduce_floor_s + on_rank * of.reduce_s_per_token)
    exchanged = together * of.exchange_s_per_token
    return np.asarray(reduced + exchanged + on_rank * of.send_s_per_token)


def _roofs(*parts_s: Floats) -> Floats:
    # Two square roots are faster than a fourth root, and a fit computes this a million times.
    total = sum((one * one) ** 2 for one in parts_s)
    return np.asarray(np.sqrt(np.sqrt(total)))


def _numbers(layout: RankLayout) -> Mapping[str, float]:
    gpu, form = gpu_named(layout.gpu), FORMATS[layout.weights]
    work = rank_work(layout.model, tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp)
    of_dense = "bf16" if form.experts_alone or _keeps_wide(layout) else layout.weights
    dense, wide = _products_rate(layout, of_dense), _products_rate(layout, "bf16")
    experts = _rate(layout, "experts", layout.weights)
    decode, prefill = _rate(layout, "decode", layout.cache), _rate(layout, "prefill", layout.cache)
    cache_bytes = work.cache_elements * CACHE_BYTES[layout.cache]
    attends = work.full_layers + work.window_layers
    peak = gpu.flop_per_s("fp16")
    dense_bytes = FORMATS[of_dense].bytes_each
    state_bytes = work.scan_layers * work.state_elements * 4.0
    stage = 1.0 / layout.pp
    held = work.dense_parameters * dense_bytes + work.resident_parameters * form.bytes_each
    tables = 2.0 * (work.table_parameters + work.wide_parameters)
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "batches": layout.pp
        * (layout.dp if layout.engine in LOCKSTEP and work.expert_layers else 1),
        "ep": layout.ep,
        "layers": work.layers,
        "dense_s": stage * work.dense_parameters * dense_bytes / _bytes_per_s(gpu, dense),
        "dense_s_per_token": stage * 2 * work.dense_parameters / _flop_per_s(gpu, dense, of_dense),
        "dense_depth_s": stage * work.dense_depth * dense.depth_s,
        "wide_s": stage * work.wide_parameters * 2.0 / _bytes_per_s(gpu, wide),
        "wide_s_per_token": stage * 2 * work.wide_parameters / _flop_per_s(gpu, wide, "bf16"),
        "wide_depth_s": stage * work.wide_depth * wide.depth_s,
        "product_floors_s": stage
        * (work.dense_products * dense.floor_s + work.wide_products * wide.floor_s),
        "expert_s": stage
        * work.expert_layers
        * (work.expert_parameters * form.bytes_each / _bytes_per_s(gpu, experts)),
        "expert_s_per_row": stage
        * work.expert_layers
        * (2 * work.expert_parameters / _flop_per_s(gpu, experts, layout.weights)),
        # Each rank moves whole hidden vectors of tokens, even if it holds a part of each expert.
        "expert_s_per_row_moved": stage * work.expert_layers * _row_s(gpu, experts, work.hidden),
        "expert_floors_s": stage * work.expert_layers * experts.floor_s,
        "experts": work.experts,
        "experts_on_rank": work.experts_on_rank,
        "active": work.active,
        "expert_share": work.experts_on_rank / work.experts if work.experts else 0.0,
        "fullest": _fullest(layout.ep),
        "attention_floors_s": stage * (attends + work.scan_layers) * decode.floor_s,
        "prompt_floors_s": stage * (attends + work.scan_layers) * prefill.floor_s,
        "full_layers": work.full_layers * stage,
        "window_layers": work.window_layers * stage,
        "window": work.window,
        "look_s": cache_bytes / _bytes_per_s(gpu, decode),
        # In latent attention, arithmetic limits decoding, since many heads share vectors.
        "look_flop_s": work.decode_flop
        / (peak * (LATENT_SHARE if layout.model.latent else decode.arithmetic_share)),
        "prompt_flop_s": work.prefill_flop / (peak * prefill.arithmetic_share),
        "state_s": stage * 2 * state_bytes / (gpu.bytes_per_s * decode.memory_share),
        "scan_s_per_token": stage
        * (work.scan_layers * work.state_elements * SCAN_FLOP / (peak * prefill.arithmetic_share)),
        "kernels": work.kernels * stage,
        **_link_numbers(layout, gpu, work),
        "weight_bytes": stage * (held + tables),
        "cache_bytes": stage * cache_bytes * attends,
        "state_bytes": stage * state_bytes,
        "memory_bytes": gpu.memory_bytes,
    }


def _fullest(ranks: int) -> float:
    """The expected load of the fullest rank, in standard deviations above the mean (Blom)."""
    if ranks == 1:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return float(largest * np.sqrt(1 - 1 / ranks))


def _link_numbers(layout: RankLayout, gpu: ServingGpu, work: RankWork) -> Mapping[str, float]:
    stage, width = 1.0 / layout.pp, 2.0 * work.hidden
    ranks = max(layout.tp, layout.ep * layout.expert_tp if layout.dp == 1 else layout.tp)
    link = gpu.intra_node_gbytes_per_s * GBYTES
    if ranks > gpu.gpus_per_node:
        link = gpu.inter_node_gbytes_per_s * GBYTES / gpu.gpus_per_node
    numbers = {
        "reduces": 0.0,
        "reduce_floor_s": 0.0,
        "reduce_s_per_token": 0.0,
        "exchange_s_per_token": 0.0,
        "send_s_per_token": 0.0 if layout.pp == 1 else width / layout.tp / link,
    }
    if ranks > 1:
        reduce_rate = _rate(layout, "all_reduce", str(2 ** round(np.log2(ranks))))
        per_token = 2 * width * (ranks - 1) / ranks / (link * reduce_rate.memory_share)
        numbers["reduces"] = stage * work.all_reduces
        numbers["reduce_floor_s"] = reduce_rate.floor_s
        numbers["reduce_s_per_token"] = per_token
    if layout.dp > 1 and work.expert_layers:
        # Tokens go to the ranks of their experts and back, so a rank receives as much as it sends.
        wide = str(min(8, 2 ** round(np.log2(layout.dp * layout.tp))))
        rate = _rate(layout, "all_reduce", wide)
        sent = 2 * width * min(work.active, layout.ep) / (layout.dp * layout.tp)
        of_layers = stage * work.expert_layers
        numbers["exchange_s_per_token"] = of_layers * sent / (link * rate.memory_share)
        numbers["reduces"] += of_layers * 2 * (layout.tp == 1)
        if layout.tp == 1:
            numbers["reduce_floor_s"] = rate.floor_s
    return numbers


def _keeps_wide(layout: RankLayout) -> bool:
    """Whether only experts have 4-bit weights, as in published models with 4-bit experts."""
    return layout.weights == "nvfp4" and layout.model.experts is not None


def _rate(layout: RankLayout, work: str, kind: str) -> KernelRate:
    return kernel_rate(layout.gpu, layout.engine, work, kind)  # type: ignore[arg-type]


def _products_rate(layout: RankLayout, kind: str) -> KernelRate:
    rate, share = _rate(layout, "products", kind), gpu_named(layout.gpu).fp16_share
    if share is None or FORMATS[kind].runs_in != "fp16":
        return rate
    return replace(rate, arithmetic_share=share)


def _bytes_per_s(gpu: ServingGpu, rate: KernelRate) -> float:
    return gpu.bytes_per_s * rate.memory_share


def _row_s(gpu: ServingGpu, rate: KernelRate, hidden: int) -> float:
    share = rate.rows_share
    return 0.0 if share is None else hidden * ROW_BYTES / (gpu.bytes_per_s * share)


def _flop_per_s(gpu: ServingGpu, rate: KernelRate, weights: str) -> float:
    return gpu.flop_per_s(FORMATS[weights].runs_in) * rate.arithmetic_share
