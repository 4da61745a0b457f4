"""The torch models of all families, and blocks that are recomputed."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mistlab.plan.workload import Workload
from runtime.models.config import (
    ModelConfig,
    Structure,
    config_of,
    structure_of,
    structure_of_block,
)
from runtime.models.operators import add_in_norms
from runtime.models.ranks import TensorParallel
from runtime.models.transformer import Transformer

# The torch models GPT, Llama and Falcon, the three families of the published evaluations.


STRUCTURES: Mapping[str, Structure] = {
    # Brown et al. 2020.
    "gpt": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu_tanh",
        position="absolute",
        parallel_block=False,
    ),
    # Touvron et al. 2023; grouped key-value heads from Llama 2 on.
    "llama": Structure(
        norm="rmsnorm",
        gated_mlp=True,
        activation="silu",
        position="rotary",
        parallel_block=False,
    ),
    # Almazrouei et al. 2023.
    "falcon": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu_tanh",
        position="rotary",
        parallel_block=True,
    ),
    # Devlin et al. 2018; RoBERTa alike.
    "bert": Structure(
        norm="layernorm",
        gated_mlp=False,
        activation="gelu",
        position="absolute",
        parallel_block=False,
        encoder=True,
    ),
    # NVIDIA 2025 (arXiv 2504.03624): hybrid models without position embedding.
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
    """A transformer with learned positions, LayerNorm and GELU."""

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["gpt"], ranks)


@final
class Llama(Transformer):
    """A transformer with rotary positions, RMSNorm and SwiGLU."""

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["llama"], ranks)


@final
class Falcon(Transformer):
    """A transformer with rotary positions whose attention and network share one LayerNorm."""

    def __init__(self, config: ModelConfig, ranks: TensorParallel | None = None) -> None:
        super().__init__(config, STRUCTURES["falcon"], ranks)


def model_of(
    workload: Workload, ranks: TensorParallel | None = None, *, tensor_parallel: int = 1
) -> Transformer:
    """The torch model of a workload, as one tensor-parallel rank holds it."""
    config, spec = config_of(workload, tensor_parallel=tensor_parallel), workload.model
    blocks = [structure_of_block(spec, block) for block in range(spec.layers)]
    model = Transformer(
        *(config, structure_of(spec), ranks), blocks=blocks, further_tokens=spec.further_tokens
    )
    add_in_norms(model, spec.norm_epsilon)
    return model


def shapes_of_model(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, unsplit, and of routers' corrections; nothing is
    allocated."""
    with torch.device("meta"):
        model = model_of(workload)
    named = (*model.named_parameters(), *model.named_corrections())
    return {name: tuple(one.shape) for name, one in named}


# A block whose activations are computed again for the backward pass, by torch's checkpointing.


class Recomputed(nn.Module):
    """A block under torch's own checkpointing, for systems that use it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output
