"""What a step of an engine takes on one rank, for columns of layouts.

A step runs some decoded tokens and some tokens of prompts through all blocks. Its parts are summed
from the work of a rank (``rank_work``) and the rates of kernels (``gpu_facts``), and multiplied by
what is fitted for the engine (``engine_constants``).

Axes: C rows, each a layout under a load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.core.units import GBYTES
from mistlab.plan.workload import ModelSpec
from mistlab.serving.gpu_facts import (
    CACHE_BYTES,
    FORMATS,
    ROOFS,
    KernelRate,
    ServingGpu,
    gpu_named,
    kernel_rate,
)
from mistlab.serving.rank_work import RankWork, rank_work

# Operations of a scan for each state element and token: decay, outer product, and reading.
SCAN_FLOP = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """One replica as its ranks see it: the model, the GPU, the engine's kernels, degrees and
    precisions."""

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
        """Number of GPUs of the replica."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return max(1, self.tp * self.dp // self.ep)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutColumns:
    """Numbers of layouts as columns (C), from which steps are timed."""

    tp: Floats
    pp: Floats
    dp: Floats
    ep: Floats
    layers: Floats
    dense_s: Floats
    dense_s_per_token: Floats
    wide_s: Floats
    wide_s_per_token: Floats
    product_floors_s: Floats
    expert_s: Floats
    expert_s_per_row: Floats
    expert_floors_s: Floats
    experts: Floats
    experts_on_rank: Floats
    active: Floats
    expert_share: Floats
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
        """The columns of layouts, one after another."""
        known: dict[RankLayout, Mapping[str, float]] = {}
        rows = []
        for layout in layouts:
            if layout not in known:
                known[layout] = _numbers(layout)
            rows.append(known[layout])
        names = [one.name for one in fields(cls)]
        return cls(**{name: np.array([row[name] for row in rows]) for name in names})

    def rows(self, index: Rows) -> Self:
        """The columns of some rows, in the order of an index."""
        names = [one.name for one in fields(self)]
        return type(self)(**{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingStep:
    """Seconds (C) of a step by what takes them, before an engine's constants multiply them."""

    products: Floats
    experts: Floats
    attention: Floats
    links: Floats
    floors: Floats
    kernels: Floats

    def summed(self, factors: Mapping[str, Floats]) -> Floats:
        """Seconds (C) of the step, each part multiplied by its factor."""
        names = [one.name for one in fields(self)]
        total = sum(getattr(self, name) * factors.get(name, 1.0) for name in names)
        return np.asarray(total)


def decode_parts(of: LayoutColumns, sequences: Floats, context: Floats) -> ServingStep:
    """A step in which a replica decodes one token for each of ``sequences`` (C), which look at
    ``context`` (C) tokens in the mean."""
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
    """A pass over ``tokens`` (C) of prompts on one rank, each of which looks at ``looked`` (C)
    tokens of its prompt in the mean: half of the prompt, if it is read whole."""
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
    dense = _roofs(of.dense_s, tokens * of.dense_s_per_token)
    wide = _roofs(of.wide_s, np.minimum(tokens, 256) * of.wide_s_per_token)
    return np.asarray(dense + wide)


def _experts(of: LayoutColumns, tokens: Floats) -> Floats:
    """Experts of all blocks for tokens of a whole replica's batch (C): each expert that a token
    reaches is read once."""
    share = of.active / np.maximum(of.experts, 1.0)
    reached = of.experts_on_rank * (1 - (1 - share) ** tokens)
    rows = tokens * of.active * of.expert_share
    return _roofs(reached * of.expert_s, rows * of.expert_s_per_row)


def _links(of: LayoutColumns, on_rank: Floats, together: Floats) -> Floats:
    reduced = of.reduces * (of.reduce_floor_s + on_rank * of.reduce_s_per_token)
    exchanged = together * of.exchange_s_per_token
    return np.asarray(reduced + exchanged + on_rank * of.send_s_per_token)


def _roofs(memory_s: Floats, arithmetic_s: Floats) -> Floats:
    return np.asarray((memory_s**ROOFS + arithmetic_s**ROOFS) ** (1 / ROOFS))


def _numbers(layout: RankLayout) -> Mapping[str, float]:
    gpu, form = gpu_named(layout.gpu), FORMATS[layout.weights]
    work = rank_work(layout.model, tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp)
    of_dense = "bf16" if form.experts_alone or _keeps_wide(layout) else layout.weights
    dense = _rate(layout, "products", of_dense)
    wide = _rate(layout, "products", "bf16")
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
        "ep": layout.ep,
        "layers": work.layers,
        "dense_s": stage * work.dense_parameters * dense_bytes / _bytes_per_s(gpu, dense),
        "dense_s_per_token": stage * 2 * work.dense_parameters / _flop_per_s(gpu, dense, of_dense),
        "wide_s": stage * work.wide_parameters * 2.0 / _bytes_per_s(gpu, wide),
        "wide_s_per_token": stage * 2 * work.wide_parameters / _flop_per_s(gpu, wide, "bf16"),
        "product_floors_s": stage
        * (work.dense_products * dense.floor_s + work.wide_products * wide.floor_s),
        "expert_s": stage
        * work.expert_layers
        * (work.expert_parameters * form.bytes_each / _bytes_per_s(gpu, experts)),
        "expert_s_per_row": stage
        * work.expert_layers
        * (2 * work.expert_parameters / _flop_per_s(gpu, experts, layout.weights)),
        "expert_floors_s": stage * work.expert_layers * experts.floor_s,
        "experts": work.experts,
        "experts_on_rank": work.experts_on_rank,
        "active": work.active,
        "expert_share": work.experts_on_rank / work.experts if work.experts else 0.0,
        "attention_floors_s": stage * (attends + work.scan_layers) * decode.floor_s,
        "prompt_floors_s": stage * (attends + work.scan_layers) * prefill.floor_s,
        "full_layers": work.full_layers * stage,
        "window_layers": work.window_layers * stage,
        "window": work.window,
        "look_s": cache_bytes / _bytes_per_s(gpu, decode),
        # Many heads look at the same latent vectors, which turns memory's work into arithmetic.
        "look_flop_s": work.decode_flop / peak / (0.4 if layout.model.latent else 1.0),
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
        # Tokens go to their experts' ranks and back: in the mean a rank takes what it sends.
        sent = 2 * width * min(work.active, layout.ep) / (layout.dp * layout.tp) / link
        numbers["exchange_s_per_token"] = stage * work.expert_layers * sent
        numbers["reduces"] += stage * 2 * work.expert_layers * (layout.tp == 1)
        if layout.tp == 1:
            wide = str(min(8, 2 ** round(np.log2(layout.dp))))
            numbers["reduce_floor_s"] = _rate(layout, "all_reduce", wide).floor_s
    return numbers


def _keeps_wide(layout: RankLayout) -> bool:
    """Whether all but experts stays in 16 bits: models of experts in four bits, as published."""
    return layout.weights == "nvfp4" and layout.model.experts is not None


def _rate(layout: RankLayout, work: str, kind: str) -> KernelRate:
    return kernel_rate(layout.gpu, layout.engine, work, kind)  # type: ignore[arg-type]


def _bytes_per_s(gpu: ServingGpu, rate: KernelRate) -> float:
    return gpu.bytes_per_s * rate.memory_share


def _flop_per_s(gpu: ServingGpu, rate: KernelRate, weights: str) -> float:
    return gpu.flop_per_s(FORMATS[weights].runs_in) * rate.arithmetic_share
