"""Parts of a model's description: experts, latent attention, state space, window, training."""

from dataclasses import dataclass, field

from mistlab.core.values import (
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_WIDTH,
    Checked,
    bounded,
    check_fields,
    refuse,
    within,
)
from mistlab.plan.routers import PLAIN_ROUTER, Router

# The published training of a model: tokens, tokens per batch, learning rate.
#
# Predictions do not depend on it; ``python -m experiments.estimate`` uses it as a default.


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Checked):
    """The published figures of a model's training; a figure is None if it was not published."""

    billion_tokens: float | None = field(default=None, metadata=bounded(above=0))
    batch_million_tokens: float | None = field(default=None, metadata=bounded(above=0))
    learning_rate: float | None = field(default=None, metadata=bounded(above=0))

    @property
    def tokens(self) -> float | None:
        """The number of tokens on which the model was trained."""
        return None if self.billion_tokens is None else self.billion_tokens * 1e9

    @property
    def batch_tokens(self) -> float | None:
        """The number of tokens per training step."""
        return None if self.batch_million_tokens is None else self.batch_million_tokens * 1e6


# Optional parts of models that a plain transformer lacks: experts, latent attention, windows, ...
#
# A field of ``ModelSpec`` holds each part; it is None if the model lacks the part.


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: several feed-forward networks, of which each token uses a few.

    There are ``count`` experts of inner width ``ffn``, and a token uses ``active`` of them. Experts
    that every token uses form one network of width ``shared_ffn``. The first ``dense_blocks``
    blocks of the model have a plain network instead, of the model's own width. If ``hidden`` is
    above 0, a token is projected to this width before it is sent to its experts, and back
    afterwards. The ``router`` chooses the experts of a token. If ``gate_limit`` is above 0, gates
    and values of a gated network are clamped to it, and gated as in gpt-oss.
    """

    count: int = field(metadata=bounded(minimum=2, most=MOST_EXPERTS))
    active: int = field(metadata=bounded(minimum=1, most=MOST_EXPERTS))
    ffn: int = field(metadata=bounded(minimum=1, most=MOST_WIDTH))
    shared_ffn: int = field(default=0, metadata=bounded(minimum=0, most=MOST_WIDTH))
    hidden: int = field(default=0, metadata=bounded(minimum=0, most=MOST_HIDDEN))
    dense_blocks: int = field(default=0, metadata=bounded(minimum=0, most=MOST_LAYERS))
    # No cost depends on router or gate_limit: models that differ only in them are equal.
    router: Router = field(default=PLAIN_ROUTER, compare=False)
    gate_limit: float = field(default=0.0, compare=False, metadata=bounded(minimum=0, most=1e6))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.active > self.count:
            refuse(
                "active",
                f"{self.active} is above count {self.count}: give at most {self.count}",
            )
        with within("router"):
            self.router.check(self.count, self.active)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Checked):
    """Multi-head latent attention: queries, keys and values are computed from short latent vectors.

    ``query_rank`` and ``key_rank`` are the lengths of these vectors; without a ``query_rank``
    queries are made of tokens at once. A head has ``value_dim`` channels of values. Its channels of
    queries and keys are the model's ``head_dim``; the rotated ones among them are the same for the
    keys of all heads.
    """

    query_rank: int | None = field(default=None, metadata=bounded(minimum=1, most=MOST_HIDDEN))
    key_rank: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    value_dim: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """A state-space mixer in place of attention: Mamba-2, or with ``delta_rule`` a gated delta
    network.

    Each of the ``heads`` has a state of ``channels`` by ``states`` numbers. Heads of one of the
    ``groups`` share their keys and queries.
    """

    heads: int = field(metadata=bounded(minimum=1, most=MOST_HEADS))
    channels: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    groups: int = field(metadata=bounded(minimum=1, most=MOST_HEADS))
    states: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    delta_rule: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heads % self.groups:
            refuse(
                "groups",
                f"{self.groups} does not divide heads {self.heads}: give a divisor of heads",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Sliding-window attention: in some blocks a token attends only to the last ``size`` tokens.

    Every ``full_every``-th block attends to all tokens, and the blocks before it have windows; with
    0 all blocks have windows. A sequence that is no longer than the window has none.
    """

    size: int = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    full_every: int = field(default=2, metadata=bounded(minimum=0, most=MOST_LAYERS))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.full_every == 1:
            refuse(
                "full_every",
                "1 says that every block attends to all tokens: leave the window out, or "
                "give 0 for windows in all blocks",
            )
