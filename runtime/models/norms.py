"""Normalisations of the last dimension of a tensor."""

import torch
from torch import Tensor, nn

from runtime.models.operators import rms_norm
from runtime.models.sizes import Size


class LayerNorm(nn.Module):
    """Normalisation of vectors to zero mean and unit variance, with a weight and a bias."""

    def __init__(self, width: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return nn.functional.layer_norm(x, (self.width,), self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    """Normalisation of vectors by their root mean square, with a weight."""

    def __init__(self, width: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, 1e-5)[0]
