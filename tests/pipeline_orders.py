"""Published pipeline orders as text: interleaved 1F1B, and a zero bubble's ZB-H1."""

from mistlab.schedule.interleaved import interleaved_text


def all_forwards_first(stages: int, micro_batches: int, *, reverses: bool = False) -> str:
    """All forwards, then all backwards, in the same order or the reverse one."""
    forwards = [f"Fm{m}" for m in range(micro_batches)]
    backwards = [f"Bm{m}" for m in range(micro_batches)]
    line = " ".join([*forwards, *(backwards[::-1] if reverses else backwards)])
    return f"{line}\n" * stages


def interleaved(stages: int, micro_batches: int, chunks: int) -> str:
    """Interleaved 1F1B."""
    return interleaved_text(stages, micro_batches, chunks)


def zero_bubble(stages: int, micro_batches: int) -> str:
    """ZB-H1 (Qi et al. 2023): 1F1B in which the gradients of weights fill the waits at the end, and
    each stage holds as many micro-batches as the first of 1F1B."""
    lines = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        line = [f"Fm{m}" for m in range(ahead)]
        for m in range(micro_batches):
            line.append(f"Bm{m}")
            line += [f"Wm{m - stage}"] * (m >= stage)
            line += [f"Fm{m + ahead}"] * (m + ahead < micro_batches)
        done = max(0, micro_batches - stage)
        lines.append(" ".join([*line, *(f"Wm{m}" for m in range(done, micro_batches))]))
    return "\n".join(lines) + "\n"
