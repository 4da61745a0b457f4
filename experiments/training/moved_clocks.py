"""Whether a GPU's clocks were the same before and after something was timed."""

from mistlab.job.prediction import Clocks

# Clocks that move by more make times that are not of one machine.
MOST_MOVED = 0.03


def moved_words(before: Clocks | None, after: Clocks | None) -> str:
    """A warning if clocks have moved by more than they may; else, or if they are unknown, empty."""
    if before is None or after is None or after.moved_from(before) <= MOST_MOVED:
        return ""
    return (
        f"clocks moved by {after.moved_from(before):.1%} meanwhile, from SM {before.sm_mhz:g} and "
        f"memory {before.memory_mhz:g} MHz to {after.sm_mhz:g} and {after.memory_mhz:g}"
    )
