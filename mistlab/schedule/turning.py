"""Orders of chunks in a V: micro-batches go down to the last stage and back up to the first.

The first stage has the first and the last of the model's parts, so a micro-batch's gradients begin
where its tokens came in. ZB-V (Qi et al. 2023) takes F, B and W to be equally long: then no stage
waits between its first pass and its last, and each stage holds as much as the first one of 1F1B.
DualPipeV (DeepSeek 2025) is one half of DualPipe, in which micro-batches enter at both ends: in the
middle, a stage takes forwards of one chunk and whole backwards of the other one in turn.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mistlab.schedule.order_text import placement_line
from mistlab.schedule.placement import turning

# The chunk on the way down, and the chunk on the way back up.
DOWN, UP = 0, 1


def zb_v_text(num_stages: int, micro_batches: int) -> str:
    """The text of ZB-V.

    With fewer micro-batches than it takes to fill the pipeline, passes of the missing ones are left
    out.

    >>> print(zb_v_text(1, 2), end="")
    F0m0 F1m0 B1m0 W1m0 F0m1 B0m0 W0m0 F1m1 B1m1 W1m1 B0m1 W0m1
    """
    taken = max(2 * num_stages - 1, micro_batches)
    lines = [_zb_v(num_stages, stage, taken) for stage in range(num_stages)]
    return placed_text(num_stages, [line.words(micro_batches) for line in lines])


def dualpipe_v_text(num_stages: int, micro_batches: int) -> str:
    """The text of DualPipeV, for at least as many micro-batches as the model has parts.

    >>> print(dualpipe_v_text(1, 2), end="")
    F0m0 F1m0 F0m1 B1m0 W1m0 F1m1 B0m0 W0m0 B1m1 W1m1 B0m1 W0m1
    """
    lines = [_dualpipe_v(num_stages, stage, micro_batches) for stage in range(num_stages)]
    return placed_text(num_stages, [line.words(micro_batches) for line in lines])


@dataclass(slots=True)
class _Line:
    """The passes of a stage. Each is of the next micro-batch of its kind and chunk.

    ``later`` are gradients of weights that are put off: their chunks and micro-batches.
    """

    passes: list[tuple[str, int, int]] = field(default_factory=list)
    later: list[tuple[int, int]] = field(default_factory=list)
    done: Counter[tuple[str, int]] = field(default_factory=Counter)

    def forward(self, chunk: int) -> None:
        self._next("F", chunk)

    def backward(self, chunk: int, *, whole: bool = True) -> None:
        """A backward pass; unless it is ``whole``, its gradients of weights are put off."""
        micro_batch = self._next("B", chunk)
        if whole:
            self.passes.append(("W", chunk, micro_batch))
        else:
            self.later.append((chunk, micro_batch))

    def weights(self) -> None:
        """The gradients of weights that were put off first, if there are any."""
        if self.later:
            self.passes.append(("W", *self.later.pop(0)))

    def words(self, micro_batches: int) -> list[str]:
        """The words of all passes of so many micro-batches."""
        return [f"{kind}{chunk}m{m}" for kind, chunk, m in self.passes if m < micro_batches]

    def _next(self, kind: str, chunk: int) -> int:
        micro_batch = self.done[kind, chunk]
        self.done[kind, chunk] += 1
        self.passes.append((kind, chunk, micro_batch))
        return micro_batch


def _zb_v(stages: int, stage: int, micro_batches: int) -> _Line:
    line, after = _Line(), stages - stage
    # Micro-batches go down until the first of them is back.
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
    # What is left to go back does, as fast as it can; gradients of weights wait for it.
    for _ in range(stage):
        line.backward(DOWN, whole=False)
        line.backward(UP, whole=False)
    for _ in range(after):
        line.backward(DOWN, whole=False)
        put_off = min(m for chunk, m in line.later if chunk == DOWN)
        line.later.remove((DOWN, put_off))
        line.passes.append(("W", DOWN, put_off))
    # The way up first.
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
    # From the middle of the rest on, gradients of weights are put off.
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
    """The text of the stages' words, for chunks in a V."""
    placement = turning(num_stages)
    placed = [] if placement.is_loop else [placement_line(placement)]
    return "".join(f"{line}\n" for line in (*placed, *map(" ".join, lines)))
