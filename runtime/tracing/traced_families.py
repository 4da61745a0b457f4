"""Traces this package's own transformers, with symbols or numbers as sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mistlab.graph.graph import ModelGraph
from mistlab.graph.library import Variant
from mistlab.plan.workload import ModelSpec
from runtime.models.config import (
    LACKING,
    TYPE_OF_PRECISION,
    ExpertRanks,
    ModelConfig,
    Structure,
    structure_of,
)
from runtime.models.families import STRUCTURES
from runtime.models.ranks import CountedRanks, Size
from runtime.models.transformer import Transformer
from runtime.tracing.symbolic_sizes import SizeSpace
from runtime.tracing.trace import AsOnGPU, trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a transformer and of its input, by the letters of the glossary."""

    b: Size
    s: Size
    h: Size
    n: Size
    k: Size
    d: Size
    r: Size
    f: Size
    V: Size
    tp: Size
    # The sizes from here on belong to optional parts: windows, latent attention, experts and state
    # spaces.
    w: Size = 1
    u: Size = 1
    m: Size = 1
    v: Size = 1
    E: Size = 1
    a: Size = 1
    A: Size = 1
    j: Size = 1
    y: Size = 1
    l: Size = 1  # noqa: E741 (the letter of graphs)
    q: Size = 1
    p: Size = 1
    g: Size = 1
    e: Size = 1
    ep: Size = 1
    et: Size = 1


def symbolic_sizes(space: SizeSpace, variant: Variant | None = None) -> Sizes:
    """A symbol for each size; the numbers behind the symbols are arbitrary, but different."""
    tp = space.size("tp", 2)
    k = space.multiple("k", 6, tp)
    parts = () if variant is None else variant.parts
    splits_tokens = "experts" in parts or (variant is not None and variant.sequence_parallel)
    sizes: dict[str, Size] = {
        "b": space.size("b", 4),
        "s": space.multiple("s", 128, tp) if splits_tokens else space.size("s", 128),
        "h": space.size("h", 1024),
        "n": space.multiple("n", 24, k),
    }
    if "latent" in parts:
        # Rotary channels are fewer than a head's channels, so that rotated and plain channels both
        # occur.
        r = space.multiple("r", 32, 2)
        d = space.beyond("d", 64, r)
    else:
        d = space.size("d", 64)
        r = space.multiple("r", 32, 2)
    return Sizes(
        **sizes,
        k=k,
        d=d,
        r=r,
        f=space.multiple("f", 5632, tp),
        V=space.multiple("V", 50304, tp),
        tp=tp,
        **_sizes_of_parts(space, parts, tp),
    )


def _sizes_of_parts(space: SizeSpace, parts: tuple[str, ...], tp: Size) -> dict[str, Size]:
    """Symbols for the sizes of a model's optional parts."""
    sizes: dict[str, Size] = {}
    if "window" in parts:
        sizes |= {"w": space.size("w", 40)}
    if "latent" in parts:
        sizes |= {"m": space.size("m", 96), "v": space.size("v", 48)}
        sizes |= {} if "whole_queries" in parts else {"u": space.size("u", 208)}
    if "experts" in parts:
        ep, et = space.size("ep", 7), space.size("et", 3)
        sizes |= {"ep": ep, "et": et, "E": space.multiple("E", 77, ep)}
        sizes |= {"a": space.size("a", 5), "A": space.size("A", 9)}
        sizes |= {"j": space.multiple("j", 720, et)}
    if "shared_experts" in parts:
        sizes |= {"y": space.multiple("y", 1840, tp)}
    if "latent_experts" in parts:
        sizes |= {"l": space.size("l", 416)}
    if "state_space" in parts:
        g = space.multiple("g", 10, tp)
        sizes |= {"g": g, "q": space.multiple("q", 60, g), "p": space.size("p", 56)}
        sizes |= {"e": space.size("e", 88)}
    return sizes


def trace_variant(variant: Variant) -> ModelGraph:
    """The layer graph of a variant (family, attention, parts) with symbols as sizes, as shipped."""
    space = SizeSpace()
    return trace_sizes(variant, symbolic_sizes(space, variant), space)


