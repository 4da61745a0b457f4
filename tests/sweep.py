"""A sweep over many cases, of which some are enough while somebody waits."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], *, first: int) -> list[Any]:
    """The cases of a parametrised test: all but the ``first`` are left to make test-all.

    A tuple is a case of several values.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] * (number >= first),
        )
        for number, case in enumerate(cases)
    ]
