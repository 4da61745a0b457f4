"""Runs the slow tests file by file, and writes runs/slow/tests.md: what passed, where and when.

python -m benchmarks.slow_tests [FILE OR FOLDER ...]; ``make slow`` runs all. Results of each file
stay in runs/slow/REVISION, so a run that was stopped goes on where it was, if nothing has changed.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree as ET

from experiments.cli.rundir import revision
from experiments.pages.page_tables import write_page
from experiments.pages.tables import narrow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "runs" / "slow" / "tests.md"
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:benchmark", "-m", "slow")
# The options of pytest for parallel workers, one for each core, as in the Makefile.
WORKERS = ("-n", "auto", "--dist", "worksteal")
PACKAGES = ("torch", "numpy", "ray", "triton", "transformers")
SLOWEST = 10
# Matches a path on the machine that ran the tests.
_MACHINE_S = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+")
# The outcome of a test, by the XML element in its case in a file of results.
OUTCOMES: Mapping[str, str] = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The outcome of one test."""

    path: str
    name: str
    seconds: float
    outcome: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """The outcomes of the tests in one file, and when they ran."""

    path: str
    cases: tuple[Case, ...]
    began: datetime
    seconds: float

    def count(self, outcome: str) -> int:
        """The number of tests with this outcome."""
        return sum(case.outcome == outcome for case in self.cases)


def main(arguments: Sequence[str]) -> int:
    """Run the tests that have no results yet, and write the page; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_tests", description=__doc__)
    parser.add_argument(
        "tests", nargs="*", default=["tests"], help="the files or folders of tests to run"
    )
    parser.add_argument(
        "--again", action="store_true", help="run also tests that have results already"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    at = revision() or "no-revision"
    folder = ROOT / "runs" / "slow" / at
    folder.mkdir(parents=True, exist_ok=True)
    paths = slow_files(options.tests)
    results = []
    for number, path in enumerate(paths, 1):
        sys.stderr.write(f"{number} of {len(paths)}: {path}\n")
        results.append(read(path, run(path, folder, again=options.again or at.endswith("-dirty"))))
    write_page(options.page, "\n".join(page(results, options.tests, at)) + "\n")
    sys.stdout.write(f"written: {options.page}\n")
    return int(any(result.count("failed") for result in results))


def slow_files(tests: Sequence[str]) -> list[str]:
    """The files that have slow tests."""
    command = [*PYTEST, "--collect-only", "-q", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        sys.exit(f"tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return sorted(set(re.findall(r"^([\w/.]+\.py)::", done.stdout, re.MULTILINE)))


def run(path: str, folder: Path, *, again: bool) -> Path:
    """The results of a file's slow tests, which are run if there are none yet."""
    results = folder / f"{path.removesuffix('.py').replace('/', '.')}.xml"
    if again or not results.exists():
        partial = results.with_suffix(".partial")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*PYTEST, *WORKERS, "-q", f"--junitxml={partial}", path]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"{path} was not run to its end (exit status {done.returncode}): run again")
        partial.rename(results)
    return results


def read(path: str, results: Path) -> Results:
    """The results in a file that pytest wrote."""
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    return Results(
        path=path,
        cases=tuple(_case(path, element) for element in suite.iter("testcase")),
        began=datetime.fromisoformat(suite.attrib["timestamp"]).astimezone(UTC),
        seconds=float(suite.attrib["time"]),
    )


def _case(path: str, element: ET.Element) -> Case:
    outcome, reason = "passed", ""
    for child in element:
        if child.tag in OUTCOMES:
            outcome, reason = OUTCOMES[child.tag], child.attrib.get("message", "")
    return Case(
        path=path,
        name=element.attrib["name"],
        seconds=float(element.attrib["time"]),
        outcome=outcome,
        reason=" ".join(_MACHINE_S.sub("...", reason.removeprefix("Skipped: ")).split())[:200],
    )


def page(results: Sequence[Results], tests: Sequence[str], at: str) -> Iterator[str]:
    """The lines of the page."""
    began = sorted(result.began for result in results)
    days = sorted({day.date().isoformat() for day in began[:1] + began[-1:]})
    yield "# Slow tests"
    yield ""
    yield f"Run on {' to '.join(days) or 'no day'} at revision `{at}` by"
    yield ""
    yield from ("```", " ".join(["make slow", *_arguments(tests)]), "```", "")
    yield (
        f"on {os.cpu_count()} cores of {platform.machine()} ({platform.system()}), Python "
        f"{platform.python_version()}, {', '.join(_versions())}. Quick tests run at every change "
        "(`.ci/run`); slow ones are whole sweeps, worlds of many processes and a local Ray cluster."
    )
    yield from ("", *_folders(results), "")
    cases = [case for result in results for case in result.cases]
    yield from _listed("Failed", [case for case in cases if case.outcome == "failed"])
    yield from _skips(cases)
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    yield from ("## The slowest", "")
    yield from narrow(
        ("test", "seconds"), ((_test(case), f"{case.seconds:.1f}") for case in slowest)
    )


def _arguments(tests: Sequence[str]) -> list[str]:
    return [] if [*tests] == ["tests"] else [f"ARGS='{' '.join(tests)}'"]


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"


def _folders(results: Sequence[Results]) -> list[str]:
    outcomes = ("passed", "failed", "skipped")
    lines = []
    rows = {"/".join(result.path.split("/")[:2]): list[Results]() for result in results}
    for result in results:
        rows["/".join(result.path.split("/")[:2])].append(result)
    for name, of_folder in {**rows, "all": [*results]}.items():
        counts = (sum(result.count(outcome) for result in of_folder) for outcome in outcomes)
        seconds = sum(result.seconds for result in of_folder)
        lines.append((name, len(of_folder), *counts, f"{seconds:,.0f}"))
    return narrow(("folder", "files", *outcomes, "clock seconds"), lines)


def _listed(title: str, cases: Sequence[Case]) -> Iterator[str]:
    if cases:
        reasons = ((_test(case), _cell(case.reason)) for case in cases)
        yield from (f"## {title}", "", *narrow(("test", "why"), reasons), "")


def _skips(cases: Sequence[Case]) -> Iterator[str]:
    skipped = Counter((case.path, case.reason) for case in cases if case.outcome == "skipped")
    if skipped:
        lines = ((count, f"`{path}`", _cell(reason)) for (path, reason), count in skipped.items())
        yield from ("## Skipped", "", *narrow(("tests", "of", "why"), lines), "")


def _test(case: Case) -> str:
    return f"`{case.path}`, `{_cell(case.name)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
