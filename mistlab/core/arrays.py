"""Types of arrays. What their axes count is told at the top of each module that uses them.

Type checkers alone read them: a module that only names arrays does not import NumPy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # Real numbers, such as seconds, bytes and ratios.
    Floats = NDArray[np.float64]
    # Whole numbers, such as degrees and counts of micro-batches.
    Ints = NDArray[np.int64]
    # Places in other arrays.
    Rows = NDArray[np.intp]
    # Whether something holds.
    Bools = NDArray[np.bool_]
    # Numbers of any kind: a column of candidates.
    Column = NDArray[Any]
else:
    Floats = Ints = Rows = Bools = Column = Any
