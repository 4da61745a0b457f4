"""The report of measured speedups: every system's best plan, case by case."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from experiments.pages.study import Report
from experiments.pages.tables import TIMING, Row, number, table
from experiments.speedup.contenders import OURS

HEAD = (
    *("model", "GiB", "batch", "system"),
    *("measured s", "spread", "predicted s", "ours is faster by"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupCase:
    """A model, a memory cap and a batch; each is measured by itself."""

    model: str
    cap_gib: float
    batch: int

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.model}, {self.cap_gib:g} GiB, batch {self.batch}"


def report_of(
    cases: Sequence[SpeedupCase], rows: Sequence[Row], systems: Sequence[str], left: int
) -> Report:
    """The table of all cases; ``left`` of them are not finished."""
    lines: list[Sequence[object]] = []
    gains: dict[str, list[float]] = {system: [] for system in systems if system != OURS}
    for case in cases:
        found = {system: _best_s(rows, case, system) for system in systems}
        ours = found.get(OURS)
        for system in systems:
            seconds, spread, predicted_s = found[system] or (None, None, None)
            gain = None
            if ours is not None and ours[0] and seconds and system != OURS:
                gain = seconds / ours[0]
                gains[system].append(gain)
            lines.append(
                (
                    *(case.model, f"{case.cap_gib:g}", case.batch, system),
                    _tried(rows, case, system) if seconds is None else f"{seconds:.3f}",
                    number(spread, ".1%"),
                    number(predicted_s, ".3f"),
                    number(gain, ".2f", "x", none=""),
                )
            )
    means = {system: geometric_mean(ratios) for system, ratios in gains.items() if ratios}
    words = [table(HEAD, lines)]
    words += [f"over {system}: {mean:.2f}x in geometric mean" for system, mean in means.items()]
    if left:
        words.append(f"{left} of {len(cases)} cases are not finished.")
    return Report(
        title="Measured speedups", words=words, summary={TIMING: {"speedups": means}, "left": left}
    )


def _tried(rows: Sequence[Row], case: SpeedupCase, system: str) -> str:
    """The outcomes of the trials of a system of which none ran."""
    outcomes = dict.fromkeys(
        row["outcome"] for row in _rows_of(rows, case, system) if row["phase"] == "trial"
    )
    return "; ".join(outcomes) or "-"


def _rows_of(rows: Sequence[Row], case: SpeedupCase, system: str) -> list[Row]:
    of = (case.model, case.cap_gib, case.batch, system)
    return [
        row for row in rows if (row["model"], row["cap_gib"], row["batch"], row["system"]) == of
    ]


def _best_s(
    rows: Sequence[Row], case: SpeedupCase, system: str
) -> tuple[float, float, float | None] | None:
    """The median of the repeats of a system's best plan, their spread, and its prediction."""
    own = [row for row in _rows_of(rows, case, system) if TIMING in row]
    last = [row for row in own if row["phase"] == "repeat"] or own[:1]
    if not last:
        return None
    seconds = [row[TIMING]["median_s"] for row in last]
    middle = median(seconds)
    return middle, (max(seconds) - min(seconds)) / middle, last[0]["predicted_s"]
