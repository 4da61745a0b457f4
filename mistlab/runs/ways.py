"""What a run chose where its row does not say: of several ways, the fastest that fits.

Who publishes a benchmark without its micro-batch, or without its chunks a stage, has chosen them
for speed. So such a row stands for several configurations, and is answered with the fastest of
those that leave room in memory.
"""

from collections.abc import Iterator
from dataclasses import replace

from mistlab.runs.configuration import Configuration
from mistlab.schedule.orders import INTERLEAVED

# Micro-batches of so many sequences are tried.
SEQUENCES = (1, 2, 4, 8, 16)


def ways_of(run: Configuration) -> tuple[Configuration, ...]:
    """The configurations that a run may have had, those with smaller micro-batches and fewer chunks
    first; the run itself if its row says all."""
    if not run.unsaid:
        return (run,)
    return tuple(
        replace(way, unsaid=(), notes=_told(way, run.unsaid))
        for batch in _of_micro_batches(run)
        for way in _of_chunks(batch)
    )


def _of_micro_batches(run: Configuration) -> Iterator[Configuration]:
    """The run with each micro-batch that divides a rank's sequences of a step."""
    if "micro_batch" not in run.unsaid:
        yield run
        return
    of_rank = run.micro_batch * run.micro_batches
    for sequences in SEQUENCES:
        if of_rank % sequences == 0:
            yield replace(run, micro_batch=sequences, micro_batches=of_rank // sequences)


def _of_chunks(run: Configuration) -> Iterator[Configuration]:
    """The run with each number of chunks a stage."""
    most = run.shape.layers // run.pipeline_parallel if "vpp" in run.unsaid else 1
    for chunks in (1, *sorted(INTERLEAVED.values())):
        if chunks <= most:
            yield replace(run, chunks=chunks)


def _told(way: Configuration, unsaid: tuple[str, ...]) -> tuple[str, ...]:
    """The notes of a way, with what is assumed in it."""
    taken = {"micro_batch": way.micro_batch, "vpp": way.chunks}
    others = (note for note in way.notes if not note.startswith("micro_batch is empty"))
    return (
        *others,
        *(f"{name} is empty: {taken[name]} is the fastest that fits" for name in unsaid),
    )
