"""The text of interleaved 1F1B: each stage has several chunks of the model, which take turns."""


def interleaved_text(stages: int, micro_batches: int, chunks: int) -> str:
    """The order of all stages (Narayanan et al., SC 2021).

    Chunks take as many micro-batches in turn as there are stages, of which there is a multiple.

    >>> print(interleaved_text(1, 1, 2), end="")
    F0m0 F1m0 B1m0 B0m0
    """
    assert micro_batches % stages == 0, "micro-batches come in groups as large as the pipeline"
    turns = [_turn(number, stages, chunks) for number in range(micro_batches * chunks)]
    forwards = [f"F{chunk}m{micro_batch}" for chunk, micro_batch in turns]
    backwards = [f"B{chunks - 1 - chunk}m{micro_batch}" for chunk, micro_batch in turns]
    lines = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(turns))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        rest = backwards[len(turns) - ahead :]
        lines.append(" ".join([*forwards[:ahead], *(one for pair in pairs for one in pair), *rest]))
    return "\n".join(lines) + "\n"


def _turn(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """The chunk and the micro-batch of a stage's forward pass, by its number."""
    group, rest = divmod(number, stages * chunks)
    chunk, place = divmod(rest, stages)
    return chunk, group * stages + place
