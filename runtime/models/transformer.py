"""A transformer: embedding, blocks, head with loss.

The three parts are separate modules, so that a pipeline stage can hold some of them and a trace can
tell them apart. Families of decoders and encoders differ only in their ``Structure``.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.attention import Attention, PartedAttention, RotaryTables
from runtime.models.config import NOT_HIDDEN, ModelConfig, Structure
from runtime.models.dropout import FIRST_HALF, SECOND_HALF, Dropout
from runtime.models.experts import CORRECTION, Experts
from runtime.models.latent_attention import Down, LatentAttention
from runtime.models.operators import LayerNorm, RMSNorm, SwiGLU
from runtime.models.parallel import (
    ColumnLinear,
    LookUp,
    LossOfTokens,
    RowLinear,
    VocabularyEmbedding,
    eager_losses,
    enter,
    leave,
    vectors_of,
    whole_columns,
    without,
)
from runtime.models.ranks import CountedRanks, OneRank, TensorParallel, bare, construction
from runtime.models.residuals import added, added_and_normed, is_plain, normed_beside
from runtime.models.state_space import SquaredRelu, StateSpace
from runtime.models.wide_attention import CurrentDocuments

# The weight of the mean multi-token prediction loss, as DeepSeek V3 used in two thirds of its
# training (arXiv 2412.19437, section 4.2).
FURTHER_SHARE = 0.3
_gate = bare(SwiGLU)


class MLP(nn.Module):
    """The feed-forward network of a block: two GEMMs around an activation. In a gated network the
    first GEMM computes gates and values.
    """

    def __init__(self, config: ModelConfig, structure: Structure, ranks: TensorParallel) -> None:
        super().__init__()
        widths = (config.ffn, config.ffn) if structure.gated_mlp else (config.ffn,)
        self.structure = structure
        self.gelu: Callable[[Tensor, str], Tensor] = _gelu
        self.up = ColumnLinear(
            config.hidden, widths, ranks, biases=config.biases, dtype=config.dtype
        )
        self.down = RowLinear(
            config.ffn, config.hidden, ranks, biases=config.biases, dtype=config.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """The network's output for each token; input and output are (batch, sequence, hidden)."""
        return self.down(self._activated(self.up(x)))

    def _activated(self, inner: Tensor) -> Tensor:
        """The input of the second GEMM. No variable keeps the first GEMM's output in memory while
        the second GEMM runs.
        """
        if self.structure.gated_mlp:
            gated: Tensor = _gate(inner)
            return gated
        if self.structure.activation == "relu2":
            made: Tensor = SquaredRelu.apply(inner, None)
            return made
        if self.structure.activation == "silu":
            return nn.functional.silu(inner)
        return self.gelu(inner, "tanh" if self.structure.activation == "gelu_tanh" else "none")


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return nn.functional.gelu(x, approximate=approximate)


class Embedding(nn.Module):
    """The embedding of tokens, plus learned position embedding if the structure has it."""

    def __init__(self, config: ModelConfig, structure: Structure, ranks: TensorParallel) -> None:
        super().__init__()
        self.ranks = ranks
        self.tokens = VocabularyEmbedding(config.vocab, config.hidden, ranks, config.dtype)
        self.positions: nn.Parameter | None = None
        if structure.position == "absolute":
            shape = (config.positions, config.hidden)
            self.positions = nn.Parameter(torch.empty(*shape, dtype=config.dtype))
        # The positions of this rank's tokens, where its part of a sequence is not contiguous; else
        # None.
        self.places: Tensor | None = None
        # The documents packed into each sequence; None for whole sequences.
        self.packed: CurrentDocuments | None = None
        self.norm: nn.Module | None = None
        if structure.encoder:
            self.norm = LayerNorm(config.hidden, config.dtype)
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors (batch, sequence, hidden) of ``tokens`` (batch, sequence); under sequence
        parallelism only for this rank's part of each sequence.
        """
        x = self.tokens(tokens)
        if self.positions is not None:
            first = self.ranks.rank * x.shape[1] if self.ranks.splits_tokens else 0
            span = slice(first, first + x.shape[1])
            if self.packed is not None and self.packed.now is not None:
                places = self.packed.now.positions[:, span]
                x = x + PositionRows.apply(self.positions, places)
            elif self.places is None:
                x = x + self.positions[span]
            else:
                x = x + self.positions.index_select(0, self.places[span])
        return self.dropout(x if self.norm is None else self.norm(x))


class PositionRows(torch.autograd.Function):
    """Autograd function of learned position embedding in packed documents, from each token's
    position (B, S) in its document; refers only to the positions, which the micro-batch holds
    anyway.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, places: Tensor) -> Tensor:
        """The position embedding (B, S, hidden) of each token: rows of the table."""
        ctx.places, ctx.rows = places, len(table)
        return table[places]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of the table of learned positions."""
        of_table = gradient.new_zeros(ctx.rows, gradient.shape[-1])
        return of_table.index_add_(0, ctx.places.flatten(), gradient.flatten(0, 1)), None


class RealLosses(torch.autograd.Function):
    """Autograd function that sets losses of tokens (T) without a target to 0; refers only to the
    targets, which the micro-batch holds anyway.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token, 0 for tokens without a target."""
        ctx.targets = targets
        return losses * (targets.flatten() != NOT_HIDDEN)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of each token's loss, 0 for tokens without a target."""
        return gradient * (ctx.targets.flatten() != NOT_HIDDEN), None


