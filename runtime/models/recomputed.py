"""A block whose activations are computed again for the backward pass, by torch's checkpointing."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block under torch's own checkpointing, for systems that use it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output
