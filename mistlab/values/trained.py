"""How a model was trained by those who published it: tokens, tokens of a batch, learning rate.

None of it changes a prediction. ``python -m experiments.estimate`` starts from it.
"""

from dataclasses import dataclass, field

from mistlab.values.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The published figures of a model's training; None where nothing was published."""

    billion_tokens: float | None = field(default=None, metadata=bounded(above=0))
    batch_million_tokens: float | None = field(default=None, metadata=bounded(above=0))
    learning_rate: float | None = field(default=None, metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tokens(self) -> float | None:
        """Tokens trained on."""
        return None if self.billion_tokens is None else self.billion_tokens * 1e9

    @property
    def batch_tokens(self) -> float | None:
        """Tokens of a step."""
        return None if self.batch_million_tokens is None else self.batch_million_tokens * 1e6
