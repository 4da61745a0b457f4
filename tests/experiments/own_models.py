"""Models as users write them, good and bad, for the tracing command."""

import torch
from torch import Tensor, nn

from runtime.models.config import config_with
from runtime.models.families import GPT
from runtime.models.ranks import CountedRanks

not_a_function = 3


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        heads = self.qkv(self.norm(x)).view(batch, sequence, 3, 4, hidden // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))


class Model(nn.Module):
    def __init__(self, hidden: int = 64, layers: int = 3, positions: int = 256) -> None:
        super().__init__()
        self.positions = positions
        self.tokens = nn.Embedding(512, hidden)
        self.places = nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, 512, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.positions:
            message = "too long"
            raise ValueError(message)
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.run_blocks(x))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReturnsLoss(Model):
    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class AsksForValues(Model):
    def run_blocks(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a value decides
            x = 2 * x
        return super().run_blocks(x)


class ChoosesRows(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[tokens > 3])  # a mask as an index
        return self.head(self.run_blocks(x))


class FixesTheBatch(Model):
    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x.view(4, -1, 64))  # a number for the batch


class WithoutBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Embedding(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.only(tokens)


def plain() -> nn.Module:
    return Model()


def with_loss() -> nn.Module:
    return ReturnsLoss()


def asks_for_values() -> nn.Module:
    return AsksForValues()


def chooses_rows() -> nn.Module:
    return ChoosesRows()


def fixes_the_batch() -> nn.Module:
    return FixesTheBatch()


def without_blocks() -> nn.Module:
    return WithoutBlocks()


def unlike_blocks() -> nn.Module:
    model = Model()
    model.blocks[2] = Block(32)
    return model


def unlike_settings() -> nn.Module:
    model = Model()
    model.blocks[1].norm.eps = 0.5
    model.blocks[2].layer_idx = 2
    return model


def needs_an_argument(size: int) -> nn.Module:
    return Model(size)


def not_a_model() -> int:
    return 3


def split(tensor_parallel: int) -> nn.Module:
    sizes = config_with(hidden=512, heads=8, layers=2, vocab=1024, tensor_parallel=tensor_parallel)
    return GPT(sizes, CountedRanks(tensor_parallel))
