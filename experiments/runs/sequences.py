"""The sequences and tokens of a measured run's micro-batch, and what is assumed if its row does not
state them.
"""

from experiments.runs.run_row import RunRow
from mistlab.core.values import refuse

ASSUMED_MICRO_BATCH = "micro_batch is empty: 1 assumed"
AS_USUAL = "assumed, as examples have it"


def sequences_of(row: RunRow, given: int | None, ranks: int, notes: list[str]) -> int:
    """The number of sequences in a micro-batch: the one that is ``given``, otherwise the one in the
    software's example files for this many ranks.
    """
    if given is not None:
        return given
    usual = _undivided(row, ranks) or row.usual_micro_batch
    notes.append(
        ASSUMED_MICRO_BATCH if usual is None else f"micro_batch is empty: {usual} {AS_USUAL}"
    )
    return usual or 1


def _undivided(row: RunRow, ranks: int) -> int | None:
    """All sequences of a rank in a step, for software that by default makes them one micro-batch;
    None if the row states or allows several micro-batches, or states no batch.
    """
    batch = row.count("global_batch")
    if row.accumulates or batch is None or row.count("grad_accumulation") is not None:
        return None
    return -(-batch // ranks)


def tokens_of(row: RunRow, context: int, notes: list[str]) -> int:
    """The tokens of a sequence that each context-parallel rank has."""
    length, longest = row.count("sequence_length"), row.longest_sample
    if row.thousands and length is not None:
        stated, length, longest = length, row.thousands * 1000, None
        notes.append(f"sequence_length {stated:,} is {length:,} in the run's script")
    if length is None and row.usual_length is not None:
        length = row.usual_length
        notes.append(f"sequence_length is empty: {length} {AS_USUAL}")
    if length is None:
        refuse("sequence_length", "is empty: give the tokens of a sequence")
    if longest is not None and longest < length:
        notes.append(f"sequence_length is a cap: samples of {longest} tokens at most assumed")
        length = longest
    parts = 2 * context
    if context > 1 and row.text("sp_ulysses") and length % parts:
        length = -(-length // parts) * parts
        notes.append(f"sequences are padded to {length} tokens for {context} ranks")
    return length


def batches_at_once(row: RunRow, sequences: int, of_step: int, stages: int) -> int:
    """The number of micro-batches with which the pipeline is filled and drained once: all
    ``of_step`` micro-batches of a step or, in AutoModel, only those of a rank's local batch.
    """
    if row.local_batch is None or stages == 1:
        return of_step
    at_once = max(1, row.local_batch // sequences)
    if of_step % at_once:
        problem = f"local batch size LBS {row.local_batch} is {at_once} micro-batches"
        refuse("notes", f"{problem}, which do not divide a step's {of_step}: give a divisor")
    return at_once
