"""The torch models of all families, with adapters, packed documents and recomputed blocks."""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mistlab.plan.workload import Workload
from runtime.models.attention import Attention
from runtime.models.config import (
    ModelConfig,
    Structure,
    config_of,
    structure_of,
    structure_of_block,
)
from runtime.models.latent_attention import Down
from runtime.models.operators import add_in_norms
from runtime.models.parallel import ColumnAdapter, ColumnLinear, RowAdapter, RowLinear
from runtime.models.ranks import TensorParallel
from runtime.models.transformer import MLP, Embedding, Head, Transformer
from runtime.models.wide_attention import CurrentDocuments

# The structures of the families, and the torch models of GPT, Llama and Falcon.


STRUCTURES: Mapping[str, Structure] = {
    # The structure of GPT-3 (Brown et al. 2020).
    "gpt": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu_tanh",
        position="absolute",
        parallel_block=False,
    ),
    # The structure of Llama (Touvron et al. 2023); grouped key-value heads from Llama 2 on.
    "llama": Structure(
        norm="rmsnorm",
        gated_mlp=True,
        activation="silu",
        position="rotary",
        parallel_block=False,
    ),
    # The structure of Falcon (Almazrouei et al. 2023).
    "falcon": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu_tanh",
        position="rotary",
        parallel_block=True,
    ),
    # The structure of BERT (Devlin et al. 2018) and RoBERTa.
    "bert": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu",
        position="absolute",
        parallel_block=False,
        encoder=True,
    ),
    # The structure of Nemotron-H (NVIDIA 2025, arXiv 2504.03624): hybrid models without position
    # embedding.
    "nemotron": Structure(
        norm="rmsnorm",
        gated_mlp=False,
        activation="relu2",
        position="none",
        parallel_block=False,
    ),
}


@final
class GPT(Transformer):
    """A transformer with learned position embedding, LayerNorm and GELU."""

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["gpt"], ranks)


@final
class Llama(Transformer):
    """A transformer with rotary position embedding, RMSNorm and SwiGLU."""

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["llama"], ranks)


@final
class Falcon(Transformer):
    """A transformer with rotary position embedding, whose attention and feed-forward network share
    one LayerNorm.
    """

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["falcon"], ranks)


def model_of(
    workload: Workload, ranks: TensorParallel | None = None, *, tensor_parallel: int = 1
) -> Transformer:
    """The torch model of a workload on one tensor-parallel rank; weights that are frozen in
    training are not quantised here.
    """
    config, spec = config_of(workload, tensor_parallel=tensor_parallel), workload.model
    blocks = [structure_of_block(spec, block) for block in range(spec.layers)]
    model = Transformer(
        *(config, structure_of(spec), ranks), blocks=blocks, further_tokens=spec.further_tokens
    )
    add_in_norms(model, spec.norm_epsilon)
    if workload.train == "adapters":
        freeze(model, rank=workload.rank, targets=workload.adapter_targets)
    return model


def shapes_of_model(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's unsplit parameters and of its router biases, by name; no memory is
    allocated.
    """
    with torch.device("meta"):
        model = model_of(workload)
    named = (*model.named_parameters(), *model.named_corrections())
    return {name: tuple(one.shape) for name, one in named}


# Layers with frozen weights, and adapters of the GEMMs in their blocks.


# ADAPTER occurs in the names of all adapters' parameters; after it, UP begins the names of the
# factors that start as zeros, so that training starts from the frozen model.
ADAPTER, UP = ".adapter.", "up"


def freeze(layer: nn.Module, *, rank: int, targets: str) -> None:
    """Freeze a layer's weights, and add adapters to the GEMMs of its blocks: to all GEMMs, or with
    ``targets`` "attention" only to the GEMMs of attention.
    """
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    kinds = (Attention,) if targets == "attention" else (Attention, MLP)
    modules = [one for one in layer.modules() if isinstance(one, kinds)]
    for product in (product for one in modules for product in one.children()):
        if isinstance(product, ColumnLinear):
            product.adapter = ColumnAdapter(product, rank)
        elif isinstance(product, RowLinear):
            product.adapter = RowAdapter(product, rank)


def frozen_products(layer: nn.Module) -> Iterator[tuple[str, "ColumnLinear | RowLinear | Down"]]:
    """The GEMMs with frozen weights in a layer, by name."""
    for name, product in layer.named_modules():
        if (
            isinstance(product, ColumnLinear | RowLinear | Down)
            and not product.weight.requires_grad
        ):
            yield name, product


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ADAPTER in name


def begins_as_zeros(name: str) -> bool:
    """Whether the adapter parameter with this name starts as zeros."""
    return name.partition(ADAPTER)[2].startswith(UP)


# Documents packed into a sequence.


def confine(layer: nn.Module, packed: CurrentDocuments) -> None:
    """Treat the documents that are packed into sequences as separate: tokens attend within their
    document, positions restart in each document, and tokens without a target have no loss.
    """
    for module in layer.modules():
        if isinstance(module, Attention | Embedding | Head):
            module.packed = packed


# A block whose activations are recomputed in the backward pass, by torch's checkpointing.


class Recomputed(nn.Module):
    """A block under torch's checkpointing, for training systems that use it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, whose activations the backward pass recomputes."""
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output
