"""Pipeline orders as text, beside those that have a name."""

from collections.abc import Collection

import numpy as np

from mistlab.schedule.order_text import placement_line
from mistlab.schedule.placement import Placement, StageChunk, loop


def all_forwards_first(stages: int, micro_batches: int, *, reverses: bool = False) -> str:
    """All forwards, then all backwards, in the same order or the reverse one."""
    forwards = [f"Fm{m}" for m in range(micro_batches)]
    backwards = [f"Bm{m}" for m in range(micro_batches)]
    line = " ".join([*forwards, *(backwards[::-1] if reverses else backwards)])
    return f"{line}\n" * stages


def drawn(
    placement: Placement, micro_batches: int, seed: int, *, splitting: Collection[int] = ()
) -> str:
    """An order in which each pass that could run next is as likely as the others; stages of
    ``splitting`` have passes for weights."""
    draw = np.random.default_rng(seed)
    places = placement.places
    lines: list[list[str]] = [[] for _ in range(placement.num_stages)]
    done: set[tuple[str, int, int]] = set()

    def can_run(kind: str, part: int, m: int) -> bool:
        if (kind, part, m) in done:
            return False
        if kind == "W":
            return places[part].stage in splitting and ("B", part, m) in done
        if kind == "F":
            return part == 0 or ("F", part - 1, m) in done
        is_last = part == len(places) - 1
        return ("F", part, m) in done and (is_last or ("B", part + 1, m) in done)

    every = [(k, at, m) for k in "FBW" for at in range(len(places)) for m in range(micro_batches)]
    while left := [one for one in every if can_run(*one)]:
        kind, part, m = left[draw.integers(len(left))]
        done.add((kind, part, m))
        lines[places[part].stage].append(_word(kind, places[part], m, placement))
    return _text(placement, [" ".join(line) for line in lines])


def whole_backwards(text: str) -> str:
    """The order with each pass for weights in the pass for its input."""
    return "".join(
        " ".join(word for word in line.split() if not word.startswith("W")) + "\n"
        for line in text.splitlines()
    )


def _word(kind: str, place: StageChunk, micro_batch: int, placement: Placement) -> str:
    chunk = place.chunk if placement.chunks > 1 else ""
    return f"{kind}{chunk}m{micro_batch}"


def _text(placement: Placement, lines: list[str]) -> str:
    is_loop = placement == loop(placement.num_stages, placement.chunks)
    placed = [] if is_loop else [placement_line(placement)]
    return "".join(f"{line}\n" for line in (*placed, *lines))
