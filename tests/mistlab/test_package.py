import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mistlab

PUBLIC = """
Action Budget Cluster Environment FieldError Gpu Hardware Improvement InputError Job Measurement
MemoryByClass MemoryByPhase ModelSpec Node Offload OffloadRatios PeakTflops Plan Prediction
Predictor Problem Provenance SearchResult SearchSpace Searcher Source StageBatch StageFigures
StageMeasurement StagePlan StagePrediction Workload dump_job from_mapping job_from_mapping
job_to_mapping load_job near_matches to_mapping
explain from_framework names predict predict_many predict_runs serve to_framework tune will_it_fit
"""


def names_for_type_checkers() -> set[str]:
    stub = Path(mistlab.__file__).with_suffix(".pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "" for node in imports for alias in node.names}


def test_the_public_names_are_these() -> None:
    assert sorted(mistlab.__all__) == sorted(PUBLIC.split())


def test_type_checkers_see_the_same_names() -> None:
    assert names_for_type_checkers() == set(mistlab.__all__)


@pytest.mark.parametrize("name", PUBLIC.split())
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mistlab, name).__name__ == name


def test_the_names_are_listed_with_the_version() -> None:
    assert {*dir(mistlab)} == {*mistlab.__all__, "__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", mistlab.__version__)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mistlab.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import mistlab", "numpy sympy yaml mistlab.core.values"),
        ("from mistlab import Plan, Prediction, SearchResult", "numpy sympy yaml"),
        ("from mistlab import load_job", "numpy sympy"),
    ],
    ids=["package", "values", "files"],
)
def test_importing_brings_no_more_than_it_needs(statement: str, heavy: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {heavy.split()} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    root = Path(mistlab.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_the_base_install_brings_no_torch() -> None:
    pyproject = Path(mistlab.__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    assert [d for d in project["dependencies"] if "torch" in d or "flash" in d] == []


def test_an_installed_package_has_every_file_of_the_packages() -> None:
    root = Path(mistlab.__file__).parents[1]
    setup = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    tops = [name.rstrip("*") for name in setup["setuptools"]["packages"]["find"]["include"]]
    named = {
        path
        for package, patterns in setup["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (root / package.replace(".", "/")).glob(pattern)
    }
    files = {path for top in tops for path in (root / top).rglob("*") if path.is_file()}
    assert len(named) > 100
    assert {path for path in files - named if path.suffix not in (".py", ".pyi", ".pyc")} == set()


def test_the_base_commands_run_where_there_is_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from experiments import analyse, survey, trace\n"
        "from experiments.cli.commandline import run\n"
        "assert run(analyse.main, ['--json']) == 0\n"
        f"out = ['--out', {str(tmp_path)!r} + '/m.json']\n"
        "assert run(trace.main, ['package:factory', *out]) == 2"
    )
    root = Path(mistlab.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "error: torch is not installed, and this command needs it: pip install '.[runtime]'\n"
    )
