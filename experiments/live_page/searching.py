"""Searches that report their progress: ever better plans, and a rising lower bound."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from experiments.bench.bench import Bench, Entry, judged
from experiments.live_page.plan_figures import figures_of
from experiments.live_page.texts import AskedProblem
from experiments.tuning.search_words import smallest_words, verdict
from experiments.tuning.smallest import smallest
from experiments.tuning.tune import OF_WHOLE_PLANS, SEARCHER
from mistlab.core.values import InputError, reject
from mistlab.cost.memory import room_of_plan
from mistlab.job.search import Budget
from searchers.savings import why_empty
from searchers.strategy import Ledger

Tell = Callable[[Mapping[str, Any]], None]
# The seconds between two progress reports of a search, and between two plans that it reports.
EVERY_S = 0.25
# How many seconds a search takes by default; the searches of a Pareto frontier share them.
SECONDS = 30.0
MOST_SECONDS = 600.0
# The largest number of nodes that is tried for a Pareto frontier.
MOST_NODES = 4096


@dataclass(slots=True, kw_only=True)
class Progress:
    """Reports the progress of a search from time to time: its best plan so far, its lower bound,
    and how many plans it has predicted.
    """

    bench: Bench
    tell: Tell
    _told_s: float = field(default=0.0, init=False)
    _best_s: float = field(default=float("inf"), init=False)

    def __call__(self, ledger: Ledger) -> None:
        """Take note of a search's state, and report it unless the last report was too recent."""
        now_s = perf_counter()
        is_first = ledger.best is not None and self._best_s == float("inf")
        if not is_first and now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        event: dict[str, Any] = {
            "event": "progress",
            "wall_s": ledger.wall_s,
            "plans": ledger.plan_evaluations,
            "stages": ledger.stage_evaluations,
            "best_s": ledger.best_s if ledger.best else None,
            "bound_s": ledger.bound_s or None,
            "gap": ledger.gap,
        }
        if ledger.best is not None and ledger.prediction is not None:
            if ledger.best_s < self._best_s:
                event["figures"] = figures_of(self.bench.job(ledger.best), ledger.prediction)
            self._best_s = ledger.best_s
        self.tell(event)


def searched_plan(asked: AskedProblem, seconds: float, seed: int, tell: Tell) -> dict[str, Any]:
    """The best plan that a search finds, and whether it is proven best; ``tell`` receives the
    progress.
    """
    bench, entry = _searched(asked, seconds, seed, tell)
    result = entry.result
    end: dict[str, Any] = {
        "status": result.status,
        "searcher": entry.searcher,
        "wall_s": result.wall_s,
        "plans": result.plan_evaluations,
        "bound_s": result.lower_bound_s,
        "gap": result.gap,
        "history": [
            {"iteration_s": one.iteration_s, "wall_s": one.wall_s} for one in result.history
        ],
        "front": [
            {"iteration_s": point.iteration_s, "memory_bytes": point.memory_bytes}
            for point in entry.front
        ],
    }
    if entry.answer is None:
        reason = [result.reason] if result.reason else []
        is_proven = result.status == "INFEASIBLE"
        if result.status != "REFUSED":
            near = smallest(bench, entry.space)
            reason += smallest_words(near, entry.space.name, is_proven=is_proven)
        return {**end, "verdict": " ".join(reason), "figures": None}
    plan, prediction = entry.answer
    return {
        **end,
        "verdict": verdict(entry),
        "reason": result.reason,
        "simulated_s": entry.answer_simulated_s,
        "figures": figures_of(bench.job(plan), prediction),
    }


def frontier(asked: AskedProblem, seconds: float, seed: int, tell: Tell) -> dict[str, Any]:
    """The best plans on other numbers of nodes, as a choice between time and money: a search for
    each number, with equal shares of the time.
    """
    sizes = _sizes(asked)
    points = []
    for nodes in sizes:
        cluster = _with_nodes(asked, nodes)
        point: dict[str, Any] = {"event": "point", "nodes": nodes, "gpus": cluster.cluster.num_gpus}
        try:
            bench, entry = _searched(cluster, seconds / len(sizes), seed, lambda event: None)
        except InputError as error:
            point["why"] = str(error)
        else:
            if entry.answer is None:
                point["why"] = entry.result.reason or "nothing fits"
            else:
                plan, prediction = entry.answer
                outside = float(bench.outside_bytes)
                point |= {
                    "iteration_s": prediction.iteration_s,
                    "iteration_s_low": prediction.iteration_s_low,
                    "iteration_s_high": prediction.iteration_s_high,
                    "memory_bytes": prediction.peak_reserved_bytes + outside,
                    "status": entry.result.status,
                    "figures": figures_of(bench.job(plan), prediction),
                    "room_bytes": float(room_of_plan(cluster.cluster, plan).min()) + outside,
                }
        points.append(point)
        tell(point)
    return {"points": len(points)}


def _searched(asked: AskedProblem, seconds: float, seed: int, tell: Tell) -> tuple[Bench, Entry]:
    """The result of a search for a problem. If the searcher can ask the predictor for costs of
    single stages, it does so; otherwise it asks for whole plans.
    """
    if reason := why_empty(asked.problem, asked.space):
        batch, gpus = asked.workload.global_batch, asked.cluster.num_gpus
        reject(f"global_batch: {batch} on {gpus} GPUs: {reason}")
    bench = Bench.of(asked.problem)
    bench.warm_up(asked.space)
    budget = Budget(seconds=min(seconds, MOST_SECONDS))
    hears = Progress(bench=bench, tell=tell)
    entry = bench.search(SEARCHER, asked.space, budget, seed, hears)
    if entry.result.status == "REFUSED":
        entry = bench.search(OF_WHOLE_PLANS, asked.space, budget, seed, hears)
    if not entry.is_interrupted:
        entry = bench.played(entry)
    return bench, judged([entry]) or entry


def _sizes(asked: AskedProblem) -> list[int]:
    """The numbers of nodes to search: from a quarter of the given number to four times as many, in
    powers of two.
    """
    nodes = asked.cluster.nodes
    sizes = {max(1, nodes // 4), max(1, nodes // 2), nodes, 2 * nodes, 4 * nodes}
    return sorted(size for size in sizes if size <= max(nodes, MOST_NODES))


def _with_nodes(asked: AskedProblem, nodes: int) -> AskedProblem:
    problem = asked.problem
    return replace(asked, problem=replace(problem, cluster=replace(problem.cluster, nodes=nodes)))
