"""Orders of chunks in a V that hold half or a third of what 1F1B holds: V-Half and V-Min.

Qi et al. (2024, "Pipeline Parallelism with Controllable Memory") repeat a building block: the four
passes of a micro-batch on a stage, F and B of both chunks, begin in slots of a fixed block, and
each micro-batch's block begins six slots after the one before. The fewer slots a block takes on the
fullest stage, the fewer micro-batches are held there. Of six slots two are left for W, the
gradients of weights, which here run as soon as a slot is free. A stage then takes its passes in the
order of their slots, each as soon as it can.
"""

from collections.abc import Callable, Mapping
from functools import partial

from mistlab.schedule.turning import DOWN, UP, placed_text

# The slots that a micro-batch takes on each stage: F, B and W of two chunks.
PERIOD = 6
# The passes of a building block in the order of its slots.
PASSES = (("F", DOWN), ("F", UP), ("B", UP), ("B", DOWN))

# The slots of a building block's passes, by the numbers of stages and of the stage.
Block = Callable[[int, int], tuple[int, int, int, int]]


def half(stages: int, stage: int) -> tuple[int, int, int, int]:
    """V-Half: a pass down takes two slots a stage, a pass up one.

    >>> [half(2, stage) for stage in range(2)]
    [(0, 4, 8, 13), (2, 3, 10, 12)]
    """
    # Without it, two passes of a stage would have one slot.
    shift = 3 * (stages % 2 == 0)
    return (
        2 * stage,
        3 * stages - stage - 2,
        3 * stages + shift + 2 * stage - 1,
        6 * stages + shift - stage - 2,
    )


def least(stages: int, stage: int) -> tuple[int, int, int, int]:
    """V-Min: every pass takes one slot a stage.

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
    """The text of an order that repeats a building block.

    >>> print(controlled_text(1, 2, block=least), end="")
    F0m0 F1m0 B1m0 B0m0 W1m0 W0m0 F0m1 F1m1 B1m1 B0m1 W1m1 W0m1
    """
    blocks = [block(num_stages, stage) for stage in range(num_stages)]
    return placed_text(num_stages, [_words(slots, micro_batches) for slots in blocks])


def _words(slots: tuple[int, int, int, int], micro_batches: int) -> list[str]:
    """The words of a stage's passes, in the order of their slots."""
    taken = {
        slot + PERIOD * micro_batch: (kind, chunk, micro_batch)
        for (kind, chunk), slot in zip(PASSES, slots, strict=True)
        for micro_batch in range(micro_batches)
    }
    assert len(taken) == len(PASSES) * micro_batches, "two passes of a stage have one slot"
    words, later = [], []
    for slot in range(max(taken) + 1):
        if slot in taken:
            kind, chunk, micro_batch = taken[slot]
            words.append(f"{kind}{chunk}m{micro_batch}")
            later += [f"W{chunk}m{micro_batch}"] * (kind == "B")
        elif later:
            words.append(later.pop(0))
    return words + later


# By name: the function that writes an order's text for numbers of stages and micro-batches.
CONTROLLED: Mapping[str, Callable[[int, int], str]] = {
    "v-half": partial(controlled_text, block=half),
    "v-min": partial(controlled_text, block=least),
}
