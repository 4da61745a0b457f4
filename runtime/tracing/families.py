"""Traces the project's own transformers, with symbols or with numbers as sizes."""

from dataclasses import dataclass, replace

import torch

from mistlab.symbolic.graph import ModelGraph
from mistlab.symbolic.library import Variant
from mistlab.values.model import ModelSpec
from runtime.models.config import TYPE_OF_PRECISION, ModelConfig, Structure, structure_of
from runtime.models.families import STRUCTURES
from runtime.models.ranks import CountedRanks
from runtime.models.sizes import Size
from runtime.models.transformer import Transformer
from runtime.sizes import SizeSpace
from runtime.tracing.trace import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a transformer and of its input, in the letters of the glossary."""

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


def symbolic_sizes(space: SizeSpace, *, splits_tokens: bool = False) -> Sizes:
    """A symbol for every size; the numbers behind the symbols only have to differ."""
    tp = space.size("tp", 2)
    k = space.multiple("k", 6, tp)
    return Sizes(
        b=space.size("b", 4),
        s=space.multiple("s", 128, tp) if splits_tokens else space.size("s", 128),
        h=space.size("h", 1024),
        n=space.multiple("n", 24, k),
        k=k,
        d=space.size("d", 64),
        r=space.multiple("r", 32, 2),
        f=space.multiple("f", 5632, tp),
        V=space.multiple("V", 50304, tp),
        tp=tp,
    )


def trace_variant(variant: Variant) -> ModelGraph:
    """The graph of a variant with symbols as sizes, as the package ships it."""
    space = SizeSpace()
    sizes = symbolic_sizes(space, splits_tokens=variant.sequence_parallel)
    return trace_sizes(variant, sizes, space)


def trace_spec(spec: ModelSpec, attention: str, precision: str) -> tuple[ModelSpec, ModelGraph]:
    """A custom model with the structure of ``spec``, and its graph with symbols as sizes."""
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


def trace_sizes(
    variant: Variant, sizes: Sizes, space: SizeSpace, structure: Structure | None = None
) -> ModelGraph:
    """The graph of a variant for given sizes, which are symbols of ``space`` or numbers.

    The structure is that of the variant's family unless another is given.
    """
    config = ModelConfig(
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
    )
    ranks = CountedRanks(sizes.tp, splits_tokens=variant.sequence_parallel)
    with space.fake_mode:
        model = Transformer(config, structure or STRUCTURES[variant.family], ranks)
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
