"""Array types. The axes are named at the top of each module that uses them.

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
    # True or False for each candidate (masks).
    Bools = NDArray[np.bool_]
    # A column: one value for each candidate, of any kind of number.
    Column = NDArray[Any]
else:
    Floats = Ints = Rows = Bools = Column = Any
