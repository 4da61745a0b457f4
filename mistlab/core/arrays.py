"""Names the types of NumPy arrays by the kind of number in them. Each module that uses them names
the axes of its arrays at its top.

Type checkers alone read them: a module that only names arrays does not import NumPy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # Arrays of real numbers, such as seconds, bytes and ratios.
    Floats = NDArray[np.float64]
    # Arrays of integers, such as parallel degrees and numbers of micro-batches.
    Ints = NDArray[np.int64]
    # Arrays of indices into other arrays.
    Rows = NDArray[np.intp]
    # Arrays of True or False (masks).
    Bools = NDArray[np.bool_]
    # Arrays of any kind of number, with one value for each candidate.
    Column = NDArray[Any]
else:
    Floats = Ints = Rows = Bools = Column = Any
