"""One task of a schedule as a value that prints as text and parses back."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from mistlab.errors import refuse, within
from mistlab.value import bounded, check_fields

Kind = Literal["F", "B", "S", "U", "R", "P", "G", "O", "A", "X", "Y", "E", "H"]
Direction = Literal["<", ">"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SWAP_KINDS: frozenset[Kind] = frozenset({"P", "G", "O", "A"})

_NUMBER = "0|[1-9][0-9]*"
_TEXT = re.compile(
    rf"(?P<stage>{_NUMBER})(?P<kind>[A-Za-z]+)(?P<direction>[<>]?)"
    rf"(?:\.(?P<layer>{_NUMBER}))?m(?P<micro_batch>{_NUMBER})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What one stage does for one layer and one micro-batch, both counted from zero.

    Kinds: F forward, B backward, S optimizer step, U parameter all-gather, R gradient reduction;
    P, G, O and A swap parameters, gradients, optimizer state and activations, in (``<``) or out
    (``>``) of the GPU; X send, Y receive, E embedding, H head and loss. Layers count through the
    whole model; without one the action is of the stage as a whole.

    >>> str(Action(stage=2, kind="F", layer=7, micro_batch=0))
    '2F.7m0'
    >>> Action.parse("2O<.8m0").direction
    '<'
    """

    stage: int = field(metadata=bounded(minimum=0))
    kind: Kind
    direction: Direction | None = None
    layer: int | None = field(default=None, metadata=bounded(minimum=0))
    micro_batch: int = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.direction is not None) != (self.kind in SWAP_KINDS):
            problem = (
                f"missing for the swap {self.kind}: give < (in) or > (out)"
                if self.direction is None
                else f"{self.direction!r} given for {self.kind}, which is no swap: leave it out"
            )
            refuse("direction", problem)

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        return f"{self.stage}{self.kind}{self.direction or ''}{layer}m{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action that prints as this text."""
        with within(f"action {text!r}"):
            return cls(**_parts(text))


def _parts(text: str) -> dict[str, Any]:
    match = _TEXT.fullmatch(text)
    if match is None:
        problem = "is not stage, kind, layer and micro-batch: write it like 2F.7m0 or 2O<.8m0"
        refuse("", problem)
    layer = match["layer"]
    return {
        "stage": int(match["stage"]),
        "kind": match["kind"],
        "direction": match["direction"] or None,
        "layer": None if layer is None else int(layer),
        "micro_batch": int(match["micro_batch"]),
    }
