"""The schedule, written once: the slot table of each engine, and actions as values and text.

The closed form sums the table's slots, the event simulator plays them, the runtime executes them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from mistlab.values.errors import refuse, within
from mistlab.values.plan import Engine
from mistlab.values.value import bounded, check_fields

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
    """What one stage does for one layer and one micro-batch, both counted from zero.

    Kinds: F forward, B backward, W the gradients of weights where B leaves them to it, S optimizer
    step, U parameter all-gather, R gradient reduction; P, G, O and A swap parameters, gradients,
    optimizer state and activations, in (``<``) or out (``>``) of the GPU; X send, Y receive. Layers
    count through the whole model, the embedding first and the head last; without one the action is
    of the stage as a whole.

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


# Whose kernels run: an engine's, or those of the published Mist, whose runs predictions are
# compared with and which no plan can name.
Runtime = Engine | Literal["mist"]
Stream = Literal["compute", "gpu_to_gpu", "host_to_device", "device_to_host"]
Phase = Literal["first_forward", "forward", "backward", "last_backward", "step"]
Place = Literal["ahead", "here", "behind"]
# How a stage sends activations and gradients on: all of them beside its next pass, or before it; or
# beside it each tensor-parallel rank a part of them, which the receivers gather.
Sends = Literal["overlapped", "blocking", "split"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """What a published run did otherwise than the engine here that stands for its system.

    ``step_moved`` is how many bytes a parameter its optimizer's step moved, ``runtime`` whose
    kernels ran.
    """

    sends: Sends = "overlapped"
    step_moved: int | None = None
    runtime: Runtime | None = None


NO_DEPARTURES = Departures()

# From these ZeRO levels on, gradients are reduced from buffers and weights gathered into buffers;
# below them in place.
SHARDED_GRADIENTS = 2
SHARDED_WEIGHTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of the slot table: what runs on one stream while a layer computes.

    ``place`` says for which layer: the one that computes, the one whose turn comes next (ahead) or
    the one whose turn is over (behind), as far off as prefetching reaches. ``from_zero`` is the
    lowest ZeRO level that has such a task at all.
    """

    stream: Stream
    kind: Kind
    direction: Direction | None = None
    place: Place = "here"
    from_zero: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Whose schedule it is: the slots of each phase, and how stages pass activations on.

    A layer's slot lasts until all of its tasks are done. In phases that ``overlaps`` lacks a slot's
    tasks run one after another. ``depth`` is how many layers off "ahead" and "behind" are; at 0 a
    layer's own tasks surround it, one after another. ``sends`` is how stages pass activations on.
    With ``overlaps_tensor_backward`` tensor-parallel ranks reduce the gradients of a layer's inputs
    while the gradients of its weights are computed.
    """

    runtime: Runtime
    phases: Mapping[Phase, tuple[Task, ...]]
    depth: int = 1
    sends: Sends = "overlapped"
    overlaps_tensor_backward: bool = False


def template_of(
    engine: Engine,
    *,
    overlap_communication: bool = False,
    depth: int | None = None,
    sends: Sends = "overlapped",
    runtime: Runtime | None = None,
) -> Template:
    """The slot table of an engine; ``depth`` replaces its own.

    All engines' sends are overlapped; those of some published runs were not. ``runtime`` is whose
    kernels run where they are not the engine's.
    """
    template = _TEMPLATES[runtime or engine, overlap_communication or engine == "mistlab"]
    return replace(
        template,
        depth=template.depth if depth is None else depth,
        sends=sends,
    )


_GATHER_3 = Task(stream="gpu_to_gpu", kind="U", place="ahead", from_zero=3)
_GATHER_1 = Task(stream="gpu_to_gpu", kind="U", place="ahead", from_zero=1)
_REDUCE_2 = Task(stream="gpu_to_gpu", kind="R", place="behind", from_zero=2)
_REDUCE = Task(stream="gpu_to_gpu", kind="R", place="behind")
_FORWARD = Task(stream="compute", kind="F")
_BACKWARD = Task(stream="compute", kind="B")


def _fetch(kind: Kind) -> Task:
    return Task(stream="host_to_device", kind=kind, direction="<", place="ahead")


def _evict(kind: Kind, place: Place = "behind") -> Task:
    return Task(stream="device_to_host", kind=kind, direction=">", place=place)


# The optimizer's step of a layer waits for the next iteration, just before its first forward.
_STEP_AHEAD = Task(stream="compute", kind="S", place="ahead")
_MIST = Template(
    runtime="mist",
    phases={
        "first_forward": (
            *(_STEP_AHEAD, _FORWARD, _GATHER_1, _fetch("G"), _fetch("O")),
            *(_evict("O", "here"), _evict("P", "here"), _evict("A")),
        ),
        "forward": (_FORWARD, _GATHER_3, _fetch("P"), _evict("A")),
        "backward": (
            *(_BACKWARD, _GATHER_3, _REDUCE_2, _fetch("P"), _fetch("G"), _fetch("A")),
            _evict("G"),
        ),
        "last_backward": (
            *(_BACKWARD, _GATHER_3, _REDUCE, _fetch("P"), _fetch("G"), _fetch("A")),
            _evict("G"),
        ),
        "step": (),
    },
)

_PLAIN: Mapping[Phase, tuple[Task, ...]] = {
    "first_forward": (_FORWARD, _GATHER_3),
    "forward": (_FORWARD, _GATHER_3),
    "backward": (_BACKWARD, _GATHER_3, _REDUCE_2),
}
_WHOLE_STEP = (
    Task(stream="gpu_to_gpu", kind="R"),
    Task(stream="compute", kind="S"),
    Task(stream="gpu_to_gpu", kind="U", from_zero=1),
)
# After the last backward: reduce all gradients, step, gather all weights, one after another.
_AFTERWARDS = Template(
    runtime="deepspeed",
    phases={**_PLAIN, "last_backward": _PLAIN["backward"], "step": _WHOLE_STEP},
    depth=0,
)
# Gradients are reduced during the last backward, weights gathered during the first forward.
_OVERLAPPED = Template(
    runtime="deepspeed",
    phases={
        **_PLAIN,
        "first_forward": (_FORWARD, _GATHER_1),
        "last_backward": (_BACKWARD, _GATHER_3, _REDUCE),
        "step": (Task(stream="compute", kind="S"),),
    },
)

_TEMPLATES: Mapping[tuple[Runtime, bool], Template] = {
    # StreamedRanks.all_reduce_ reduces beside the products that runtime.engine.work.products puts
    # off.
    ("mistlab", True): replace(_MIST, runtime="mistlab", overlaps_tensor_backward=True),
    ("mist", True): _MIST,
    ("megatron", False): replace(_AFTERWARDS, runtime="megatron", overlaps_tensor_backward=True),
    ("megatron", True): replace(_OVERLAPPED, runtime="megatron", overlaps_tensor_backward=True),
    ("deepspeed", False): _AFTERWARDS,
    ("deepspeed", True): _OVERLAPPED,
}