class Block(nn.Module):
    """Transformer block: attention and feed-forward network, each added to the residual, one after
    the other or in parallel.

    In parallel, attention and network share one norm and one sum over ranks. A state-space mixer
    may take the place of attention. Experts may take the place of the network; a network that all
    tokens take (shared experts) may run beside them. Hybrid models have blocks with only a mixer,
    and blocks with only a network. In an encoder norms follow the residual sums.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        super().__init__()
        norm = LayerNorm if structure.norm == "layernorm" else RMSNorm
        self.ranks = ranks
        self.encodes = structure.encoder
        self.attention: Attention | LatentAttention | StateSpace | None = None
        self.mlp_norm: nn.Module | None = None
        # Norms of the outputs of attention and of the network; None in models without such norms.
        self.attention_post_norm: nn.Module | None = None
        self.mlp_post_norm: nn.Module | None = None
        self.mlp: MLP | None = None
        self.experts: Experts | None = None
        self.shared: MLP | None = None
        if structure.mixes:
            self.attention_norm = norm(config.hidden, config.dtype)
            self.attention = _mixer(config, structure, ranks, rotary)
        if structure.has_network:
            if not structure.parallel_block:
                self.mlp_norm = norm(config.hidden, config.dtype)
            if structure.experts:
                self.experts = Experts(config, structure, ranks)
            else:
                self.mlp = MLP(config, structure, ranks)
        if structure.post_norms:
            self.attention_post_norm = norm(config.hidden, config.dtype)
            self.mlp_post_norm = norm(config.hidden, config.dtype)
        if structure.shared_experts:
            self.shared = MLP(dataclasses.replace(config, ffn=config.shared_ffn), structure, ranks)
        self.dropout = Dropout(config.dropout)
        # Whether residual additions are fused with norms (``runtime.models.residuals``).
        self.fuses = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; input and output are (batch, sequence, hidden)."""
        if self.encodes:
            return self._encoded(x)
        if self.attention is None:
            assert self.mlp_norm is not None
            return self._through_network(*self._normed(x, self.mlp_norm))
        x, inner = self._normed(x, self.attention_norm)
        if not isinstance(self.attention, LatentAttention):
            inner = enter(inner, self.ranks)
        bias = self.attention.output.bias
        if self.mlp is not None and self.mlp_norm is None:
            biases = bias, self.mlp.down.bias
            return self._added(
                x, leave(self.attention(inner) + self.mlp(inner), self.ranks), biases
            )
        # No variable refers to attention's output, which would stay in memory until the block ends.
        post = self.attention_post_norm
        if self.mlp_norm is None:
            return self._added(x, leave(self.attention(inner), self.ranks), (bias,), post=post)
        return self._through_network(
            *self._added_and_normed(
                x, leave(self.attention(inner), self.ranks), bias, self.mlp_norm, post=post
            )
        )

    def _encoded(self, x: Tensor) -> Tensor:
        assert isinstance(self.attention, Attention)
        assert self.mlp is not None
        assert self.mlp_norm is not None
        bias = self.attention.output.bias
        made = leave(self.attention(enter(x, self.ranks)), self.ranks)
        x = self._added_and_normed(x, made, bias, self.attention_norm)[1]
        bias, made = self.mlp.down.bias, leave(self.mlp(enter(x, self.ranks)), self.ranks)
        return self._added_and_normed(x, made, bias, self.mlp_norm, mask=SECOND_HALF)[1]

    def _through_network(self, x: Tensor, inner: Tensor) -> Tensor:
        """The residual ``x`` plus the output of the network, or of the experts, for ``inner``, the
        residual's norm.
        """
        post = self.mlp_post_norm
        if self.mlp is not None:
            # The network's output is not assigned to a variable, which would keep it in memory.
            biases = (self.mlp.down.bias,)
            return self._added(
                x,
                leave(self.mlp(enter(inner, self.ranks)), self.ranks),
                biases,
                post=post,
                mask=SECOND_HALF,
            )
        assert self.experts is not None
        made = self.experts(inner)
        if self.shared is not None:
            of_all = leave(self.shared(enter(inner, self.ranks)), self.ranks)
            bias = self.shared.down.bias
            made = made + (of_all if bias is None else of_all + bias)
        if post is not None:
            made = post(made)
        if self.fuses and self.dropout.is_drawn:
            return added(x, made, None, self.dropout.drawn(SECOND_HALF))
        made = self.dropout(made, SECOND_HALF)
        return x + made

    def _normed(self, x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """The residual unchanged, and its norm."""
        if self.fuses and is_plain(norm):
            return normed_beside(x, norm)
        return x, norm(x)

    def _added(
        self,
        x: Tensor,
        part: Tensor,
        biases: Sequence[Tensor | None],
        *,
        post: nn.Module | None = None,
        mask: int = FIRST_HALF,
    ) -> Tensor:
        """The residual ``x`` plus a branch's output ``part`` (already summed over ranks), after
        biases, norm ``post`` and dropout.
        """
        part, bias = self._biased(part, biases, post)
        if self.fuses and self.dropout.is_drawn:
            return added(x, part, bias, self.dropout.drawn(mask))
        # No variable refers to the branch's output before dropout, so its memory can be freed.
        part = self.dropout(part if bias is None else part + bias, mask)
        return x + part

    def _added_and_normed(
        self,
        x: Tensor,
        part: Tensor,
        bias: Tensor | None,
        norm: nn.Module,
        *,
        post: nn.Module | None = None,
        mask: int = FIRST_HALF,
    ) -> tuple[Tensor, Tensor]:
        """The residual sum that ``_added`` makes, and the norm of the sum."""
        part, bias = self._biased(part, (bias,), post)
        if self.fuses and is_plain(norm) and self.dropout.is_drawn:
            return added_and_normed(x, part, bias, self.dropout.drawn(mask), norm)
        part = self.dropout(part if bias is None else part + bias, mask)
        x = x + part
        # No variable refers to the branch's output after the addition, so its memory can be freed.
        del part
        return x, norm(x)

    def _biased(
        self, part: Tensor, biases: Sequence[Tensor | None], post: nn.Module | None
    ) -> tuple[Tensor, Tensor | None]:
        """A branch's output with biases and norm applied, and None; or the output as it is, and the
        bias that a fused operator will add.
        """
        given = [one for one in biases if one is not None]
        if self.fuses and post is None:
            return part, sum(given[1:], start=given[0]) if given else None
        for bias in given:
            part = part + bias
        return part if post is None else post(part), None


def let_fuse(module: nn.Module) -> None:
    """Let a module's blocks fuse residual additions with the norms that follow."""
    for layer in module.modules():
        if isinstance(layer, Block):
            layer.fuses = True


def _mixer(
    config: ModelConfig,
    structure: Structure,
    ranks: TensorParallel,
    rotary: RotaryTables | None,
) -> Attention | LatentAttention | StateSpace:
    if structure.state_space:
        return StateSpace(config, structure, ranks)
    if structure.latent:
        assert rotary is not None, "latent attention rotates a part of its keys"
        return LatentAttention(config, structure, ranks, rotary)
    if structure.qk_norm or structure.sinks or structure.window:
        return PartedAttention(config, structure, ranks, rotary)
    return Attention(config, ranks, rotary, sees_all=structure.encoder)


def with_further(targets: Tensor, tokens: int) -> Tensor:
    """Targets (batch, sequence), stacked with the targets of 1, 2, .. ``tokens`` positions further
    on: (1 + tokens, batch, sequence); -1 beyond the end of a sequence.
    """
    pad = nn.functional.pad
    return torch.stack([pad(targets[:, k:], (0, k), value=-1) for k in range(tokens + 1)])


class FurtherHead(nn.Module):
    """A head that predicts one token further (multi-token prediction, as in DeepSeek V3, arXiv
    2412.19437).

    Two vectors are normalised: the previous head's result and the embedding of the next token. A
    GEMM joins them, and a block follows. The block's result passes a norm of this head, and then
    the model's output projection.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        super().__init__()
        norm = LayerNorm if structure.norm == "layernorm" else RMSNorm
        self.ranks = ranks
        self.norm, self.token_norm, self.last_norm = (
            norm(config.hidden, config.dtype) for _ in range(3)
        )
        self.joint = ColumnLinear(
            2 * config.hidden, (config.hidden,), ranks, biases=False, dtype=config.dtype
        )
        self.block = Block(config, structure, ranks, rotary)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """The input of this head's last norm, from the previous head's result ``x`` and the next
        tokens' embedding ``vectors``.
        """
        both = torch.cat([self.norm(x), self.token_norm(vectors)], -1)
        joint = self.joint(enter(both, self.ranks))
        made: Tensor = self.block(whole_columns(joint, self.ranks))
        return made


class RunAgain(torch.autograd.Function):
    """Autograd function that recomputes: it saves only ``x``, and runs a function of ``x`` and
    further arguments again in the backward pass, where gradients of parameters are accumulated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """The output of the function that the backward pass runs again."""
        ctx.save_for_backward(x)
        ctx.function, ctx.others = function, others
        return function(x, *others)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the saved input ``x``, after the function has run again."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.function(x, *ctx.others)
        torch.autograd.backward(made, gradient)
        return x.grad, None, *(None for _ in ctx.others)


class Head(nn.Module):
    """The head of a model: final norm, output projection to the vocabulary, and loss.

    Heads in ``further`` predict later tokens; they share the output projection, and look up tokens
    in ``table`` (with tied embeddings, the projection's matrix). Their mean loss is weighted by
    ``FURTHER_SHARE``. An encoder's head has a dense layer before the norm, and a loss only for the
    tokens that were masked: targets of other tokens are ``NOT_HIDDEN``.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel,
        tied: nn.Parameter | None = None,
        further: Sequence[FurtherHead] = (),
    ) -> None:
        super().__init__()
        norm = LayerNorm if structure.norm == "layernorm" else RMSNorm
        self.transform: Down | None = None
        if structure.encoder:
            self.transform = Down(config.hidden, config.hidden, config.dtype, biases=True)
        self.norm = norm(config.hidden, config.dtype)
        self.ranks = ranks
        self.unused, self.length = config.unused_vocab, config.positions
        self.look_up: LookUp = nn.functional.embedding
        # The number of tokens per chunk of logits; None for all tokens at once.
        self.chunk_tokens: int | None = None
        self.loss: LossOfTokens = eager_losses
        # The documents packed into each sequence; None for whole sequences.
        self.packed: CurrentDocuments | None = None
        self.further = nn.ModuleList(further)
        self.table: VocabularyEmbedding | None = None
        if further and not config.tied_embeddings:
            self.table = VocabularyEmbedding(config.vocab, config.hidden, ranks, config.dtype)
        self.projection = ColumnLinear(
            config.hidden, (config.vocab,), ranks, biases=False, dtype=config.dtype
        )
        if tied is not None:
            self.projection.weight = tied

    def logits(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """This rank's slice of the logits; minus infinity for padding tokens of the vocabulary."""
        return without(self._product(x, norm or self.norm), self.ranks, self.unused)

    def _product(self, x: Tensor, norm: nn.Module) -> Tensor:
        if self.transform is not None:
            x = nn.functional.gelu(self.transform(x))
        made: Tensor = self.projection(enter(norm(x), self.ranks))
        return made

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss against ``targets`` (batch, sequence), or all logits without targets. With
        multi-token heads ``with_further`` makes the targets. In packed sequences the mean is over
        all positions, with loss 0 for positions without a target.
        """
        if targets is None:
            return self.ranks.all_gather(self.logits(x))
        if self.transform is not None:
            losses = self._losses(x, self.norm, targets)
            hidden = targets.flatten() != NOT_HIDDEN
            return (losses * hidden).sum() / hidden.sum()
        if self.packed is not None and self.packed.now is not None:
            losses = RealLosses.apply(self._losses(x, self.norm, targets), targets)
            return losses.mean()
        if not self.further:
            return self._losses(x, self.norm, targets).mean()
        loss = self._losses(x, self.norm, targets[0]).mean()
        for number, head in enumerate(self.further, start=1):
            assert isinstance(head, FurtherHead)
            x = head(x, self._vectors(targets[number - 1]))
            ahead = targets[number]
            losses = self._losses(x, head.last_norm, ahead) * (ahead.flatten() >= 0)
            # The last ``number`` tokens of a sequence have no target so far ahead: the mean is over
            # the other tokens.
            share = self.length / (self.length - number)
            loss = loss + losses.mean() * (share * FURTHER_SHARE / len(self.further))
        return loss

    def _losses(self, x: Tensor, norm: nn.Module, targets: Tensor) -> Tensor:
        if self.chunk_tokens is None:
            return self._losses_at_once(x, norm, targets)
        # Under sequence parallelism, a chunk takes tokens from each rank's part of each sequence.
        parts = self.ranks.size if self.ranks.splits_tokens else 1
        rows, length = x.shape[:2]
        each = max(1, self.chunk_tokens // (rows * parts)) if parts > 1 else self.chunk_tokens
        if parts == 1:
            x, targets = x.reshape(1, rows * length, -1), targets.reshape(1, -1)
        places = targets.unflatten(1, (parts, -1))
        chunks = zip(x.split(each, 1), places.split(each, 2), strict=True)

        def losses_of(tokens: Tensor, of_chunk: Tensor) -> Tensor:
            losses = self._losses_at_once(tokens, norm, of_chunk.flatten(1))
            return losses.view(of_chunk.shape)

        made = [RunAgain.apply(tokens, losses_of, of_chunk) for tokens, of_chunk in chunks]
        return torch.cat(made, 2).flatten()

    def _losses_at_once(self, x: Tensor, norm: nn.Module, targets: Tensor) -> Tensor:
        logits = self._product(x, norm).flatten(0, 1)
        return self.loss(logits, targets.flatten(), self.ranks, self.unused)

    def _vectors(self, tokens: Tensor) -> Tensor:
        weight = self.projection.weight if self.table is None else self.table.weight
        return vectors_of(tokens, weight, self.ranks, self.look_up)


class Transformer(nn.Module):
    """A transformer on one tensor-parallel rank: embedding, ``config.layers`` blocks and head.

    All blocks have the model's ``structure``, unless ``blocks`` gives each its own. The heads that
    predict ``further_tokens`` have a block like the model's last block. Parameters are not
    initialised here; the code that builds a model for training fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel | None = None,
        *,
        blocks: Sequence[Structure] = (),
        further_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.further_tokens = further_tokens
        if ranks is None:
            split = config.tensor_parallel
            ranks = OneRank() if isinstance(split, int) and split == 1 else CountedRanks(split)
        self.config = config
        with construction(getattr(config, field.name) for field in dataclasses.fields(config)):
            self._build(structure, ranks, blocks or (structure,) * config.layers)

    def _build(
        self, structure: Structure, ranks: TensorParallel, blocks: Sequence[Structure]
    ) -> None:
        config = self.config
        rotary = None
        if structure.position == "rotary":
            rotary = RotaryTables(config)
        self.embedding = Embedding(config, structure, ranks)
        self.blocks = nn.ModuleList(Block(config, one, ranks, rotary) for one in blocks)
        tied = self.embedding.tokens.weight if config.tied_embeddings else None
        further = [
            FurtherHead(config, blocks[-1], ranks, rotary) for _ in range(self.further_tokens)
        ]
        self.head = Head(config, structure, ranks, tied, further)
        if self.head.table is not None:
            self.head.table.weight = self.embedding.tokens.weight

    def named_corrections(self) -> Iterator[tuple[str, Tensor]]:
        """The bias that corrects the scores of each router, by name. They are buffers without
        gradients.
        """
        for name, buffer in self.named_buffers():
            if name.endswith(CORRECTION):
                yield name, buffer

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss, or the logits if ``targets`` is None."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if targets is not None and self.further_tokens:
            targets = with_further(targets, self.further_tokens)
        return self.head(x, targets)
