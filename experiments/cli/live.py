"""Shows the progress of a search on standard error as a single line, which is overwritten if
standard error is a terminal.
"""

import math
import sys
from dataclasses import dataclass, field
from time import perf_counter

from searchers.strategy import STAGES_A_PLAN, Ledger

REFRESH_S = 0.25
# The seconds between progress lines in a file or a pipe, where lines cannot be overwritten: after
# a better plan was found, and as long as none is found.
LINE_EVERY_S = 2.0
NOTHING_NEW_EVERY_S = 10.0


def _is_terminal() -> bool:
    """Whether standard error is a terminal at the moment."""
    return sys.stderr.isatty()


@dataclass(slots=True, kw_only=True)
class Live:
    """Shows the progress of a searcher, at most a few times per second."""

    searcher: str
    is_terminal: bool = field(default_factory=_is_terminal)
    _told_s: float = field(default_factory=perf_counter, init=False)
    _best_s: float = field(default=math.inf, init=False)

    def __call__(self, ledger: Ledger) -> None:
        """Take note of a search's state, and show it unless the last progress line was too
        recent.
        """
        now_s = perf_counter()
        if now_s - self._told_s < self._wait_s(ledger):
            return
        self._told_s, self._best_s = now_s, ledger.best_s
        self._tell(self._state(ledger), stays=not self.is_terminal)

    def end(self, text: str) -> None:
        """Show how the search ended, in a line that stays on the terminal."""
        self._tell(f"{self.searcher}: {text}", stays=True)

    def _wait_s(self, ledger: Ledger) -> float:
        """The least number of seconds between two progress lines."""
        if self.is_terminal:
            return REFRESH_S
        return LINE_EVERY_S if ledger.best_s < self._best_s else NOTHING_NEW_EVERY_S

    def _state(self, ledger: Ledger) -> str:
        done = ledger.plan_evaluations + ledger.stage_evaluations / STAGES_A_PLAN
        wall_s = ledger.wall_s
        best = "nothing fits yet" if ledger.best is None else f"best {ledger.best_s:.3f} s"
        if ledger.gap is not None:
            best += f", gap {ledger.gap:.1%}"
        rate = f"{done / wall_s:,.0f} evaluations/s"
        return f"{self.searcher}: {best}, {rate}, {_left(ledger)}"

    def _tell(self, text: str, *, stays: bool) -> None:
        begin = "\r\033[K" if self.is_terminal else ""
        print(f"{begin}{text}", end="\n" if stays else "", file=sys.stderr, flush=True)


def _left(ledger: Ledger) -> str:
    """What is left of a search's budget as text: seconds, evaluations, or both where the budget
    limits both. No seconds are told from evaluations, whose rate differs much during a search.
    """
    limits = [] if ledger.budget.seconds is None else [f"{ledger.seconds_left:.0f} s"]
    if (evaluations := ledger.evaluations_left) is not None:
        limits.append(f"{evaluations:,} evaluations")
    return f"{' or '.join(limits)} left"
