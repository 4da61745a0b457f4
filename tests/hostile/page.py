"""The page of a check with hostile inputs: counts by command and by kind, and what is wrong."""

import argparse
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from experiments.cli.rundir import revision
from experiments.pages.page_tables import IN_A_FILE
from tests.hostile.case import Case
from tests.hostile.run import Outcome

RULES = (
    "An input is wrongly answered if there is a traceback or a crash, another exit status than 0, "
    "1 or 2 (3 of `export`), no end within 10 s of the processor, a growth beyond 1 GiB, a message "
    "of more than 2,000 letters or none, a time, memory or batch that is no finite number above 0 "
    "with exit status 0, or an answer about another size than the input has. Commands whose honest "
    "work is longer than that get only options that they must refuse."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input, what came of it, and what is wrong with that."""

    number: int
    case: Case
    outcome: Outcome
    problems: Sequence[str]
    alone: bool = False

    def mapping(self) -> dict[str, Any]:
        """The finding as plain data, short."""
        return {
            "number": self.number,
            "command": self.case.command,
            "kind": self.case.kind,
            "about": self.case.about[:200],
            "arguments": [word[:80] for word in self.case.arguments],
            "problems": [*self.problems],
            "cpu_s": round(self.outcome.cpu_s, 2),
        }


def page(findings: Sequence[Finding], options: argparse.Namespace) -> str:
    """The page as Markdown."""
    wrong = sum(bool(one.problems) for one in findings)
    alone = sum(one.alone for one in findings)
    day = datetime.now(UTC).date().isoformat()
    made = (
        f"`python -m tests.hostile --inputs {options.inputs} --seed {options.seed} "
        f"--processes {options.processes} --page docs/results/hostile-inputs.md` wrote this page "
        f"on {day}, of revision `{revision()}`, with Python {platform.python_version()}."
    )
    result = (
        f"**{len(findings):,} hostile inputs, {wrong} of them wrongly answered.** {alone} ran as "
        f"processes of their own, the others in forks of one that has everything imported. {RULES}"
    )
    longest_s = max(one.outcome.cpu_s for one in findings)
    grown_mib = max(one.outcome.grown_bytes for one in findings) / 2**20
    most = (
        f"The longest took {longest_s:.1f} s of the processor, the largest grew by "
        f"{grown_mib:,.0f} MiB."
    )
    by_command = _table("command", findings, lambda one: one.case.command)
    by_kind = _table("kind", findings, lambda one: one.case.kind)
    apart = [IN_A_FILE, "", *by_command]
    words = [
        "# Hostile inputs",
        "",
        made,
        "",
        result,
        "",
        *by_kind,
        "",
        most,
        "By command:",
        "",
        *apart,
        "",
    ]
    return "\n".join(words)


def _table(name: str, findings: Sequence[Finding], of: Callable[[Finding], str]) -> Iterator[str]:
    yield f"| {name} | inputs | status 0 | 1 | 2 | others | wrong | longest, s |"
    yield "|---|---|---|---|---|---|---|---|"
    for value in sorted({of(one) for one in findings}):
        some = [one for one in findings if of(one) == value]
        statuses = Counter(one.outcome.status for one in some)
        cells = [statuses.pop(status, 0) for status in (0, 1, 2)]
        wrong = sum(bool(one.problems) for one in some)
        longest_s = max(one.outcome.cpu_s for one in some)
        numbers = [len(some), *cells, sum(statuses.values()), wrong]
        yield f"| {value} | {' | '.join(map(str, numbers))} | {longest_s:.1f} |"
