"""Writes the named orders of a pipeline's passes (pipeline schedules): 1F1B, GPipe, interleaved
1F1B, zero-bubble and V-shaped orders.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import lcm

from mistlab.core.values import refuse
from mistlab.schedule.order_text import placement_line
from mistlab.schedule.placement import turning

# Writes pipeline orders in which the model's parts lie in a V: micro-batches pass down the stages
# to the last one and back up to the first.


# The numbers of a stage's two chunks in a V: micro-batches pass the first on their way to the last
# stage, the second on their way back.
DOWN, UP = 0, 1


def zb_v_text(num_stages: int, micro_batches: int) -> str:
    """The order file for ZB-V (zero bubbles, two chunks per stage in a V).

    ZB-V (Qi et al. 2023) assumes that F, B and W take equally long: then no stage stalls between
    its first pass and its last, and each stage has as many micro-batches in flight as the first
    stage of 1F1B.

    If there are too few micro-batches to fill the pipeline, the passes of the missing ones are left
    out.

    >>> print(zb_v_text(1, 2), end="")
    F0m0 F1m0 B1m0 W1m0 F0m1 B0m0 W0m0 F1m1 B1m1 W1m1 B0m1 W0m1
    """
    taken = max(2 * num_stages - 1, micro_batches)
    lines = [_zb_v(num_stages, stage, taken) for stage in range(num_stages)]
    return placed_text(num_stages, [line.words(micro_batches) for line in lines])


def dualpipe_v_text(num_stages: int, micro_batches: int) -> str:
    """The order file for DualPipeV, which needs at least as many micro-batches as the model has
    parts.

    DualPipeV (DeepSeek 2025) is one half of DualPipe, in which micro-batches enter at both ends: in
    the steady state, a stage alternates forward passes of one chunk with whole backward passes of
    the other.

    >>> print(dualpipe_v_text(1, 2), end="")
    F0m0 F1m0 F0m1 B1m0 W1m0 F1m1 B0m0 W0m0 B1m1 W1m1 B0m1 W0m1
    """
    lines = [_dualpipe_v(num_stages, stage, micro_batches) for stage in range(num_stages)]
    return placed_text(num_stages, [line.words(micro_batches) for line in lines])


@dataclass(slots=True)
class _Line:
    """The passes of one stage in order, to which passes are added one by one.

    An added pass takes the next micro-batch for its kind and chunk.

    ``later`` are the weight gradients that are postponed, as chunks and micro-batches.
    """

    passes: list[tuple[str, int, int]] = field(default_factory=list)
    later: list[tuple[int, int]] = field(default_factory=list)
    done: Counter[tuple[str, int]] = field(default_factory=Counter)

    def forward(self, chunk: int) -> None:
        self._next("F", chunk)

    def backward(self, chunk: int, *, whole: bool = True) -> None:
        """Add a backward pass of a chunk.

        Unless it is ``whole``, its weight gradients are computed in a later pass.
        """
        micro_batch = self._next("B", chunk)
        if whole:
            self.passes.append(("W", chunk, micro_batch))
        else:
            self.later.append((chunk, micro_batch))

    def weights(self) -> None:
        """Add the weight-gradient pass (W) that has waited longest, if any waits."""
        if self.later:
            self.passes.append(("W", *self.later.pop(0)))

    def words(self, micro_batches: int) -> list[str]:
        """The words of an order file for all passes of the first ``micro_batches``
        micro-batches.
        """
        return [f"{kind}{chunk}m{m}" for kind, chunk, m in self.passes if m < micro_batches]

    def _next(self, kind: str, chunk: int) -> int:
        micro_batch = self.done[kind, chunk]
        self.done[kind, chunk] += 1
        self.passes.append((kind, chunk, micro_batch))
        return micro_batch


def _zb_v(stages: int, stage: int, micro_batches: int) -> _Line:
    line, after = _Line(), stages - stage
    # Micro-batches enter this stage until the first one is back from the last stage.
    for _ in range(2 * after - 1):
        line.forward(DOWN)
    for _ in range(stage):
        line.forward(UP)
        line.forward(DOWN)
    for _ in range(after):
        line.forward(UP)
        line.backward(UP)
    while line.done["F", UP] < micro_batches:
        if line.done["F", DOWN] < micro_batches:
            line.forward(DOWN)
        line.backward(DOWN)
        line.forward(UP)
        line.backward(UP)
    # The remaining backward passes run as early as possible, so their weight gradients come later.
    for _ in range(stage):
        line.backward(DOWN, whole=False)
        line.backward(UP, whole=False)
    for _ in range(after):
        line.backward(DOWN, whole=False)
        put_off = min(m for chunk, m in line.later if chunk == DOWN)
        line.later.remove((DOWN, put_off))
        line.passes.append(("W", DOWN, put_off))
    # Weight gradients of the chunk that micro-batches pass on their way back (``UP``) come first.
    line.later.sort(key=lambda one: (-one[0], one[1]))
    while line.later:
        line.weights()
    return line


def _dualpipe_v(stages: int, stage: int, micro_batches: int) -> _Line:
    line, after = _Line(), stages - stage - 1
    for _ in range(2 * after):
        line.forward(DOWN)
    for _ in range(stage + 1):
        line.forward(DOWN)
        line.forward(UP)
    for _ in range(after):
        line.backward(UP, whole=False)
        line.weights()
        line.forward(UP)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        line.forward(DOWN)
        line.backward(UP)
        line.forward(UP)
        line.backward(DOWN)
    for _ in range(after):
        line.backward(UP)
        line.forward(UP)
        line.backward(DOWN)
    # In the first half of the remaining backward passes weight gradients are computed at once, in
    # the second half later.
    first = 2 * ((stage + 1) // 2) + 1 - stage % 2
    for number in range(stage + 1):
        line.backward(UP, whole=2 * number < first)
        line.backward(DOWN, whole=2 * number + 1 < first)
    for _ in range(after):
        line.weights()
        line.backward(DOWN, whole=False)
    while line.later:
        line.weights()
    return line


def placed_text(num_stages: int, lines: Sequence[Sequence[str]]) -> str:
    """The order file for stages with two chunks in a V; ``lines`` has the words of each stage's
    passes.
    """
    placement = turning(num_stages)
    placed = [] if placement.is_loop else [placement_line(placement)]
    return "".join(f"{line}\n" for line in (*placed, *map(" ".join, lines)))


# Writes the orders V-Half and V-Min, which hold about half or a third of 1F1B's activations (Qi et
# al. 2024, "Pipeline Parallelism with Controllable Memory").


# The units of time that a micro-batch takes on each stage: one for each pass, F, B and W of two
# chunks.
PERIOD = 6
# The four passes of a micro-batch on a stage, in the order in which a function ``Block`` gives
# their start times.
PASSES = (("F", DOWN), ("F", UP), ("B", UP), ("B", DOWN))

# A function that gives the start times of a micro-batch's four passes on a stage, in units of equal
# length, from the number of stages and the stage's number.
Block = Callable[[int, int], tuple[int, int, int, int]]


def half(stages: int, stage: int) -> tuple[int, int, int, int]:
    """The start times of the first micro-batch's four passes on a stage under V-Half.

    A pass starts two time units after the previous stage's, or one after the next stage's.

    >>> [half(2, stage) for stage in range(2)]
    [(0, 4, 8, 13), (2, 3, 10, 12)]
    """
    # Without this shift, two passes of a stage would start at the same time.
    shift = 3 * (stages % 2 == 0)
    return (
        2 * stage,
        3 * stages - stage - 2,
        3 * stages + shift + 2 * stage - 1,
        6 * stages + shift - stage - 2,
    )


def least(stages: int, stage: int) -> tuple[int, int, int, int]:
    """The start times of the first micro-batch's four passes on a stage under V-Min.

    Every pass takes one time unit per stage.

    >>> [least(2, stage) for stage in range(2)]
    [(0, 3, 4, 7), (1, 2, 5, 6)]
    """
    shift = 2 * (stages % 3 == 0)
    return (
        stage,
        2 * stages - stage - 1,
        2 * stages + shift + stage,
        4 * stages + shift - stage - 1,
    )


def controlled_text(num_stages: int, micro_batches: int, *, block: Block) -> str:
    """The order file in which each micro-batch repeats the passes of the one before, six time units
    later.

    Qi et al. (2024) repeat a building block: the four passes of a micro-batch on a stage (F and B
    of both chunks) start at given times. The fewer time units a block spans on the fullest stage,
    the fewer micro-batches are in flight there. Two of six units are left for W, the weight
    gradients, which here run as soon as a unit is free. A stage runs its passes in the order of
    their times, each as soon as possible.

    >>> print(controlled_text(1, 2, block=least), end="")
    F0m0 F1m0 B1m0 B0m0 W1m0 W0m0 F0m1 F1m1 B1m1 B0m1 W1m1 W0m1
    """
    blocks = [block(num_stages, stage) for stage in range(num_stages)]
    return placed_text(num_stages, [_words(slots, micro_batches) for slots in blocks])


def _words(slots: tuple[int, int, int, int], micro_batches: int) -> list[str]:
    """The words of an order file for a stage's passes by start time; weight-gradient passes (W)
    fill the gaps.
    """
    taken = {
        slot + PERIOD * micro_batch: (kind, chunk, micro_batch)
        for (kind, chunk), slot in zip(PASSES, slots, strict=True)
        for micro_batch in range(micro_batches)
    }
    assert len(taken) == len(PASSES) * micro_batches, "two passes of a stage have one slot"
    pass_words, later = [], []
    for slot in range(max(taken) + 1):
        if slot in taken:
            kind, chunk, micro_batch = taken[slot]
            pass_words.append(f"{kind}{chunk}m{micro_batch}")
            later += [f"W{chunk}m{micro_batch}"] * (kind == "B")
        elif later:
            pass_words.append(later.pop(0))
    return pass_words + later


# The orders V-Half and V-Min by name, each as a function that writes the order file for numbers of
# stages and micro-batches.
CONTROLLED: Mapping[str, Callable[[int, int], str]] = {
    "v-half": partial(controlled_text, block=half),
    "v-min": partial(controlled_text, block=least),
}


# Writes order files for interleaved 1F1B, in which each stage alternates between several chunks of
# the model.


def interleaved_text(stages: int, micro_batches: int, chunks: int) -> str:
    """The order file for interleaved 1F1B (Narayanan et al., SC 2021).

    Chunks take groups of as many micro-batches as there are stages.

    >>> print(interleaved_text(1, 1, 2), end="")
    F0m0 F1m0 B1m0 B0m0
    """
    assert micro_batches % stages == 0, "micro-batches come in groups as large as the pipeline"
    turns = [_forward_pass(number, stages, chunks) for number in range(micro_batches * chunks)]
    forwards = [f"F{chunk}m{micro_batch}" for chunk, micro_batch in turns]
    backwards = [f"B{chunks - 1 - chunk}m{micro_batch}" for chunk, micro_batch in turns]
    lines = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(turns))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        rest = backwards[len(turns) - ahead :]
        lines.append(" ".join([*forwards[:ahead], *(one for pair in pairs for one in pair), *rest]))
    return "\n".join(lines) + "\n"


def _forward_pass(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """The chunk and the micro-batch of a stage's forward pass with this number, in interleaved
    1F1B.
    """
    group, rest = divmod(number, stages * chunks)
    chunk, stage_number = divmod(rest, stages)
    return chunk, group * stages + stage_number


# Lists the named pipeline orders, such as 1F1B and GPipe, with the functions that write their order
# files.


DEFAULT_ORDER = "1f1b"


def in_flight(stage: int, num_stages: int, micro_batches: int) -> int:
    """The largest number of micro-batches that a stage of a 1F1B pipeline has in flight."""
    return min(micro_batches, num_stages - stage)


def one_forward_one_backward(num_stages: int, micro_batches: int) -> str:
    """The order file for 1F1B: each stage runs some forward passes ahead, then alternates
    (Narayanan et al. 2019).

    It runs as many ahead as there are stages after it.

    >>> print(one_forward_one_backward(2, 3), end="")
    Fm0 Fm1 Bm0 Fm2 Bm1 Bm2
    Fm0 Bm0 Fm1 Bm1 Fm2 Bm2
    """
    lines = []
    for stage in range(num_stages):
        ahead = in_flight(stage, num_stages, micro_batches)
        forwards = [f"Fm{m}" for m in range(micro_batches)]
        backwards = [f"Bm{m}" for m in range(micro_batches)]
        # After the forward passes that run ahead, backward and forward passes alternate, and the
        # remaining backward passes follow.
        pairs = zip(backwards, forwards[ahead:], strict=False)
        remaining = backwards[micro_batches - ahead :]
        lines.append(" ".join((*forwards[:ahead], *chain.from_iterable(pairs), *remaining)))
    return "\n".join(lines) + "\n"


def all_forwards_then_backwards(num_stages: int, micro_batches: int) -> str:
    """The order file for GPipe: all forward passes, then all backward passes (Huang et al. 2019).

    >>> print(all_forwards_then_backwards(1, 2), end="")
    Fm0 Fm1 Bm0 Bm1
    """
    line = " ".join(f"{kind}m{m}" for kind in "FB" for m in range(micro_batches))
    return f"{line}\n" * num_stages


def interleaved(num_stages: int, micro_batches: int, chunks: int) -> str:
    """The order file for interleaved 1F1B.

    Refuses a number of micro-batches that is not a multiple of the number of stages.

    >>> print(interleaved(1, 2, 2), end="")
    F0m0 F1m0 B1m0 F0m1 B0m0 F1m1 B1m1 B0m1
    """
    if micro_batches % num_stages:
        refuse(
            "plan.order",
            f"{order_of_chunks(chunks)} runs micro-batches in groups of {num_stages}, one for each "
            f"stage, but there are {micro_batches}: give a multiple of {num_stages}",
        )
    return interleaved_text(num_stages, micro_batches, chunks)


def zero_bubble(num_stages: int, micro_batches: int, *, ahead: int = 1, put_off: int = 1) -> str:
    """The order file for a 1F1B order in which weight-gradient passes fill bubbles: by default
    ZB-H1 (Qi et al. 2023).

    ZB-H2 and ZB-2p have twice as many micro-batches in flight.

    A stage runs ``ahead`` forward passes ahead for each stage after it, and postpones ``put_off``
    weight gradients for each stage before it. ZB-H1 has as many micro-batches in flight as the
    first stage of 1F1B; ZB-H2 (2 and 2) has twice as many. If F, B and W take the same seconds on
    all stages, every stage of ZB-H2 waits for (S - 1)(F + B - 2 W). If B frees half of a
    micro-batch's memory, stages may postpone more: none waits long if ``put_off`` W take as long as
    F + B.

    >>> print(zero_bubble(2, 2), end="")
    Fm0 Fm1 Bm0 Wm0 Bm1 Wm1
    Fm0 Bm0 Fm1 Bm1 Wm0 Wm1
    """
    lines = []
    for stage in range(num_stages):
        first = min(micro_batches, ahead * (num_stages - stage - 1) + 1)
        waiting = put_off * stage
        line = [f"Fm{m}" for m in range(first)]
        for m in range(micro_batches):
            line.append(f"Bm{m}")
            line += [f"Wm{m - waiting}"] * (m >= waiting)
            line += [f"Fm{m + first}"] * (m + first < micro_batches)
        done = max(0, micro_batches - waiting)
        lines.append(" ".join((*line, *(f"Wm{m}" for m in range(done, micro_batches)))))
    return "\n".join(lines) + "\n"


def dualpipe_v(num_stages: int, micro_batches: int) -> str:
    """The order file for DualPipeV.

    Refuses fewer micro-batches than the model has parts.
    """
    if micro_batches < 2 * num_stages:
        refuse(
            "plan.order",
            f"dualpipe-v, but there are {micro_batches} micro-batches for {2 * num_stages} "
            f"parts of the model: give at least {2 * num_stages} micro-batches, or order zb-v",
        )
    return dualpipe_v_text(num_stages, micro_batches)


def order_of_chunks(chunks: int) -> str:
    """The name of the interleaved order with this many chunks per stage, even if it is not in
    ``ORDERS``.
    """
    return f"interleaved-{chunks}"


# The number of chunks per stage in each interleaved order, by the order's name.
INTERLEAVED: Mapping[str, int] = {order_of_chunks(chunks): chunks for chunks in (2, 3, 4, 5, 6, 8)}

# All named pipeline orders, each with a function that writes the order file for numbers of stages
# and micro-batches.
ORDERS: dict[str, Callable[[int, int], str]] = {
    DEFAULT_ORDER: one_forward_one_backward,
    "gpipe": all_forwards_then_backwards,
    **{name: partial(interleaved, chunks=chunks) for name, chunks in INTERLEAVED.items()},
    "zb-h1": zero_bubble,
    "zb-h2": partial(zero_bubble, ahead=2, put_off=2),
    "zb-2p": partial(zero_bubble, ahead=2, put_off=3),
    "zb-v": zb_v_text,
    "dualpipe-v": dualpipe_v,
    **CONTROLLED,
}
# In these orders the model's parts lie in a V, two on each stage: micro-batches pass to the last
# stage and back.
TURNING = ("zb-v", "dualpipe-v", *CONTROLLED)
# These orders compute weight gradients in passes of their own (W).
SPLIT = ("zb-h1", "zb-h2", "zb-2p", *TURNING)
# These orders are periodic: between warm-up and cool-down, stages repeat the same passes for each
# group of as many micro-batches as there are stages.
REPEATING = frozenset((*INTERLEAVED, *SPLIT))
# Periodic orders are computed with this many groups of micro-batches at most, and longer iterations
# are extrapolated; a group has as many micro-batches as there are stages.
GROUPS_PLAYED = 4


def fewer_micro_batches(order: str, num_stages: int, micro_batches: int) -> int:
    """The fewest micro-batches with which a periodic pipeline order keeps its warm-up, cool-down
    and period.

    ``micro_batches`` itself if the order is not periodic.
    """
    beyond = micro_batches - GROUPS_PLAYED * num_stages
    if order not in REPEATING or beyond < num_stages:
        return micro_batches
    return micro_batches - beyond // num_stages * num_stages


def repeat_of(order: str, num_stages: int) -> int:
    """The number of micro-batches after which both a pipeline order and its use of ring buffers
    with two entries repeat.

    >>> repeat_of("1f1b", 3), repeat_of("interleaved-2", 3)
    (2, 6)
    """
    return lcm(2, num_stages) if order in REPEATING else 2


def chunks_of(order: str) -> int:
    """The number of chunks per stage in a named pipeline order.

    >>> chunks_of("zb-h1"), chunks_of("zb-v"), chunks_of("interleaved-4")
    (1, 2, 4)
    """
    return 2 if order in TURNING else INTERLEAVED.get(order, 1)


def order_problem(order: str, num_stages: int, micro_batches: int, most_chunks: int) -> str:
    """Why a pipeline cannot use a named order, or "" if it can.

    The pipeline has these numbers of stages, micro-batches and chunks per stage (at most).
    """
    chunks = chunks_of(order)
    if order == "dualpipe-v" and micro_batches < 2 * num_stages:
        return (
            f"there are {micro_batches} micro-batches for {2 * num_stages} parts of the model: "
            f"give at least {2 * num_stages} micro-batches, or order zb-v"
        )
    if order in INTERLEAVED and micro_batches % num_stages:
        return (
            f"there are {micro_batches} micro-batches for {num_stages} stages: give a multiple of "
            f"{num_stages} micro-batches"
        )
    if chunks > most_chunks:
        return f"stages have blocks for {most_chunks} chunks, not {chunks}: give an order of fewer"
    return ""


def is_order_path(name: str) -> bool:
    """Whether a plan's ``order`` is the path of an order file, rather than a name."""
    return "/" in name or name.endswith(".txt")
