"""What tests of every package may ask for."""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from mistlab.stages.stage_program import flush, iterations
from tests.skips import LACKING, OPTION, Skips
from tests.warm.start import warm_server

# Sums by two threads differ in the last digit from those of one, which processes of tests have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, not whether the code is right.
# A change must pass or fail for what it changes, so while somebody waits the examples are the same.
for name, examples in (("few examples", 40), ("all examples", 100)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=name == "few examples",
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that CI has."""
    parser.addoption(OPTION, action="store_true", help="fail for a skip that tests/skips.py lacks")
    parser.addoption(LACKING, action="append", default=[], help="a word of further reasons")


def pytest_configure(config: pytest.Config) -> None:
    """While somebody waits, fewer examples are enough. The process that sums up tells of skips."""
    if not hasattr(config, "workerinput"):
        only_named, may_lack = config.getoption(OPTION), config.getoption(LACKING)
        config.pluginmanager.register(Skips(only_named=only_named, may_lack=may_lack))
    waited_for = config.getoption("markexpr") == "not slow"
    settings.load_profile("few examples" if waited_for else "all examples")


def pytest_collection() -> None:
    """Importing makes little garbage, and looking for it again and again takes a while."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules stay until the end: whoever collects garbage need not look at what they hold.

    Looked for after 700 new objects, as Python does, garbage takes 2 to 6 % of the tests' seconds.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def _draws_by_a_seed() -> None:
    """A test draws the same numbers, whichever tests its process ran before."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def forget_programs() -> Iterator[Callable[[], None]]:
    """Forgets the programs of stages, which are cached. A test that plants a fault in what makes
    them calls it then, and no later test gets a program that has the fault."""

    def forget() -> None:
        iterations.cache_clear()
        flush.cache_clear()

    yield forget
    forget()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A program to start instead of ``sys.executable``: its processes have imported torch and the
    runtime already, and OpenMP has one thread."""
    if not hasattr(os, "fork"):
        yield sys.executable
        return
    with warm_server() as program:
        yield program
