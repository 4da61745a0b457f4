"""Lean operators, which keep less for their backward pass than plain ones, and the sets of them
from which a plan chooses for each stage.
"""

from itertools import combinations

# The kinds of operators that have a lean form. ``SETS`` has all non-empty sets of these kinds: the
# full set first, then by size.
KINDS = ("gelu", "norms", "core", "dropout")
SETS: tuple[tuple[str, ...], ...] = (
    KINDS,
    *(one for size in range(1, len(KINDS)) for one in combinations(KINDS, size)),
)
WORDS = ("all operators lean", *(f"lean {' and '.join(one)}" for one in SETS[1:]))
ALL = 0
# The dimension (choice for a stage) whose value is an index into ``SETS``.
CHOICE = "lean_operators"
