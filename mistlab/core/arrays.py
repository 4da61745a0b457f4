"""NumPy array types by the kind of number. The axes of arrays are named at the top of each module
that uses them.

Type checkers alone read them: a module that only names arrays does not import NumPy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # Real numbers, such as seconds, bytes and ratios.
    Floats = NDArray[np.float64]
    # Integers, such as degrees and numbers of micro-batches.
    Ints = NDArray[np.int64]
    # Indices into other arrays.
    Rows = NDArray[np.intp]
    # True or False for each entry (a mask).
    Bools = NDArray[np.bool_]
    # A column of any kind of number, with one value for each candidate.
    Column = NDArray[Any]
else:
    Floats = Ints = Rows = Bools = Column = Any
