"""Every example prints what is written beside it; every module stays small enough to read."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mistlab", "simulators", "searchers", "runtime", "experiments")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_prints_its_golden_output(example: Path, warm_python: str) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(  # noqa: PLW1510
        [warm_python, str(example)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == example.with_suffix(".out").read_text(encoding="utf-8")


def test_no_module_is_longer_than_600_lines() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert modules
    assert {name for name, length in lengths.items() if length > 600} == set()
