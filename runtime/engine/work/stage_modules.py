"""The layers of a stage as modules, and unfused attention that works in place.

Axes: B batch, S sequence, H this rank's heads, D channels of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from mistlab.engines.engine import CHUNK_TOKENS
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_shape import StageShape
from runtime.comm.group import Group
from runtime.devices.cuda import generator_of
from runtime.engine.storage.layout import shapes_of
from runtime.engine.storage.packing import Packing
from runtime.engine.streams.expert_lanes import StreamedExperts
from runtime.engine.work.frozen_products import packings_of
from runtime.models.attention import Attention, RotaryTables
from runtime.models.config import ModelConfig, config_of, structure_of, structure_of_block
from runtime.models.context import ContextRanks, own_positions
from runtime.models.dropout import Draws, Dropout, LayerDraws, MaskRows, dropped_shares
from runtime.models.families import begins_as_zeros, confine, freeze, is_adapter
from runtime.models.grouped import ExpertMatrices
from runtime.models.latent_attention import LatentAttention
from runtime.models.operators import add_in_norms, causal_softmax, causal_softmax_backward, hide
from runtime.models.parallel import shard_of
from runtime.models.ranks import OneRank, TensorParallel
from runtime.models.transformer import Block, Embedding, FurtherHead, Head
from runtime.models.wide_attention import CurrentDocuments, Documents
from runtime.runnable import check_model

# Unfused attention without copies: its GEMMs read and write heads in place.
#
# A batched GEMM needs its matrices at a constant stride. In the tensor of queries, keys and values,
# and in the layer's output, the heads of one sequence have a constant stride, but the heads of
# several sequences do not. So there is one GEMM per sequence, and operands, results and gradients
# need no copies. This requires that each query head has keys and values of its own.
#
# Axes: B batch, S sequence, H this rank's heads, D channels of a head.


class _InPlace(torch.autograd.Function):
    """Autograd function of attention from packed queries, keys and values (B, S, 3 H, D) to results
    (B, S, H, D), without copies.

    It saves its input and the attention probabilities (B, H, S, S). Dropout of the probabilities
    depends on the row numbers ``rows``, so the backward pass makes the same masks again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        rows: MaskRows | None,
        dropout: float,
        is_causal: bool,
        documents: Documents | None = None,
    ) -> Tensor:
        ctx.rows, ctx.dropout = rows, dropout
        query, key, value = _by_head(qkv).chunk(3, dim=1)
        scores = _product(query, key.mT, _factor(qkv))
        size = scores.shape[-1]
        if documents is not None:
            hide(scores, documents.others())
        if is_causal:
            shares = causal_softmax(scores.view(-1, size, size), size).view_as(scores)
        else:
            shares = torch.softmax(scores, -1)
        del scores
        ctx.save_for_backward(qkv, shares)
        mixed = torch.empty_like(qkv[:, :, : query.shape[1]], memory_format=torch.contiguous_format)
        if rows is not None:
            shares = dropped_shares(shares, rows, dropout)
        _product(shares, value, out=_by_head(mixed))
        return mixed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        qkv, shares = ctx.saved_tensors
        rows = ctx.rows
        query, key, value = _by_head(qkv).chunk(3, dim=1)
        of_qkv = torch.empty_like(qkv)
        of_query, of_key, of_value = _by_head(of_qkv).chunk(3, dim=1)
        of_mixed = _by_head(gradient)
        used = shares if rows is None else dropped_shares(shares, rows, ctx.dropout)
        _product(used.mT, of_mixed, out=of_value)
        del used
        of_shares = _product(of_mixed, value.mT)
        if rows is not None:
            of_shares = dropped_shares(of_shares, rows, ctx.dropout)
        of_scores = causal_softmax_backward(of_shares, shares)
        _product(of_scores, key, _factor(qkv), out=of_query)
        _product(of_scores.mT, query, _factor(qkv), out=of_key)
        return of_qkv, None, None, None, None


