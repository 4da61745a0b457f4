"""What tests of every package may ask for."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.warm.start import warm_server

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A program to start instead of ``sys.executable``: its processes have imported torch and the
    runtime already, and OpenMP has one thread."""
    if not hasattr(os, "fork"):
        yield sys.executable
        return
    with warm_server() as program:
        yield program
