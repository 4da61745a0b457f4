"""The work of one rank for one token of a served model, summed from the model's layer graphs.

A graph counts a training step of ``b`` sequences of ``s`` tokens. Serving needs less of it: the
weights of products with their number, the widths of keys and values, operations for each token
and each token looked at, small kernels, and collectives. These do not depend on the batch, so one
row answers for every step of a layout.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from mistlab.graph.compiled import Compiled, compile_sums
from mistlab.graph.graph import LayerGraph, Operator
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.sums import Sum
from mistlab.graph.symbols import constants_of, size_names
from mistlab.plan.workload import ModelSpec, Workload

# Graphs do not depend on the length of a sequence; the longest window of a published model fits.
GRAPH_TOKENS = 32768
# Kinds of operators that are small kernels of their own between products.
SMALL = frozenset(("normalization", "softmax", "elementwise", "reduction", "gather", "copy"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What all blocks and the head of a model ask of one rank of a layout.

    ``dense_parameters`` are in ``dense_products`` products whose weights may be of few bits,
    ``wide_parameters`` (routers and the head) in products that stay in 16 bits. In each of
    ``expert_layers`` blocks the rank holds ``experts_on_rank`` of ``experts``, each of
    ``expert_parameters``; a token takes ``active``. Attention is of ``full_layers`` and of
    ``window_layers``, which look at ``window`` tokens; a token keeps ``cache_elements`` in each.
    It costs ``decode_flop`` for each token it looks at when one token is decoded, ``prefill_flop``
    in a whole prompt. ``scan_layers`` keep ``state_elements`` for a sequence instead.
    """

    hidden: int
    layers: int
    dense_parameters: float
    dense_products: float
    wide_parameters: float
    wide_products: float
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
        """Parameters of experts on the rank, in all blocks."""
        return self.expert_layers * self.experts_on_rank * self.expert_parameters


@cache
def rank_work(model: ModelSpec, *, tp: int, ep: int = 1, expert_tp: int = 1) -> RankWork:
    """The work of a rank under ``tp``-way tensor parallelism of attention and plain networks, with
    experts over ``ep`` ranks, each divided by ``expert_tp``."""
    graph = _graph(model)
    turns = Counter(graph.pattern[block % len(graph.pattern)] for block in range(model.layers))
    sizes = _sizes(model, tp=tp, ep=ep, expert_tp=expert_tp)
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
        wide_parameters=totals["router"] + head["dense"],
        wide_products=totals["routers"] + 1,
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
    """All parameters of a model, by its work on a single rank."""
    work = rank_work(model, tp=1)
    held = work.dense_parameters + work.wide_parameters + work.table_parameters
    return held + work.resident_parameters


# Sums that are the same for a rank however many blocks there are.
_LARGEST = frozenset(("attends", "windowed"))


@cache
def _graph(model: ModelSpec) -> StoredGraph:
    workload = Workload(
        model=model,
        sequence_length=GRAPH_TOKENS,
        global_batch=1,
        attention="flash",
        precision="bf16",
    )
    return graph_of(workload)


def _sizes(model: ModelSpec, *, tp: int, ep: int, expert_tp: int) -> dict[str, float]:
    workload = Workload(
        model=model, sequence_length=1, global_batch=1, attention="flash", precision="bf16"
    )
    sizes = dict.fromkeys(size_names(), 1.0) | dict(constants_of(workload))
    return sizes | {"tp": tp, "ep": ep, "et": expert_tp, "V": model.padded_vocab(tp), "b": 1.0}


def _values(graph: StoredGraph, kind: str, sizes: Mapping[str, float]) -> dict[str, float]:
    compiled, counts = _compiled(graph, kind)
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    found = dict(zip(compiled.names, (float(value[0]) for value in compiled(columns)), strict=True))
    return {**found, **counts}


@cache
def _compiled(graph: StoredGraph, kind: str) -> tuple[Compiled, Mapping[str, float]]:
    """The parameters of a kind of block as compiled sums, and counts of its operators."""
    counts = graph.counts
    layer = counts.head if kind == "head" else counts.kinds[kind]
    forward = layer.of_phase("forward")
    products = [one for one in forward if one.kind == "matmul" and not _is_batched(one)]
    routers = [one for one in products if "router" in one.module]
    experts = [one for one in products if one.name == "mistlab.grouped_product"]
    scans = [one for one in forward if one.kind == "scan"]
    attends = any(one.kind == "attention" for one in forward)
    small = [one for one in forward if one.kind in SMALL and "experts" not in one.module]
    found = {
        "products": len(products) - len(routers) - len(experts),
        "routers": len(routers),
        "expert_layers": min(1, len(experts)),
        "scans": len(scans),
        "attends": float(attends),
        "windowed": float(attends and any("w" in one.flop.names for one in forward)),
        "kernels": len(small),
        # Experts give their outcome by one all-reduce where tokens are not exchanged.
        "all_reduces": sum(one.name == "mistlab.all_reduce_" for one in forward)
        + (min(1, len(experts)) if not _shares(layer) else 0),
    }
    sums = {
        "dense": Sum.total(_sizes_of(layer, is_router=False)),
        "router": Sum.total(_sizes_of(layer, is_router=True)),
    }
    return compile_sums(sums, columns=size_names()), found


def _is_batched(operator: Operator) -> bool:
    return operator.name in ("aten.bmm", "aten.baddbmm")


def _shares(layer: LayerGraph) -> bool:
    """Whether a block's experts have a shared network, whose all-reduce sums theirs too."""
    return any(one.module.startswith("shared") for one in layer.operators)


def _sizes_of(layer: LayerGraph, *, is_router: bool) -> Iterator[Sum]:
    for parameter in layer.parameters:
        is_expert = parameter.name.startswith("experts.") and "router" not in parameter.name
        is_product = len(parameter.shape) > 1 and not is_expert
        if is_product and ("router" in parameter.name) == is_router:
            yield parameter.count


def _of_expert(model: ModelSpec) -> float:
    assert model.experts is not None
    matrices = 3 if model.mlp_type == "gated_mlp" else 2
    width = model.experts.hidden or model.hidden
    return float(matrices * width * model.experts.ffn)


def _attention(model: ModelSpec, tp: int) -> dict[str, float]:
    """Numbers of one attention block on a rank: elements kept for a token, operations for each
    token looked at, and parameters of keys that ranks repeat."""
    heads = max(1.0, model.heads / tp)
    if model.latent is not None:
        # Decoding works on the latent vectors themselves, which every rank keeps whole.
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
