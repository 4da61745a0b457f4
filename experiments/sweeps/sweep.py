"""A sweep from its file to its table: solves the cells that no earlier run has kept."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, Countdown, progress
from experiments.pages.study import Study
from experiments.sweeps.cell import Cell, CellAnswer, solved
from experiments.sweeps.sweep_file import load_cells
from experiments.sweeps.sweep_page import report
from experiments.sweeps.workers import Workers, here, workers
from mistlab.core.files import format_yaml, read_json
from mistlab.core.values import InputError
from mistlab.job.search import Budget

# In haste: cells from the beginning of the sweep, and what their searchers may ask.
QUICK_CELLS = 4
QUICK = Budget(evaluations=200)
# Folders of the run folder: an answer a file, a plan a file.
CELLS, PLANS = "cells", "plans"


def sweep(options: argparse.Namespace) -> int:
    """Many tuning problems at once: models by clusters by batches, each cell as tune would solve
    it.

    A file lists the problems. They are solved by processes of this machine or of a Ray cluster,
    and the answers are the same for any number of them. Each cell is kept as it ends: after a
    stop the same command goes on with what is missing. What a killed worker was at is done
    again.
    """
    if options.jobs is not None and options.jobs < 1:
        message = f"--jobs {options.jobs}: give at least 1"
        raise InputError(message)
    cells = load_cells(options.sweep, options.seed)
    if options.quick:
        cells = [replace(cell, budget=QUICK) for cell in cells[:QUICK_CELLS]]
    with workers(options.jobs, options.cluster) as pool:
        study = Study.begin("sweep", options)
        answers = Answers(study, [cell.key(here()["sources"]) for cell in cells])
        is_interrupted = answers.fill(cells, pool)
    for answer in answers.in_order():
        study.add(answer.row)
    answers.write_plans()
    page = report(study.rows, len(cells), is_interrupted=is_interrupted)
    if is_interrupted:
        return study.end(page, INTERRUPTED)
    lacks = len(study.rows) < len(cells)
    has_plan = any(answer.job is not None for answer in answers.in_order())
    return study.end(page, NO_ANSWER if lacks or not has_plan else DONE)


class Answers:
    """The answers of a sweep's cells: those that an earlier run has kept in its folder, and new
    ones, each kept in a file of its own as it ends."""

    def __init__(self, study: Study, keys: Sequence[str]) -> None:
        self._study = study
        self._keys = keys
        for folder in (CELLS, PLANS):
            (study.path / folder).mkdir(exist_ok=True)
        paths = [study.path / CELLS / f"{key}.json" for key in keys]
        known = ((place, _kept(path)) for place, path in enumerate(paths))
        self._answers = {place: answer for place, answer in known if answer is not None}

    def fill(
        self, cells: Sequence[Cell], pool: Workers, call: Callable[[Cell], CellAnswer] = solved
    ) -> bool:
        """Solve the cells that have no answer; whether that was interrupted."""
        missing = [place for place in range(len(cells)) if place not in self._answers]
        if self._answers:
            progress(f"cells: {len(self._answers)} of {len(cells)} are kept from before")
        countdown = Countdown(what="cells", total=len(missing), clock=self._study.clock)
        try:
            for number, answer in pool.answers(call, [cells[place] for place in missing]):
                self._keep(missing[number], answer)
                countdown.step()
        except KeyboardInterrupt:
            progress(
                f"interrupted: {len(self._answers)} of {len(cells)} cells are done and kept: the "
                "same command goes on"
            )
            return True
        return False

    def in_order(self) -> Iterator[CellAnswer]:
        """All answers, in the order of the cells."""
        for place in sorted(self._answers):
            yield self._answers[place]

    def write_plans(self) -> None:
        """Write a plan file for each answer that has one, named by the number of its row; those of
        an earlier run's rows go."""
        for path in (self._study.path / PLANS).glob("[0-9]*.yaml"):
            path.unlink()
        for number, answer in enumerate(self.in_order(), 1):
            if answer.job is not None:
                self._study.keep_text(f"{PLANS}/{number:04d}.yaml", format_yaml(answer.job))

    def _keep(self, place: int, answer: CellAnswer) -> None:
        self._answers[place] = answer
        text = json.dumps({"row": answer.row, "job": answer.job}, allow_nan=False)
        self._study.keep_text(f"{CELLS}/{self._keys[place]}.json", f"{text}\n")


def _kept(path: Path) -> CellAnswer | None:
    """The answer in a file; none where there is no file, a damaged one, or one that was refused:
    what was missing, such as a file on a worker's machine, may be there by now."""
    if not path.is_file():
        return None
    try:
        content: Mapping[str, Any] = read_json(path)
        answer = CellAnswer(row=content["row"], job=content["job"])
        return None if answer.row["status"] == "REFUSED" else answer
    except (InputError, KeyError) as error:
        progress(f"warning: {path}: {error}: this cell is done again")
        return None
