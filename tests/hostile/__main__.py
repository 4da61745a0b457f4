"""Gives all commands hostile inputs, and says which are not refused or answered as they should be.

``python -m tests.hostile --inputs 1000 --seed 0 --processes 50`` is the whole check, of which tests
draw a part; ``--page`` writes what came of it. ``--only N`` runs one input again, and shows what it
printed.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from experiments.pages.page_tables import write_page
from tests.hostile.case import Case
from tests.hostile.draw import cases
from tests.hostile.oracle import problems
from tests.hostile.page import Finding, page
from tests.hostile.run import Outcome, forked, started


def main(arguments: Sequence[str]) -> int:
    """Run the inputs, and tell what is wrong."""
    options = _parser().parse_args(arguments)
    drawn = [*enumerate(islice(cases(options.seed), options.inputs))]
    if options.only is not None:
        drawn = [drawn[options.only]]
    if options.command:
        drawn = [(n, case) for n, case in drawn if case.command in options.command]
    preload()
    began_s = time.perf_counter()
    findings = [*_run(drawn, options)]
    wrong = [one for one in findings if one.problems]
    seconds = time.perf_counter() - began_s
    _tell(f"{len(findings)} inputs, {len(wrong)} wrong, {seconds:.0f} s", sys.stderr)
    if options.only is not None:
        _tell(str(findings[0].outcome))
    if options.page is not None:
        write_page(options.page, page(findings, options))
    return int(bool(wrong))


def _run(drawn: Sequence[tuple[int, Case]], options: argparse.Namespace) -> "list[Finding]":
    """The findings of inputs, in order; some as processes of their own, evenly spread."""
    findings = []
    every = max(1, len(drawn) // options.processes) if options.processes else 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as top:
        for place, (number, case) in enumerate(drawn):
            is_alone = bool(every) and place % every == every - 1
            folder = Path(top) / str(number)
            folder.mkdir()
            outcome: Outcome = (started if is_alone else forked)(case, folder)
            if outcome.status < 0 and not is_alone:
                # What is worked out the first time, such as expressions, is kept.
                outcome = forked(case, folder)
            found = problems(case, outcome)
            findings.append(
                Finding(number=number, case=case, outcome=outcome, problems=found, alone=is_alone)
            )
            if found:
                _tell(json.dumps(findings[-1].mapping()))
            if options.verbose:
                _tell(f"{number} {case.command}: {outcome.status}", sys.stderr)
            _clear(folder)
    return findings


def _tell(text: str, file: TextIO | None = None) -> None:
    """A line, at once."""
    (file or sys.stdout).write(f"{text}\n")
    (file or sys.stdout).flush()


def _clear(folder: Path) -> None:
    """Remove what a case left: a thousand folders of pictures would fill a disk."""
    import shutil  # noqa: PLC0415

    shutil.rmtree(folder, ignore_errors=True)
    for name in ("stdout", "stderr"):
        folder.with_name(f"{folder.name}.{name}").unlink(missing_ok=True)


def preload(*, torch: bool = True) -> None:
    """Import all that commands import, so that forks need not."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MPLBACKEND", "agg")
    names = ["experiments", "mistlab", "searchers", "simulators", *(["runtime"] * torch)]
    for name in names:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if _is_needless(module.name):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    importlib.import_module(module.name)
            except ImportError:
                continue


def _is_needless(name: str) -> bool:
    return name.endswith("__main__") or "baselines" in name or "worker" in name or "ray" in name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--processes", type=int, default=0, help="so many as real processes")
    parser.add_argument("--command", nargs="+", help="inputs of these commands alone")
    parser.add_argument("--only", type=int, metavar="N", help="the input of this number alone")
    parser.add_argument("--verbose", action="store_true", help="tell of each input")
    parser.add_argument("--page", type=Path, help="write the page of results there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
