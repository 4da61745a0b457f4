"""Models as users write them, good and bad, to be trained by plans."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(
        self, *, hidden_states: Tensor, angles: tuple[Tensor, Tensor], number: int | None = None
    ) -> tuple[Tensor, None]:
        batch, tokens, width = hidden_states.shape
        made = self.qkv(self.norm(hidden_states)).view(batch, tokens, 3, 4, width // 4)
        query, key, value = made.permute(2, 0, 3, 1, 4)
        query, key = (one * angles[0] + one.flip(-1) * angles[1] for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return hidden_states + functional.gelu(mixed) * self.gain * (1 + 0.1 * (number or 0)), None


class Decoder(nn.Module):
    """Tables of angles, blocks that take them and return tuples, parameters of its own."""

    def __init__(self, width: int = 32, layers: int = 4, vocab: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(0.1 * torch.randn(128, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for one in self.parameters():
            # A vector of zeros would have no norm, against which its error is held.
            if one.dim() == 1:
                nn.init.normal_(one, mean=1.0 if one is self.norm.weight else 0.0, std=0.1)
        angle = torch.arange(128.0)[:, None] * 0.3 ** torch.arange(width // 4)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places[: tokens.shape[1]]

    def through(self, x: Tensor) -> Tensor:
        angles = self.cosine[: x.shape[1]], self.sine[: x.shape[1]]
        for number, layer in enumerate(self.layers):
            x, _ = layer(hidden_states=x, angles=angles, number=number)
        return x

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.norm(self.through(self.embedded(tokens))))}


class WithLoss(Decoder):
    """Its loss is its own: that of every second token."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)["logits"]
        loss = functional.cross_entropy(logits[:, ::2].flatten(0, 1), targets[:, ::2].flatten())
        return logits, loss


class CodeBetween(Decoder):
    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = 2 * layer(hidden_states=x, angles=(self.cosine[:16], self.sine[:16]))[0]
        return x


class MaskOfTokens(Decoder):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        shown = (tokens > 0)[:, None, :, None].float()
        angles = self.cosine[: tokens.shape[1]] * shown, self.sine[: tokens.shape[1]]
        x = self.embedded(tokens)
        for layer in self.layers:
            x, _ = layer(hidden_states=x, angles=angles)
        return {"logits": self.head(self.norm(x))}


class Twice(Decoder):
    def through(self, x: Tensor) -> Tensor:
        return super().through(super().through(x))


class Unused(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class Drops(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


def decoder() -> nn.Module:
    return Decoder()


def wide() -> nn.Module:
    return Decoder(width=256, vocab=2048)


def with_loss(sequence_length: int) -> nn.Module:
    assert sequence_length
    return WithLoss()


def code_between() -> nn.Module:
    return CodeBetween()


def mask_of_tokens() -> nn.Module:
    return MaskOfTokens()


def twice() -> nn.Module:
    return Twice()


def unused() -> nn.Module:
    return Unused()


def drops() -> nn.Module:
    return Drops()


def tied() -> nn.Module:
    model = Decoder()
    model.head.weight = model.tokens.weight
    return model


def frozen() -> nn.Module:
    model = Decoder()
    model.norm.requires_grad_(False)
    return model
