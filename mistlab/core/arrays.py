"""Types of arrays. What their axes count is told at the top of each module that uses them."""

from typing import Any

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
