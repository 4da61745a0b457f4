"""How long `import mistlab` takes, in a process of its own, beside an empty one."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("statement", ["pass", "import mistlab"])
def test_starting_python(benchmark, statement: str) -> None:
    benchmark(subprocess.run, [sys.executable, "-c", statement], check=True)
