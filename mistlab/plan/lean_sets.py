"""The lean operators (which keep less for their backward pass), and the sets of them from which a
stage chooses.
"""

from itertools import combinations

# Kinds of operators with a lean form. Below, all non-empty sets of the kinds: the full set first,
# then by size.
KINDS = ("gelu", "norms", "core", "dropout")
SETS: tuple[tuple[str, ...], ...] = (
    KINDS,
    *(one for size in range(1, len(KINDS)) for one in combinations(KINDS, size)),
)
WORDS = ("all operators lean", *(f"lean {' and '.join(one)}" for one in SETS[1:]))
ALL = 0
# The dimension of a stage whose value is an index into these sets.
CHOICE = "lean_operators"
