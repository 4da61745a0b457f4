"""Lists the tasks (computation, collectives, copies) that overlap while one layer computes (slot
tables), and names single tasks (actions).

The schedule is written nowhere else: the closed form sums a table's slots, the event simulator
plays them, and the runtime executes them. Each engine has slot tables (``mistlab.engines``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from mistlab.core.values import THIS_VALUE, bounded, check_fields, refuse, within

Kind = Literal["F", "B", "W", "S", "U", "R", "P", "G", "O", "A", "X", "Y"]
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
    """A task of a stage for one layer and one micro-batch, such as ``2F.7m0``; layers and
    micro-batches are counted from 0.

    Kinds: F forward, B backward, W weight gradients (if B computes only the input's gradient), S
    optimizer step, U parameter all-gather, R gradient reduction, X send, Y receive. P, G, O and A
    swap parameters, gradients, optimizer states and activations into (``<``) or out of (``>``) the
    GPU. Layers count through the whole model, the embedding first and the head last. An action
    without a layer belongs to the whole stage.

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
            if self.direction is None:
                refuse("direction", f"missing for the swap {self.kind}: give < (in) or > (out)")
            refuse(
                "direction",
                f"{self.direction!r} given for {self.kind}, which is not a swap: leave it out",
            )

    @property
    def of_pass(self) -> tuple[Kind, int]:
        """The kind and the micro-batch of this task, which identify its pass if the task is a
        computation.
        """
        return self.kind, self.micro_batch

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        return f"{self.stage}{self.kind}{self.direction or ''}{layer}m{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an action from a text such as ``2F.7m0``."""
        with within(f"action {text!r}"):
            return cls(**_parts(text))


def _parts(text: str) -> dict[str, Any]:
    match = _TEXT.fullmatch(text)
    if match is None:
        refuse(
            THIS_VALUE, "is not stage, kind, layer and micro-batch: write it like 2F.7m0 or 2O<.8m0"
        )
    layer = match["layer"]
    return {
        "stage": int(match["stage"]),
        "kind": match["kind"],
        "direction": match["direction"] or None,
        "layer": None if layer is None else int(layer),
        "micro_batch": int(match["micro_batch"]),
    }


Stream = Literal["compute", "gpu_to_gpu", "host_to_device", "device_to_host"]
Phase = Literal["first_forward", "forward", "backward", "last_backward", "step"]
Place = Literal["ahead", "here", "behind"]
# How a stage sends activations and gradients. "overlapped": its next pass runs meanwhile.
# "blocking": its next pass waits for the send. "meeting": its next pass waits, and the receiver
# computes nothing meanwhile either. "split": its next pass runs meanwhile, and each tensor-parallel
# rank sends a part, which the receivers gather.
Sends = Literal["overlapped", "blocking", "meeting", "split"]
IN_TURN: tuple[Sends, ...] = ("blocking", "meeting")
PHASES: tuple[Phase, ...] = get_args(Phase)


# The lowest ZeRO levels that shard gradients (2) and weights (3). Sharded gradients are reduced
# from ring buffers; sharded weights are gathered into ring buffers.
SHARDED_GRADIENTS = 2
SHARDED_WEIGHTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of a slot table: a task that runs on one stream while a layer computes.

    ``place`` says which layer the task is for: the one that computes ("here"), one that computes
    later ("ahead"), or one that has computed ("behind"). ``from_zero`` is the lowest ZeRO level
    with this task.
    """

    stream: Stream
    kind: Kind
    direction: Direction | None = None
    place: Place = "here"
    from_zero: int = 0

    @property
    def name(self) -> str:
        """The task's kind and direction, such as F (forward), P< (weights are fetched) or A>
        (activations are offloaded).
        """
        return f"{self.kind}{self.direction or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A slot table: for each phase of an iteration, the tasks that overlap while one layer
    computes; and how stages send to one another.

    A layer's time slot lasts until all of its tasks are done. Besides those of the computing layer
    it has tasks of the layers that compute ``depth`` slots later ("ahead") and earlier ("behind").
    With depth 0 all tasks of a slot are for one layer, and run one after another. With
    ``overlaps_tensor_backward`` tensor-parallel ranks reduce the gradient of a layer's input while
    they compute the gradients of its weights.
    """

    phases: Mapping[Phase, tuple[Task, ...]]
    depth: int = 1
    send_wait_s: float = 0.0
    sends: Sends = "overlapped"
    overlaps_tensor_backward: bool = False

    def __hash__(self) -> int:
        # A mapping has no hash, but its items do.
        return hash((frozenset(self.phases.items()), self.depth, self.sends))


# The tasks that each engine's slot tables combine (``mistlab.engines``).
FORWARD = Task(stream="compute", kind="F")
BACKWARD = Task(stream="compute", kind="B")
# All-gathers of weights: for every pass if weights are sharded (ZeRO-3), or once after the
# optimizer step if only optimizer states are (ZeRO-1 and 2).
GATHER_SHARDED = Task(stream="gpu_to_gpu", kind="U", place="ahead", from_zero=SHARDED_WEIGHTS)
GATHER_STEPPED = Task(stream="gpu_to_gpu", kind="U", place="ahead", from_zero=1)
# Reductions of gradients: after every backward pass if gradients are sharded (ZeRO-2 and 3),
# otherwise in the last backward pass only.
REDUCE_SHARDED = Task(stream="gpu_to_gpu", kind="R", place="behind", from_zero=SHARDED_GRADIENTS)
REDUCE = Task(stream="gpu_to_gpu", kind="R", place="behind")


def fetch(kind: Kind) -> Task:
    """A task that copies weights, gradients, optimizer states or activations (by ``kind``) from the
    host, for a layer that computes later.
    """
    return Task(stream="host_to_device", kind=kind, direction="<", place="ahead")


def evict(kind: Kind, at: Place = "behind") -> Task:
    """A task that copies weights, gradients, optimizer states or activations (by ``kind``) to the
    host.

    ``at`` says which layer they belong to: by default one that has computed.
    """
    return Task(stream="device_to_host", kind=kind, direction=">", place=at)
