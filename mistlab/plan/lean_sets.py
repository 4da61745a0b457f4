"""Kinds of operators that keep less for their backward pass, and the sets to choose from."""

from itertools import combinations

# Every set of some kinds: all first, then by size.
KINDS = ("gelu", "norms", "core", "dropout")
SETS: tuple[tuple[str, ...], ...] = (
    KINDS,
    *(one for size in range(1, len(KINDS)) for one in combinations(KINDS, size)),
)
WORDS = ("all operators lean", *(f"lean {' and '.join(one)}" for one in SETS[1:]))
ALL = 0
# The dimension that is a place among them.
CHOICE = "lean_operators"