def attend_in_place(qkv: Tensor, of: Attention) -> Tensor:
    """Unfused attention without copies, where each query head has keys and values of its own."""
    dropout = of.config.dropped_shares
    rows = of.rows_of_shares() if dropout else None
    mixed: Tensor = _InPlace.apply(qkv, rows, dropout, of.is_causal, of.documents)
    return mixed


def let_attend_in_place(module: nn.Module) -> None:
    """Let a module's unfused attention work without copies, if each query head has keys and
    values.
    """
    for attention in module.modules():
        if isinstance(attention, Attention) and _is_written_out(attention.config):
            attention.attend = attend_in_place


def _is_written_out(config: ModelConfig) -> bool:
    return config.attention == "math" and config.heads == config.kv_heads


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _factor(qkv: Tensor) -> float:
    return 1 / math.sqrt(qkv.shape[-1])


def _product(left: Tensor, right: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``factor * left @ right`` of four-dimensional tensors, by one GEMM per sequence."""
    if out is None:
        out = left.new_empty(*left.shape[:-1], right.shape[-1])
    for matrix, other, result in zip(left, right, out, strict=True):
        result.baddbmm_(matrix, other, beta=0.0, alpha=factor)
    return out


# Builds a stage's layers as modules without memory, and draws their initial weights by a seed.


INITIAL_STD = 0.02
HOST = torch.device("cpu")
# The name of the token table, and of the head's weight, which may be tied to the table.
TABLE, TIED = "embedding.tokens.weight", "head.projection.weight"
# The name of the head's copy of the token table, for multi-token prediction with an untied head.
COPIED = "head.table.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerModule:
    """A layer on one tensor-parallel rank. ``prefix`` begins the full names of its parameters;
    frozen weights may be quantised and packed.
    """

    prefix: str
    module: nn.Module
    whole_shapes: Mapping[str, tuple[int, ...]]
    packings: Mapping[str, Packing] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the rank's parts of the layer's parameters, without a token table that the
        head borrows from the embedding.
        """
        shapes = shapes_of(self.module)
        return {name: shape for name, shape in shapes.items() if name in self.whole_shapes}

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the rank's parts of trained parameters."""
        return {name: shape for name, shape in self.shapes.items() if not self.is_frozen(name)}

    @property
    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the rank's parts of frozen weights as they are stored; packed weights are
        flat.
        """
        return {
            name: self._packed_shape(name) if name in self.packings else shape
            for name, shape in self.shapes.items()
            if self.is_frozen(name)
        }

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter of the layer is frozen, that is, not trained."""
        return not self.module.get_parameter(name).requires_grad

    def kept_as(self, name: str, part: Tensor) -> Tensor:
        """This rank's part of a frozen weight as it is stored, packed or plain."""
        packing = self.packings.get(name)
        if packing is None:
            return part
        bytes_, dtype = packing.pack(part), self.module.get_parameter(name).dtype
        (numel,) = self._packed_shape(name)
        padded = nn.functional.pad(bytes_, (0, numel * dtype.itemsize - bytes_.numel()))
        return padded.view(dtype)

    def _packed_shape(self, name: str) -> tuple[int, ...]:
        itemsize = self.module.get_parameter(name).dtype.itemsize
        return (-(-self.packings[name].size_bytes // itemsize),)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter before it is split over ranks, by the parameter's full name."""
        return self.whole_shapes[name.removeprefix(self.prefix)]

    def is_of_experts(self, name: str) -> bool:
        """Whether a parameter belongs to experts, which another group of ranks shares."""
        return isinstance(self._owner(name), ExpertMatrices)

    def is_split(self, name: str) -> bool:
        """Whether ranks split a parameter: tensor-parallel ranks, or for experts the ranks that
        split the same experts.
        """
        owner = self._owner(name)
        if isinstance(owner, ExpertMatrices):
            return owner.splits(name.rpartition(".")[2])
        return self.module.get_parameter(name).shape != self.whole_shapes[name]

    def _owner(self, name: str) -> nn.Module:
        return self.module.get_submodule(name.rpartition(".")[0])

    def part_of(self, tensors: Mapping[str, Tensor], ranks: Group) -> dict[str, Tensor]:
        """This rank's parts of the layer's whole tensors; padding of the vocabulary is zero."""
        padded = {
            name: _padded(tensor, ranks.size * self.module.get_parameter(name).shape[0])
            if self.prefix + name in (TABLE, TIED, COPIED)
            else tensor
            for name, tensor in tensors.items()
        }
        return shard_of(self.module, padded, rank=ranks.rank, ranks=ranks.size)

    def initial(self, seed: int, *, tied: bool, device: torch.device = HOST) -> dict[str, Tensor]:
        """The initial weights of the layer, not split over ranks."""
        return {
            name: initial_tensor(self.prefix + name, shape, seed, tied=tied, device=device)
            for name, shape in self.whole_shapes.items()
        }


def initial_tensor(
    name: str, shape: tuple[int, ...], seed: int, *, tied: bool, device: torch.device = HOST
) -> Tensor:
    """The initial weights of a parameter, drawn on a device.

    They depend on the seed and the parameter's name, so they are the same for every plan; different
    kinds of devices draw different values. An adapter's output is 0 at first: its last factor is 0,
    and its first factor keeps the magnitude of the input.
    """
    if begins_as_zeros(name):
        return torch.zeros(shape, device=device)
    std = INITIAL_STD if not is_adapter(name) else shape[-1] ** -0.5
    if name == COPIED or (tied and name == TIED):
        name = TABLE
    if len(shape) == 1:
        fill = 1.0 if name.endswith("weight") else 0.0
        return torch.full(shape, fill, device=device)
    # A CPU generator uses only 32 bits of a seed, so the name and the run's seed are hashed to 32
    # bits.
    generator = generator_of(device).manual_seed(crc32(name.encode(), seed & 0xFFFFFFFF))
    return torch.empty(shape, device=device).normal_(std=std, generator=generator)


def layer_modules(
    workload: Workload,
    shape: StageShape,
    ranks: TensorParallel,
    context: ContextRanks,
    experts: StreamedExperts,
    device: torch.device,
) -> dict[int, LayerModule]:
    """A stage's layers, by index in the whole model; ``context`` is the group of context-parallel
    ranks, ``experts`` that of expert-parallel ranks.
    """
    check_model(workload)
    config = config_of(workload, tensor_parallel=ranks.size, expert_ranks=experts.counts)
    places, further = None, None
    if context.size > 1:
        tokens, further = workload.sequence_length, context
        places = own_positions(tokens, context.rank, context.size).to(device)
    rotary = rotary_tables(config, workload, device, places)
    build = LayerBuilder(workload, config, ranks, rotary, further, places, experts)
    unsplit = LayerBuilder(workload, config_of(workload), OneRank(), build.rotary)
    modules = {layer: build.with_norms(layer) for layer in shape.layers}
    return {
        layer: LayerModule(
            prefix=prefix_of(layer, workload.model.layers),
            module=module,
            whole_shapes=own_shapes(
                unsplit.layer(layer),
                without=twin_of(workload.model) if shape.borrows_table(layer) else "",
            ),
            packings=packings_of(module, workload.base) if shape.has_block(layer) else {},
        )
        for layer, module in modules.items()
    }


def let_draw(layers: Mapping[int, LayerModule], draws: Draws) -> CurrentDocuments:
    """Set up dropout in all layers, with masks that depend only on position, and packed documents;
    returns the documents of the current micro-batch.
    """
    packed = CurrentDocuments()
    for layer, layer_module in layers.items():
        confine(layer_module.module, packed)
        for name, module in layer_module.module.named_modules():
            if isinstance(module, Dropout | Attention):
                module.draws = LayerDraws(draws=draws, layer=layer_of(layer, name))
    return packed


def layer_of(layer: int, name: str) -> int:
    """The index of the layer or block that a module's ``name`` in a layer belongs to. Blocks of
    multi-token prediction heads are numbered from the head's index on.
    """
    within, _, rest = name.partition(".")
    return layer + int(rest.partition(".")[0]) if within == "further" and rest else layer


def twin_of(model: ModelSpec) -> str:
    """The name of the head's parameter that is a copy of the token table; empty if the head has
    none.
    """
    if model.tied_embeddings:
        return TIED
    return COPIED if model.further_tokens else ""


def own_shapes(module: nn.Module, *, without: str = "") -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's parameters, ``without`` the table that a head borrows."""
    shapes = shapes_of(module)
    if without:
        del shapes[without.removeprefix("head.")]
    return shapes


class LayerBuilder:
    """Builds layers as modules without storage: the embedding is layer 0, and the head the last."""

    def __init__(
        self,
        workload: Workload,
        config: ModelConfig,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
        context: ContextRanks | None = None,
        places: Tensor | None = None,
        experts: StreamedExperts | None = None,
    ) -> None:
        self.context, self.places, self.experts = context, places, experts
        self.spec, self.structure = workload.model, structure_of(workload.model)
        self.blocks = workload.model.layers
        self.chunk_tokens = CHUNK_TOKENS if workload.loss == "chunked" else None
        self.trains_adapters = workload.train == "adapters"
        self.adapter_rank, self.adapter_targets = workload.rank, workload.adapter_targets
        self.config, self.ranks, self.rotary = config, ranks, rotary

    def with_norms(self, layer: int) -> nn.Module:
        """A layer whose norms have the model's epsilon."""
        module = self.layer(layer)
        add_in_norms(module, self.spec.norm_epsilon)
        return module

    def layer(self, layer: int) -> nn.Module:
        """Build a layer by index; if adapters are trained, its weights are frozen and its blocks
        get adapters.
        """
        module = self._layer(layer)
        if self.trains_adapters:
            with torch.device("meta"):
                freeze(module, rank=self.adapter_rank, targets=self.adapter_targets)
        return module

    def _layer(self, layer: int) -> nn.Module:
        with torch.device("meta"):
            if layer == 0:
                embedding = Embedding(self.config, self.structure, self.ranks)
                embedding.places = self.places
                return embedding
            if layer <= self.blocks:
                structure = structure_of_block(self.spec, layer - 1)
                return self._joined(Block(self.config, structure, self.ranks, self.rotary))
            like = structure_of_block(self.spec, self.blocks - 1)
            further = [
                FurtherHead(self.config, like, self.ranks, self.rotary)
                for _ in range(self.spec.further_tokens)
            ]
            for further_head in further:
                self._joined(further_head.block)
            head = Head(self.config, self.structure, self.ranks, further=further)
            head.chunk_tokens = self.chunk_tokens
            return head

    def _joined(self, block: Block) -> Block:
        """A block connected to its groups of expert-parallel and context-parallel ranks."""
        if block.experts is not None:
            block.experts.trips = self.experts
            block.experts.context = self.context
        if isinstance(block.attention, Attention | LatentAttention):
            block.attention.context = self.context
        return block


def rotary_tables(
    config: ModelConfig, workload: Workload, device: torch.device, places: Tensor | None
) -> RotaryTables | None:
    """The tables of rotary embedding (cosines and sines), for all positions in order or for the
    positions ``places``; None for models without rotary embedding.
    """
    if structure_of(workload.model).position != "rotary":
        return None
    with torch.device(device):
        tables = RotaryTables(config)
    if places is not None:
        tables.cosine, tables.sine = tables.cosine[places], tables.sine[places]
    return tables


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def prefix_of(layer: int, blocks: int) -> str:
    """The prefix of the full names of a layer's parameters."""
    if layer == 0:
        return "embedding."
    return f"blocks.{layer - 1}." if layer <= blocks else "head."
