"""Published pipeline orders as text: interleaved 1F1B, and a zero bubble's ZB-H1."""


def all_forwards_first(stages: int, micro_batches: int, *, reverses: bool = False) -> str:
    """All forwards, then all backwards, in the same order or the reverse one."""
    forwards = [f"Fm{m}" for m in range(micro_batches)]
    backwards = [f"Bm{m}" for m in range(micro_batches)]
    line = " ".join([*forwards, *(backwards[::-1] if reverses else backwards)])
    return f"{line}\n" * stages


def interleaved(stages: int, micro_batches: int, chunks: int) -> str:
    """Interleaved 1F1B (Narayanan et al. 2021): chunks take as many micro-batches in turn as there
    are stages, of which there is a multiple."""
    assert micro_batches % stages == 0

    def turn(number: int) -> tuple[int, int]:
        group, rest = divmod(number, stages * chunks)
        chunk, place = divmod(rest, stages)
        return chunk, group * stages + place

    turns = [turn(number) for number in range(micro_batches * chunks)]
    forwards = [f"F{chunk}m{m}" for chunk, m in turns]
    backwards = [f"B{chunks - 1 - chunk}m{m}" for chunk, m in turns]
    lines = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(turns))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        rest = backwards[len(turns) - ahead :]
        lines.append(" ".join([*forwards[:ahead], *(one for pair in pairs for one in pair), *rest]))
    return "\n".join(lines) + "\n"


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
