"""Blocks of a model whose operators keep less for their backward pass."""

from collections.abc import Collection
from functools import partial

from torch import Tensor, nn

from mistlab.graph.lean import KEPT_CHANNELS
from runtime.models.lean_operators import lean_gelu, lean_layer_norm, lost_channels
from runtime.models.operators import LayerNorm
from runtime.models.transformer import MLP


def make_lean(block: nn.Module, kinds: Collection[str]) -> None:
    """Let a block's operators of these kinds (``mistlab.plan.lean_sets``) keep less.

    Norms of what attention and the network make are left: no product keeps what they give.
    """
    for name, module in block.named_modules():
        if isinstance(module, MLP) and "gelu" in kinds:
            module.gelu = lean_gelu
        elif isinstance(module, LayerNorm) and "norms" in kinds and not name.endswith("post_norm"):
            module.normalise = partial(_normalise, channels=KEPT_CHANNELS)


def keep_lost_channels(block: nn.Module) -> None:
    """Let lean norms keep the values of all channels that their outputs do not tell, as their gains
    are now; the host waits for the device."""
    for norm in block.modules():
        if isinstance(norm, LayerNorm) and norm.normalise is not None:
            lost = lost_channels(norm.weight)
            norm.normalise = partial(_normalise, channels=max(KEPT_CHANNELS, lost))


def _normalise(x: Tensor, norm: LayerNorm, *, channels: int) -> Tensor:
    return lean_layer_norm(x, norm.weight, norm.bias, norm.epsilon, channels)
