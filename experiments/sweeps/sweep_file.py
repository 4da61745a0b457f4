"""Reads a sweep file: lists that multiply and single cases become cells, a tuning problem each.

models: [llama-350m, gpt3-1.3b]
clusters: [{hardware: l4-24gb, nodes: 1, gpus_per_node: 2}]
global_batches: [8, 16]
spaces: [mist]
budget: {evaluations: 1000}
cases:
  - {model: gpt3-7b, cluster: {hardware: a100-40gb, nodes: 1, gpus_per_node: 8}, global_batch: 64}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from experiments.bench.search_options import space_for, usual_space
from experiments.cli.commandline import PROBLEM
from experiments.sweeps.cell import Cell
from mistlab.core.files import read_yaml
from mistlab.core.values import (
    FieldError,
    InputError,
    bounded,
    check_fields,
    from_mapping,
    near_matches,
    refuse,
    shown,
    within,
)
from mistlab.engines.engine import Precision
from mistlab.job.job import MODEL, hardware_from, model_from, profile_from, space_from, with_groups
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Attention, ModelSpec, Workload
from searchers.registry import SEARCHERS

# Plans that each cell's searcher may ask about: never seconds, so that answers are equal on every
# machine. Mist's search of a few GPUs ends by itself before.
BUDGET = Budget(evaluations=10_000)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tuning problem; what it leaves out is the only item of the list above it."""

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
    """The content of a sweep file: every combination of the lists, and the single ``cases``.

    Without ``spaces`` each model is searched in its usual one, as ``tune`` has it. Each searcher of
    each combination may spend ``budget``. With ``play`` the event simulator plays
    the best plans, as ``tune`` has it.
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
    cases: tuple[Case, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for entry in fields(self):
            _check_list(entry.name, getattr(self, entry.name))
        for place, name in enumerate(self.searchers):
            _check_searcher(f"searchers[{place}]", name)
        needed = ("models", "clusters", "global_batches")
        given = [name for name in needed if getattr(self, name) is not None]
        missing = [name for name in needed if name not in given]
        if missing and (given or self.cases is None):
            refuse(missing[0], "missing: give a list, or single problems under cases alone")

    def combinations(self) -> Iterator[tuple[Any, ...]]:
        """Every combination of the lists."""
        if self.models is None:
            return
        yield from product(
            *(self.models, self.clusters or (), self.global_batches or ()),
            *(self.sequence_lengths, self.attentions, self.precisions),
            *(self.spaces or (None,), self.searchers),
        )

    def singles(self) -> Iterator[tuple[Any, ...]]:
        """The cases, in the same order of parts."""
        for place, case in enumerate(self.cases or ()):
            with within(f"cases[{place}]"):
                yield (
                    *(case.model, case.cluster, case.global_batch),
                    _only("sequence_length", case.sequence_length, self.sequence_lengths),
                    _only("attention", case.attention, self.attentions),
                    _only("precision", case.precision, self.precisions),
                    _only("space", case.space, self.spaces or (None,)),
                    _only("searcher", case.searcher, self.searchers),
                )


def load_cells(path: Path, seed: int) -> list[Cell]:
    """The cells of a sweep file; paths in it are relative to its folder, and errors begin with its
    name."""
    mapping = read_yaml(path)
    try:
        return cells_of(sweep_from_mapping(mapping, path.parent), seed)
    except InputError as error:
        message = f"{path}: {error}"
        raise InputError(message) from None


def sweep_from_mapping(mapping: Mapping[str, Any], folder: Path) -> SweepFile:
    """A sweep from the content of its file in ``folder``."""
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
    """The cells of a sweep, in order. Searchers with a space of their own have one cell for all
    spaces, and a case that is a combination of the lists too is one cell."""
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
    for place, entry in enumerate(plain):
        with _at(f"{name}[{place}]"):
            yield value_of(entry)


@contextmanager
def _at(holder: str, own: str = "") -> Iterator[None]:
    """Let errors of the block name their place in the file, in place of a plan file's ``own``."""
    try:
        yield
    except FieldError as error:
        path = error.path.removeprefix(own).removeprefix(".")
        raise FieldError(path, error.problem).within(holder) from None
    except InputError as error:
        raise FieldError(holder, str(error)) from None


def _model(plain: Any, folder: Path) -> ModelSpec:
    with _at("", MODEL):
        return model_from(plain, folder)


def _cluster(plain: Any, folder: Path) -> Cluster:
    if not isinstance(plain, Mapping):
        refuse("", f"{shown(plain)} is not a cluster: give hardware, nodes and gpus_per_node")
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
        "model": lambda own: _model(own, folder),
        "cluster": lambda own: _cluster(own, folder),
        "space": lambda own: space_from(own, folder),
    }
    for key, value_of in parts.items():
        if key in resolved:
            with _at(key):
                resolved[key] = value_of(resolved[key])
    return from_mapping(Case, resolved)


def _only(name: str, own: Item | None, listed: Sequence[Item]) -> Item:
    """What a case says, or the only item of the list that it leaves out."""
    if own is not None:
        return own
    if len(listed) > 1:
        refuse(name, "missing: give it, as the list above has several")
    return listed[0]


def _check_list(name: str, items: object) -> None:
    """Refuse an empty list, and an item that stands twice."""
    if not isinstance(items, tuple):
        return
    if not items:
        refuse(name, "is empty: give at least one item, or leave the key out")
    for place, item in enumerate(items):
        if item in items[:place]:
            first = items.index(item)
            refuse(f"{name}[{place}]", f"stands there twice, as {name}[{first}] too: remove one")


def _check_searcher(path: str, name: str) -> None:
    if name not in SEARCHERS:
        refuse(path, f"{shown(name)} is unknown{near_matches(name, SEARCHERS)}")
