"""Parts of models beyond a plain transformer's: experts, latent attention, windows, state spaces.

A model's description has each part that the model has, and None for the others.
"""

from dataclasses import dataclass, field

from mistlab.values.errors import refuse
from mistlab.values.limits import (
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_WIDTH,
)
from mistlab.values.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward networks of which each token takes a few.

    There are ``count`` experts of the inner width ``ffn``, and a token goes to ``active`` of them.
    Experts that every token takes are one network of the width ``shared_ffn``. The first
    ``dense_blocks`` blocks of the model have a plain network instead, of the model's own width.
    With ``hidden`` above 0 a token is made so short before it goes to its experts, and long again
    after it came back.
    """

    count: int = field(metadata=bounded(minimum=2, most=MOST_EXPERTS))
    active: int = field(metadata=bounded(minimum=1, most=MOST_EXPERTS))
    ffn: int = field(metadata=bounded(minimum=1, most=MOST_WIDTH))
    shared_ffn: int = field(default=0, metadata=bounded(minimum=0, most=MOST_WIDTH))
    hidden: int = field(default=0, metadata=bounded(minimum=0, most=MOST_HIDDEN))
    dense_blocks: int = field(default=0, metadata=bounded(minimum=0, most=MOST_LAYERS))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.active > self.count:
            problem = f"{self.active} is more than the experts: give at most {self.count}"
            refuse("active", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, and keys with values, are made of short latent vectors.

    ``query_rank`` and ``key_rank`` are the lengths of these vectors; without a ``query_rank``
    queries are made of tokens at once. A head has ``value_dim`` channels of values. Its channels of
    queries and keys are the model's ``head_dim``; the rotated ones among them are the same for the
    keys of all heads.
    """

    query_rank: int | None = field(default=None, metadata=bounded(minimum=1, most=MOST_HIDDEN))
    key_rank: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    value_dim: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """A mixer that reads a sequence into states, in place of attention: Mamba-2's, or with
    ``delta_rule`` the one of gated delta nets.

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
            problem = f"{self.groups} does not divide heads {self.heads}: give a divisor of heads"
            refuse("groups", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window: in some blocks a token attends to the last ``size`` tokens alone.

    Every ``full_every``-th block attends to all tokens, and the blocks before it have windows; with
    0 all blocks have windows. A sequence that is no longer than the window has none.
    """

    size: int = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    full_every: int = field(default=2, metadata=bounded(minimum=0, most=MOST_LAYERS))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.full_every == 1:
            problem = "1 says that every block attends to all tokens: leave the window out"
            refuse("full_every", f"{problem}, or give 0 for windows in all blocks")
