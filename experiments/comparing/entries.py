"""Searchers compared on one problem, one after another, with their results kept in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.cli.live import Live
from experiments.cli.rundir import RunDirectory
from experiments.cli.search_options import space_for
from experiments.comparing.bench import Bench, Entry
from experiments.comparing.search_rows import entry_of, rows_of
from mistlab.job.job import dump_job
from mistlab.job.search import Budget
from mistlab.plan.space import SearchSpace
from searchers.strategy import INTERRUPTED as SEARCH_INTERRUPTED


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Searchers on one problem, and what they have found so far."""

    bench: Bench
    space: SearchSpace
    budget: Budget
    seed: int
    directory: RunDirectory
    entries: list[Entry] = field(default_factory=list)
    is_interrupted: bool = False

    def run(self, names: Sequence[str], earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Let each search in turn, unless an earlier row says what it finds.

        An interrupt ends it all, and what was found stays.
        """
        ended = {row["searcher"]: row for row in earlier if row["reason"] != SEARCH_INTERRUPTED}
        try:
            for name in names:
                self._search(name, ended.get(name))
                self._keep()
                if self.entries[-1].is_interrupted:
                    self.is_interrupted = True
                    return
        except KeyboardInterrupt:
            self.is_interrupted = True
            self._keep()

    def _search(self, name: str, earlier: Mapping[str, Any] | None) -> None:
        live, space = Live(searcher=name), space_for(name, self.space)
        if earlier is None:
            self.bench.warm_up(space)
            entry = self.bench.search(name, space, self.budget, self.seed, live)
            came = f"in {entry.result.wall_s:.2f} s"
        else:
            entry = entry_of(earlier, space, self.bench, self.seed)
            came = "taken up from an earlier run"
        self.entries.append(entry)
        self.entries[-1] = self.bench.played(entry)
        best = "no plan" if entry.answer is None else f"{entry.answer[1].iteration_s:.3f} s"
        live.end(f"{entry.result.status}, {best}, {came}")

    def _keep(self) -> None:
        """Write what is known, so that nothing is lost."""
        self.directory.write_rows(self.rows())
        for entry in self.entries:
            if entry.answer is not None:
                name = entry.searcher.replace(":", "-")
                path = self.directory.path / "plans" / f"{name}.yaml"
                path.parent.mkdir(exist_ok=True)
                dump_job(self.bench.job(entry.answer[0]), path)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each searcher."""
        return rows_of(self.entries, self.bench)
