"""What tests of every package may ask for."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.warm.start import warm_server


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A program to start instead of ``sys.executable``: its processes have imported torch and the
    runtime already, and OpenMP has one thread."""
    if not hasattr(os, "fork"):
        yield sys.executable
        return
    with warm_server() as program:
        yield program
