"""One tuning problem of a sweep (a cell), and the result row with the plan that a searcher found
for it.

Problems and answers are plain values, so that any process on any machine can solve a problem.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from joblib import parallel_config

from experiments.bench.bench import Bench, Entry, decided
from experiments.pages.tables import TIMING, Row
from experiments.tuning.search_rows import rows_of
from experiments.tuning.search_words import need_words
from experiments.tuning.smallest import nearest
from mistlab.core.values import InputError, to_mapping
from mistlab.job.job import job_to_mapping
from mistlab.job.search import Budget, Problem
from mistlab.plan.plan_words import plan_line
from mistlab.plan.space import SearchSpace
from searchers.savings import why_empty

# The columns of a result row about the search, with the names that ``compare_searchers`` uses.
SAID = (
    *("status", "reason", "predicted_s", "predicted_s_low", "predicted_s_high", "simulated_s"),
    *("headroom_bytes", "plan_evaluations", "stage_evaluations", "lower_bound_s", "gap"),
)
# The figures of a cluster that may be given in place of the hardware's own.
OVERRIDES = (
    *("memory_gib", "keep_free_gib", "host_memory_gib"),
    *("intra_node_gbytes_per_s", "inter_node_gbytes_per_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One tuning problem of a sweep: the workload and cluster, the search space, the searcher, and
    its budget.
    """

    problem: Problem
    space: SearchSpace
    searcher: str
    budget: Budget
    seed: int
    play: bool

    def asked(self) -> dict[str, Any]:
        """The columns of a result row that describe the problem and the searcher."""
        work, cluster = self.problem.workload, self.problem.cluster
        overrides = {name: own for name in OVERRIDES if (own := getattr(cluster, name)) is not None}
        return {
            "model": work.model.name,
            "hardware": cluster.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            **overrides,
            "sequence_length": work.sequence_length,
            "global_batch": work.global_batch,
            "attention": work.attention,
            "precision": work.precision,
            "engine": ",".join(self.space.engines),
            "space": self.space.name,
            "searcher": self.searcher,
        }

    def key(self, sources: str) -> str:
        """A key under which the problem's answer is stored. It is equal for equal problems and
        equal source code; of files that a model names, the contents count.
        """
        graph = self.problem.workload.model.graph_file
        content = {
            "cell": to_mapping(self),
            "graph": None if graph is None else _digest(Path(graph).read_bytes()),
            "sources": sources,
        }
        return _digest(json.dumps(content, sort_keys=True).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAnswer:
    """The result row of a tuning problem, and the contents of its plan file if a plan fits."""

    row: Row
    job: Mapping[str, Any] | None = None


def solved(cell: Cell) -> CellAnswer:
    """Search for a plan, simulate it, and return the result row; an invalid problem gets a row,
    too.
    """
    began_s, began_cpu_s = perf_counter(), process_time()
    try:
        # A problem is solved in one process: a search that would start further processes leaves the
        # cores to other problems.
        with parallel_config(backend="sequential"):
            row, job = _searched(cell)
    except InputError as error:
        row, job = {**cell.asked(), "status": "REFUSED", "reason": str(error)}, None
    timing = {"wall_s": perf_counter() - began_s, "cpu_s": process_time() - began_cpu_s}
    return CellAnswer(row={**row, TIMING: timing}, job=job)


def _searched(cell: Cell) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    problem, space = cell.problem, cell.space
    problem.cluster.peak_flop_per_s(problem.workload.precision)
    if reason := why_empty(problem, space):
        return {**cell.asked(), "status": "INFEASIBLE", "reason": reason}, None
    bench = Bench.of(problem)
    bench.warm_up(space)
    entry = bench.search(cell.searcher, space, cell.budget, cell.seed, lambda _: None)
    if entry.is_interrupted:
        raise KeyboardInterrupt
    if cell.play:
        entry = decided(bench.played(entry))
    (best_row,) = rows_of([entry], bench)
    row = {**cell.asked(), **{name: best_row[name] for name in SAID}}
    if entry.answer is None:
        return {**row, "reason": _why_none(entry, bench)}, None
    plan, prediction = entry.answer
    return {
        **row,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s / problem.cluster.num_gpus,
        "share_of_peak": prediction.mfu,
        "memory_bytes": round(prediction.peak_reserved_bytes + bench.outside_bytes),
        "chosen_by": "played" if entry.is_played else "predicted",
        "plan": plan_line(plan),
    }, job_to_mapping(bench.job(plan))


def _why_none(entry: Entry, bench: Bench) -> str:
    """The reason why a search has found no plan: its own or, if it gives none, how much memory the
    smallest plan needs.
    """
    if entry.result.reason or entry.result.status != "INFEASIBLE":
        return entry.result.reason
    return need_words(nearest(bench, entry.space))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]
