"""Lets tensor cores compute the GEMMs of 32-bit values: in TF32, which multiplies 19 bits of each
value and sums in 32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mistlab.engines.engine import Precision


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Within the ``with`` block, GEMMs of 32-bit values run in TF32 if that is the precision, and
    with all of their bits otherwise, whatever the process was set to.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
