"""The command ``sweep``: solves the tuning problems that a file lists, unless an earlier run has
solved them, and writes a table.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

from experiments.bench.search_options import space_for, usual_space
from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, PROBLEM, Countdown, progress
from experiments.pages.charts import Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, gib, number, table_of
from experiments.sweeps.cell import Cell, CellAnswer, solved
from experiments.sweeps.workers import Workers, here, workers
from mistlab.core.files import about, format_yaml, read_json, read_yaml
from mistlab.core.values import (
    THIS_VALUE,
    FieldError,
    InputError,
    bounded,
    check_fields,
    from_mapping,
    near_matches,
    refuse,
    reject,
    shown,
    within,
)
from mistlab.engines.engine import Precision
from mistlab.job.job import MODEL, hardware_from, model_from, profile_from, with_groups
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.space_files import space_from
from mistlab.plan.workload import Attention, ModelSpec, Workload
from searchers.registry import SEARCHERS

# How many problems a quick run solves, each with a small budget.
QUICK_CELLS = 4
QUICK = Budget(evaluations=200)
# Folders in the folder of a run: one with a file for each answer, one with a file for each plan.
CELLS, PLANS = "cells", "plans"


def sweep(options: argparse.Namespace) -> int:
    """Solve many tuning problems: every combination of models, clusters and batches in a file, each
    as the command tune would.

    A file lists the problems. Processes of this machine or of a Ray cluster solve them, and the
    answers do not depend on the number of processes. Each answer is stored as soon as it is there:
    after an interruption, the same command solves the problems that are left. A problem whose
    worker is killed is solved again.
    """
    if options.jobs is not None and options.jobs < 1:
        reject(f"--jobs {options.jobs}: is too few processes: give at least 1")
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
    """The answers to the tuning problems of a sweep, both new ones and those that an earlier run
    has stored. A new answer is stored in a file at once.
    """

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
        """Solve the problems that have no answer yet; returns whether the work was interrupted."""
        missing = [place for place in range(len(cells)) if place not in self._answers]
        if self._answers:
            progress(f"cells: {len(self._answers)} of {len(cells)} are kept from before")
        countdown = Countdown(what="cells", total=len(missing), clock=self._study.clock)
        try:
            for turn, answer in pool.answers(call, [cells[place] for place in missing]):
                self._keep(missing[turn], answer)
                countdown.step()
        except KeyboardInterrupt:
            progress(
                f"interrupted: {len(self._answers)} of {len(cells)} cells are done and kept: the "
                "same command goes on"
            )
            return True
        return False

    def in_order(self) -> Iterator[CellAnswer]:
        """The answers to all tuning problems, in the order of the problems."""
        for index in sorted(self._answers):
            yield self._answers[index]

    def write_plans(self) -> None:
        """Write a plan file for each answer with a plan, named by the number of its row; plan files
        of an earlier run are deleted.
        """
        for path in (self._study.path / PLANS).glob("[0-9]*.yaml"):
            path.unlink()
        for row_number, answer in enumerate(self.in_order(), 1):
            if answer.job is not None:
                self._study.keep_text(f"{PLANS}/{row_number:04d}.yaml", format_yaml(answer.job))

    def _keep(self, index: int, answer: CellAnswer) -> None:
        self._answers[index] = answer
        text = json.dumps({"row": answer.row, "job": answer.job}, allow_nan=False)
        self._study.keep_text(f"{CELLS}/{self._keys[index]}.json", f"{text}\n")


def _kept(path: Path) -> CellAnswer | None:
    """The answer in a file. None if the file is missing or damaged; also if the answer was a
    refusal, since its cause (such as a file that a worker lacked) may have been removed.
    """
    if not path.is_file():
        return None
    try:
        content: Mapping[str, Any] = read_json(path)
        answer = CellAnswer(row=content["row"], job=content["job"])
        return None if answer.row["status"] == "REFUSED" else answer
    except (InputError, KeyError) as error:
        progress(f"warning: {path}: {error}: this cell is done again")
        return None


# Makes the page of a sweep: how the search of each problem ended, a table, and a picture.


# The columns that describe the problem, with their headings; a column with a single value is left
# out.
ASKED = {
    "model": "model",
    "hardware": "hardware",
    "nodes": "nodes",
    "gpus_per_node": "GPUs a node",
    "memory_gib": "GiB a GPU",
    "keep_free_gib": "GiB kept free",
    "host_memory_gib": "GiB a host",
    "intra_node_gbytes_per_s": "GB/s in a node",
    "inter_node_gbytes_per_s": "GB/s of a node",
    "sequence_length": "tokens",
    "global_batch": "batch",
    "attention": "attention",
    "precision": "precision",
    "space": "space",
    "searcher": "searcher",
}
# The columns that may be the horizontal axis of a picture; the one with the most distinct values is
# taken.
AXES = ("global_batch", "gpus", "sequence_length")
# How many curves can be told apart in one picture.
MOST_CURVES = 16


def report(rows: Sequence[Row], cells: int, *, is_interrupted: bool = False) -> Report:
    """The page for the result rows made so far, out of the given number of problems."""
    varied = [name for name in ASKED if len({row.get(name) for row in rows}) > 1]
    return Report(
        title="Sweep",
        words=[*_paragraphs(rows, cells, varied, is_interrupted), _table(rows, varied)],
        summary={
            "cells": cells,
            "done": len(rows),
            "interrupted": is_interrupted,
            "statuses": dict(sorted(Counter(row["status"] for row in rows).items())),
            TIMING: {name: sum(row[TIMING][name] for row in rows) for name in ("wall_s", "cpu_s")},
        },
        pictures=_pictures(rows, varied),
    )


def _paragraphs(
    rows: Sequence[Row], cells: int, varied: Sequence[str], is_interrupted: bool
) -> Iterator[str]:
    if is_interrupted:
        yield f"Interrupted: {len(rows)} of {cells} cells are done. The same command goes on."
    elif len(rows) < cells:
        yield (
            f"{cells - len(rows)} of {cells} cells have no row: the workers that tried them were "
            "killed, perhaps for memory. The same command tries them again: give fewer --jobs."
        )
    statuses = Counter(row["status"] for row in rows)
    ended = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    if rows:
        yield f"{len(rows)} cells: {ended}."
        alone = [name for name in ASKED if name in rows[0] and name not in varied]
        same = [f"{ASKED[name]} {rows[0][name]}" for name in alone]
        if same:
            yield f"In all rows: {', '.join(same)}."


def _table(rows: Sequence[Row], varied: Sequence[str]) -> str:
    return table_of(
        rows,
        *((ASKED[name], lambda row, name=name: row.get(name, "-")) for name in varied),
        ("status", "{status}"),
        ("predicted s", lambda row: number(row.get("predicted_s"), ".3f")),
        ("played s", lambda row: number(row.get("simulated_s"), ".3f")),
        ("tokens/s a GPU", lambda row: number(row.get("tokens_per_s_per_gpu"), ",.0f")),
        ("GiB", lambda row: gib(row.get("memory_bytes"), ".1f")),
        ("plan, or why there is none", _plan_or_reason),
    )


def _plan_or_reason(row: Row) -> str:
    return (row.get("plan") or row.get("reason") or "").replace("|", "/")


def _pictures(rows: Sequence[Row], varied: Sequence[str]) -> list[Lines]:
    """Pictures of the tokens per second and GPU over the column that varies most, with a curve for
    each combination of the other columns.
    """
    points = [(_numbers(row), row) for row in rows if row.get("tokens_per_s_per_gpu")]
    if not points:
        return []
    axis = max(AXES, key=lambda name: len({numbers[name] for numbers, _ in points}))
    names = [name for name in varied if name not in (axis, "nodes", "gpus_per_node")]
    if axis != "gpus" and {"nodes", "gpus_per_node"} & {*varied}:
        names.append("gpus")
    curves: dict[str, list[tuple[float, float]]] = {}
    for numbers, row in points:
        label = _label({**row, **numbers}, names)
        curves.setdefault(label, []).append((numbers[axis], row["tokens_per_s_per_gpu"]))
    if len(curves) > MOST_CURVES:
        curves = {}
        for numbers, row in points:
            point = (numbers[axis], row["tokens_per_s_per_gpu"])
            curves.setdefault(row["model"], []).append(point)
    curves = {label: sorted(own) for label, own in curves.items()}
    is_many = any(a[0] == b[0] for own in curves.values() for a, b in pairwise(own))
    return [
        Lines(
            name="sweep",
            caption="What a GPU does by the best plan of each cell.",
            curves=curves,
            x={"gpus": "GPUs", "global_batch": "global batch"}.get(axis, "tokens of a sequence"),
            y="tokens/s a GPU",
            log_x=True,
            log_y=True,
            dots=[*curves] if is_many else (),
        )
    ]


def _numbers(row: Row) -> dict[str, int]:
    gpus = row["nodes"] * row["gpus_per_node"]
    return {"gpus": gpus, **{name: row[name] for name in AXES if name != "gpus"}}


def _label(row: dict[str, Any], names: Sequence[str]) -> str:
    labels = (f"{row[name]} GPUs" if name == "gpus" else str(row.get(name)) for name in names)
    return ", ".join(labels)


# Reads a sweep file, which lists tuning problems: every combination of the items of its lists, and
# single cases.
#
#     models: [llama-350m, gpt3-1.3b]
#     clusters: [{hardware: l4-24gb, nodes: 1, gpus_per_node: 2}]
#     global_batches: [8, 16]
#     spaces: [mist]
#     budget: {evaluations: 1000}
#     cases:
#       - {model: gpt3-7b, cluster: {hardware: a100-40gb, nodes: 1, gpus_per_node: 8},
#          global_batch: 64}


# The budget of the searcher for each problem. It counts evaluations, never seconds, so that answers
# do not depend on the machine. Mist's search for a few GPUs ends earlier by itself.
BUDGET = Budget(evaluations=10_000)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """A single tuning problem under ``cases`` in a sweep file. A key that it omits takes its value
    from the list for that key, which must have one item.
    """

    model: ModelSpec
    cluster: Cluster
    global_batch: int = field(metadata=bounded(minimum=1))
    sequence_length: int | None = field(default=None, metadata=bounded(minimum=1))
    attention: Attention | None = None
    precision: Precision | None = None
    space: SearchSpace | None = None
    searcher: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.searcher is not None:
            _check_searcher("searcher", self.searcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """The contents of a sweep file: lists, whose items are combined to problems in every way, and
    single problems (``cases``).

    Without ``spaces``, each model is searched in its default space, as by ``tune``. ``budget`` is
    the budget of each search. With ``play``, the event simulator plays the best plans, as in
    ``tune``.
    """

    models: tuple[ModelSpec, ...] | None = None
    clusters: tuple[Cluster, ...] | None = None
    global_batches: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    sequence_lengths: tuple[int, ...] = field(
        default=(PROBLEM["sequence_length"],), metadata=bounded(minimum=1)
    )
    attentions: tuple[Attention, ...] = (PROBLEM["attention"],)
    precisions: tuple[Precision, ...] = (PROBLEM["precision"],)
    spaces: tuple[SearchSpace, ...] | None = None
    searchers: tuple[str, ...] = ("mist",)
    budget: Budget = BUDGET
    play: bool = True
    cases: tuple[SweepCase, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for entry in fields(self):
            _check_list(entry.name, getattr(self, entry.name))
        for index, name in enumerate(self.searchers):
            _check_searcher(f"searchers[{index}]", name)
        needed = ("models", "clusters", "global_batches")
        given = [name for name in needed if getattr(self, name) is not None]
        missing = [name for name in needed if name not in given]
        if missing and (given or self.cases is None):
            refuse(missing[0], "missing: give a list, or problems under cases and no lists")

    def combinations(self) -> Iterator[tuple[Any, ...]]:
        """Every combination of one item from each list."""
        if self.models is None:
            return
        yield from product(
            *(self.models, self.clusters or (), self.global_batches or ()),
            *(self.sequence_lengths, self.attentions, self.precisions),
            *(self.spaces or (None,), self.searchers),
        )

    def singles(self) -> Iterator[tuple[Any, ...]]:
        """The single problems under ``cases``, each with its parts in the same order as in a
        combination of list items.
        """
        for index, case in enumerate(self.cases or ()):
            with within(f"cases[{index}]"):
                yield (
                    *(case.model, case.cluster, case.global_batch),
                    _only("sequence_length", case.sequence_length, self.sequence_lengths),
                    _only("attention", case.attention, self.attentions),
                    _only("precision", case.precision, self.precisions),
                    _only("space", case.space, self.spaces or (None,)),
                    _only("searcher", case.searcher, self.searchers),
                )


def load_cells(path: Path, seed: int) -> list[Cell]:
    """The tuning problems of a sweep file; paths in it are relative to its folder, and error
    messages begin with its name.
    """
    mapping = read_yaml(path)
    with about(path):
        return cells_of(sweep_from_mapping(mapping, path.parent), seed)


def sweep_from_mapping(mapping: Mapping[str, Any], folder: Path) -> SweepFile:
    """A sweep from the contents of its file; ``folder`` is the folder that paths are relative
    to.
    """
    resolved = dict(mapping)
    lists: Mapping[str, Callable[[Any], Any]] = {
        "models": lambda plain: _model(plain, folder),
        "clusters": lambda plain: _cluster(plain, folder),
        "spaces": lambda plain: space_from(plain, folder),
        "cases": lambda plain: _case(plain, folder),
    }
    for name, value_of in lists.items():
        if name in resolved:
            resolved[name] = [*_each(name, resolved[name], value_of)]
    return from_mapping(SweepFile, resolved)


def cells_of(sweep: SweepFile, seed: int) -> list[Cell]:
    """The tuning problems of a sweep, in order. A searcher that has a search space of its own gets
    one problem in place of one for each space. A single case that is also a combination of list
    items is solved once.
    """
    cells = []
    for model, cluster, batch, length, attention, precision, space, searcher in (
        *sweep.combinations(),
        *sweep.singles(),
    ):
        workload = Workload(
            model=model,
            sequence_length=length,
            global_batch=batch,
            attention=attention,
            precision=precision,
        )
        cells.append(
            Cell(
                problem=Problem(workload=workload, cluster=cluster),
                space=space_for(searcher, space or space_of(usual_space(model))),
                searcher=searcher,
                budget=sweep.budget,
                seed=seed,
                play=sweep.play,
            )
        )
    return list(dict.fromkeys(cells))


def _each(name: str, plain: Any, value_of: Callable[[Any], Any]) -> Iterator[Any]:
    if not isinstance(plain, list):
        refuse(name, f"{shown(plain)} is not a list: write its items between [ and ]")
    for index, entry in enumerate(plain):
        with _at(f"{name}[{index}]"):
            yield value_of(entry)


@contextmanager
def _at(holder: str, prefix: str = "") -> Iterator[None]:
    """In the ``with`` block, error messages name the place in the sweep file."""
    try:
        yield
    except FieldError as error:
        path = error.path.removeprefix(prefix).removeprefix(".")
        raise FieldError(path, error.problem).within(holder) from None
    except InputError as error:
        raise FieldError(holder, str(error)) from None


def _model(plain: Any, folder: Path) -> ModelSpec:
    with _at("", MODEL):
        return model_from(plain, folder)


def _cluster(plain: Any, folder: Path) -> Cluster:
    if not isinstance(plain, Mapping):
        refuse(
            THIS_VALUE, f"{shown(plain)} is not a cluster: give hardware, nodes and gpus_per_node"
        )
    with _at("", "cluster"):
        resolved = dict(with_groups(plain, folder))
    for key, value_from in (("hardware", hardware_from), ("profile", profile_from)):
        if key in resolved:
            with _at(key, f"cluster.{key}"):
                resolved[key] = value_from(resolved[key], folder)
    return from_mapping(Cluster, resolved)


def _case(plain: Any, folder: Path) -> Any:
    if not isinstance(plain, Mapping):
        return plain
    resolved = dict(plain)
    parts: Mapping[str, Callable[[Any], Any]] = {
        "model": lambda value: _model(value, folder),
        "cluster": lambda value: _cluster(value, folder),
        "space": lambda value: space_from(value, folder),
    }
    for key, value_of in parts.items():
        if key in resolved:
            with _at(key):
                resolved[key] = value_of(resolved[key])
    return from_mapping(SweepCase, resolved)


def _only(name: str, given: Item | None, listed: Sequence[Item]) -> Item:
    """The value of a key in a single case; if the case omits the key, the only item of the list for
    that key.
    """
    if given is not None:
        return given
    if len(listed) > 1:
        refuse(
            name,
            f"missing, and the sweep's list for it has {len(listed)} items: give this case one of "
            "them",
        )
    return listed[0]


def _check_list(name: str, items: object) -> None:
    """Refuse a list that is empty, and a list in which an item occurs twice."""
    if not isinstance(items, tuple):
        return
    if not items:
        refuse(name, "is empty: give at least one item, or leave the key out")
    for index, item in enumerate(items):
        if item in items[:index]:
            first = items.index(item)
            refuse(f"{name}[{index}]", f"is listed twice, as {name}[{first}] too: remove one")


def _check_searcher(path: str, name: str) -> None:
    if name not in SEARCHERS:
        refuse(path, f"{shown(name)} is unknown{near_matches(name, SEARCHERS)}")
