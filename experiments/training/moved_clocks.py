"""Checks whether the clock rates of a GPU stayed the same during a measurement."""

from mistlab.job.prediction import Clocks

# If the clock rates change by more than this share, the measured times cannot be compared.
MOST_MOVED = 0.03


def moved_words(before: Clocks | None, after: Clocks | None) -> str:
    """A warning that the clock rates have changed too much; empty if they have not, or are
    unknown.
    """
    if before is None or after is None or after.moved_from(before) <= MOST_MOVED:
        return ""
    return (
        f"clocks moved by {after.moved_from(before):.1%} meanwhile, from SM {before.sm_mhz:g} and "
        f"memory {before.memory_mhz:g} MHz to {after.sm_mhz:g} and {after.memory_mhz:g}"
    )
