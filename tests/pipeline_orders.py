"""Pipeline orders as text, beside those that have a name."""


def all_forwards_first(stages: int, micro_batches: int, *, reverses: bool = False) -> str:
    """All forwards, then all backwards, in the same order or the reverse one."""
    forwards = [f"Fm{m}" for m in range(micro_batches)]
    backwards = [f"Bm{m}" for m in range(micro_batches)]
    line = " ".join([*forwards, *(backwards[::-1] if reverses else backwards)])
    return f"{line}\n" * stages