def trace_spec(spec: ModelSpec, attention: str, precision: str) -> tuple[ModelSpec, ModelGraph]:
    """A custom model with the structure of ``spec``, and its layer graph with symbols as sizes."""
    variant = Variant(
        family=spec.family,
        attention=attention,
        precision=precision,
        biases=spec.biases,
        dropout=spec.dropout > 0,
    )
    space = SizeSpace()
    graph = trace_sizes(variant, symbolic_sizes(space), space, structure_of(spec))
    return replace(spec, family="custom"), replace(graph, name=spec.name)


def structure_with(variant: Variant) -> Structure:
    """The structure of a variant's blocks (norms, biases, experts, ...)."""
    parts: dict[str, Any] = dict.fromkeys(variant.parts, True)
    for lacking, has in LACKING.items():
        parts[has] = not parts.pop(lacking, False)
    for part, others in _OTHERWISE.items():
        parts |= others if parts.pop(part, False) else {}
    return replace(STRUCTURES[variant.family], **parts)


# For each optional part of blocks, the fields of the structure that it sets.
_OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "rotary": {"position": "rotary"},
    "positionless": {"position": "none"},
    "gated": {"gated_mlp": True, "activation": "silu"},
}


def trace_sizes(
    variant: Variant, sizes: Sizes, space: SizeSpace, structure: Structure | None = None
) -> ModelGraph:
    """The layer graph of a variant for given sizes, which are symbols of ``space`` or numbers.

    ``structure`` replaces the structure of the variant's family, if it is given.
    """
    with space.fake_mode:
        model = _model(variant, sizes, structure or structure_with(variant), blocks=1)
        tokens = torch.empty(sizes.b, sizes.s, dtype=torch.int64)
        targets = torch.empty(sizes.b, sizes.s, dtype=torch.int64)
    return trace(
        model,
        space,
        lambda m: m(tokens, targets),
        name=variant.name,
        attention=variant.attention,
        precision=variant.precision,
    )


def run_sizes(variant: Variant, sizes: Sizes, space: SizeSpace, blocks: int) -> None:
    """Run a training step of a variant with all its blocks, on tensors without values.

    Nothing is recorded: the time is a lower bound for analyses that run a whole model.
    """
    with space.fake_mode, AsOnGPU():
        model = _model(variant, sizes, structure_with(variant), blocks=blocks)
        tokens = torch.empty(sizes.b, sizes.s, dtype=torch.int64)
        targets = torch.empty(sizes.b, sizes.s, dtype=torch.int64)
        model(tokens, targets).backward()


def _model(variant: Variant, sizes: Sizes, structure: Structure, blocks: int) -> Transformer:
    config = ModelConfig(
        layers=blocks,
        hidden=sizes.h,
        heads=sizes.n,
        kv_heads=sizes.k,
        head_dim=sizes.d,
        ffn=sizes.f,
        vocab=sizes.V,
        positions=sizes.s,
        rotated=sizes.r,
        tensor_parallel=sizes.tp,
        attention="math" if variant.attention == "math" else "flash",
        dtype=TYPE_OF_PRECISION["bf16" if variant.precision == "half" else "fp32"],
        biases=variant.biases,
        dropout=0.1 if variant.dropout else 0.0,
        window=sizes.w,
        query_rank=sizes.u,
        key_rank=sizes.m,
        value_dim=sizes.v,
        experts=sizes.E,
        active=sizes.a,
        expert_ffn=sizes.j,
        shared_ffn=sizes.y,
        expert_hidden=sizes.l,
        scan_heads=sizes.q,
        scan_channels=sizes.p,
        scan_groups=sizes.g,
        states=sizes.e,
        expert_ranks=ExpertRanks(parallel=sizes.ep, tensor=sizes.et, taken=sizes.A),
    )
    ranks = CountedRanks(sizes.tp, splits_tokens=variant.sequence_parallel)
    return Transformer(config, structure, ranks)
