"""The report of the whole loop: predictions beside measurements, and plans beside baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

from experiments.pages.charts import Bars
from experiments.pages.groups import grouped
from experiments.pages.study import Report
from experiments.pages.tables import TIMING, Row, table
from experiments.speedup.contenders import OURS
from mistlab.machine.hardware import Hardware

# Two plans whose times differ by less are not ranked.
APART = 1.25
HEAD = (
    *("plan", "ranks", "dp x tp x pp", "micro-batch", "ZeRO", "recomputed", "offloaded"),
    *("measured s", "spread", "predicted s", "error"),
)
BESIDE = (
    "Each run has processes of its own, and runs take turns, so that a machine that slows down "
    "slows every plan down. Of a run the first two steps are left out; *measured* is the median of "
    "the runs' medians, *spread* their range as a share of it."
)

PRIORITY = (
    "Runs had real-time priority, because the machine had other work. Linux leaves a twentieth of "
    "each second to other work all the same, and predictions do not know of that."
)
ON_ONE_CORE = (
    "On a CPU one core does all that a GPU's streams do side by side: arithmetic, collectives, "
    "copies, and the host's own work. Predictions add these up. Rates are those of data that come "
    "from memory, as in steps of many blocks."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan and the median step of each of its runs."""

    name: str
    system: str
    is_trial: bool
    ranks: int
    plan: Mapping[str, Any]
    predicted_s: float
    runs_s: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Measured":
        """The measurement in the rows of a plan, of which one at least ran."""
        names = ("name", "system", "is_trial", "ranks", "plan", "predicted_s")
        runs_s = tuple(row[TIMING]["median_s"] for row in rows if TIMING in row)
        return cls(**{name: rows[0][name] for name in names}, runs_s=runs_s)

    @property
    def seconds(self) -> float:
        """The median of the runs."""
        return median(self.runs_s)

    @property
    def spread(self) -> float:
        """The range of the runs as a share of their median."""
        return (max(self.runs_s) - min(self.runs_s)) / self.seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.seconds - 1

    @property
    def line(self) -> tuple[object, ...]:
        """Its line of the table."""
        stages = self.plan["stages"]
        first = stages[0]
        degrees = (first["data_parallel"], first["tensor_parallel"], len(stages))
        blocks = sum(stage["layers"] for stage in stages)
        recomputed = sum(stage.get("checkpointed_layers", 0) for stage in stages)
        ratios = [stage.get("offload", {}) for stage in stages]
        kinds = sorted({name for one in ratios for name, ratio in one.items() if ratio})
        return (
            *(self.name, self.ranks, " x ".join(map(str, degrees))),
            first["micro_batch"],
            "/".join(str(stage.get("zero", 0)) for stage in stages),
            f"{recomputed} of {blocks}",
            ", ".join(kinds) or "-",
            *(f"{self.seconds:.3f}", f"{self.spread:.0%}", f"{self.predicted_s:.3f}"),
            f"{self.error:+.1%}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times as fast our best plan is as a baseline's; ``low`` and ``high`` set the slowest
    run of one against the fastest of the other. ``trials`` are plans tried, ours and theirs."""

    over: str
    trials: tuple[int, int]
    ratio: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The speedup in words: a win, a loss, or neither beyond the runs' spread."""
        verdict = "a win" if self.low > 1 else "a loss" if self.high < 1 else "within the spread"
        ours, theirs = self.trials
        return (
            f"The fastest of {ours} searched plans is {self.ratio:.2f} times as fast as the "
            f"fastest of {theirs} of {self.over} ({self.low:.2f} to {self.high:.2f} from run to "
            f"run): {verdict}."
        )


def report(rows: Sequence[Row], hardware: Hardware, *, has_priority: bool) -> Report:
    """The table, the error of predictions, whether their order is right, and speedups."""
    by_name = grouped(rows, lambda row: row["name"])
    ran = [Measured.of(own) for own in by_name.values() if any(TIMING in row for row in own)]
    words = [f"Measured on {hardware.description or hardware.name}."]
    if has_priority:
        words.append(PRIORITY)
    words += [table(HEAD, [one.line for one in ran])] if ran else []
    words += [
        f"{row['name']}: {row['outcome']}"
        for own in by_name.values()
        for row in own[:1]
        if not any(TIMING in row for row in own)
    ]
    own = [one for one in ran if one.system == OURS]
    summary: dict[str, Any] = {"plans": len(own)}
    if own:
        speedups = _speedups(ran)
        summary[TIMING] = _judged(own) | {"speedups": [asdict(one) for one in speedups]}
        words += _words(summary[TIMING], len(own)) + [one.words for one in speedups]
    picture = Bars(
        name="whole_loop",
        caption="Seconds of a step, predicted and measured.",
        groups=[one.name for one in ran],
        series={
            "predicted": [one.predicted_s for one in ran],
            "measured": [one.seconds for one in ran],
        },
        y="s",
    )
    return Report(
        title="The whole loop on one machine",
        words=words,
        summary=summary,
        pictures=[picture] if ran else [],
        beside=[BESIDE, ON_ONE_CORE] if hardware.gpu.cores else [BESIDE],
    )


def _judged(own: Sequence[Measured]) -> dict[str, Any]:
    """The errors of predictions, and pairs of plans far apart whose order is predicted right."""
    errors = [abs(one.error) for one in own]
    pairs = [
        (one, other) if one.seconds < other.seconds else (other, one)
        for one, other in combinations(own, 2)
    ]
    apart = [(one, other) for one, other in pairs if other.seconds > APART * one.seconds]
    wrong = [(one, other) for one, other in apart if one.predicted_s >= other.predicted_s]
    return {
        "median_error": median(errors),
        "largest_error": max(errors),
        "pairs_apart": len(apart),
        "pairs_right": len(apart) - len(wrong),
        "pairs_wrong": [[one.name, other.name] for one, other in wrong],
    }


def _speedups(ran: Sequence[Measured]) -> list[Speedup]:
    """The fastest of our searched plans over the fastest that each baseline tried, measured."""
    tried = grouped((one for one in ran if one.is_trial), lambda one: one.system)
    best = {system: min(own, key=lambda one: one.seconds) for system, own in tried.items()}
    ours = best.pop(OURS, None)
    if ours is None:
        return []
    return [
        Speedup(
            over=system,
            trials=(len(tried[OURS]), len(tried[system])),
            ratio=theirs.seconds / ours.seconds,
            low=min(theirs.runs_s) / max(ours.runs_s),
            high=max(theirs.runs_s) / min(ours.runs_s),
        )
        for system, theirs in best.items()
    ]


def _words(judged: Mapping[str, Any], plans: int) -> list[str]:
    errors = (
        f"Predicted beside measured: {judged['median_error']:.1%} in the median of {plans} plans, "
        f"{judged['largest_error']:.1%} at most."
    )
    order = (
        f"Of {judged['pairs_apart']} pairs of plans whose times differ by more than "
        f"{APART - 1:.0%}, {judged['pairs_right']} are predicted in the right order."
    )
    wrong = ", ".join(f"{one} before {other}" for one, other in judged["pairs_wrong"])
    return [f"{errors} {order}" + (f" Not so: {wrong}." if wrong else "")]
