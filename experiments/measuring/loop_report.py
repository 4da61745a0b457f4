"""What the whole loop says: predictions beside measurements, and plans beside baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from experiments.frame.charts import Bars
from experiments.frame.study import Report
from experiments.frame.tables import TIMING, Row, table
from experiments.measuring.contenders import OURS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The runs of one plan: the median of their medians, and their range as a share of it."""

    name: str
    system: str
    ranks: int
    plan: Mapping[str, Any]
    predicted_s: float
    seconds: float
    spread: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Measured":
        """What the rows of a plan say, of which one at least ran."""
        seconds = [row[TIMING]["median_s"] for row in rows if TIMING in row]
        first = rows[0]
        return cls(
            name=first["name"],
            system=first["system"],
            ranks=first["ranks"],
            plan=first["plan"],
            predicted_s=first["predicted_s"],
            seconds=median(seconds),
            spread=(max(seconds) - min(seconds)) / median(seconds),
        )

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


def report(rows: Sequence[Row], hardware: Hardware) -> Report:
    """The table, the error of predictions, whether their order is right, and speedups."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    ran = [Measured.of(own) for own in by_name.values() if any(TIMING in row for row in own)]
    words = [f"Measured on {hardware.description or hardware.name}."]
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
        summary[TIMING] = _judged(own) | {"speedups": _speedups(ran)}
        words += _words(summary[TIMING], len(own))
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
        beside=[BESIDE],
    )


def _judged(own: Sequence[Measured]) -> dict[str, Any]:
    """The errors of predictions, and pairs of plans far apart whose order is predicted right."""
    errors = [abs(one.error) for one in own]
    pairs = [
        (one, other) if one.seconds < other.seconds else (other, one)
        for one, other in combinations(own, 2)
    ]
    apart = [(one, other) for one, other in pairs if other.seconds > APART * one.seconds]
    return {
        "median_error": median(errors),
        "largest_error": max(errors),
        "pairs_apart": len(apart),
        "pairs_right": sum(one.predicted_s < other.predicted_s for one, other in apart),
    }


def _speedups(ran: Sequence[Measured]) -> dict[str, float]:
    """How many times as fast the plan predicted fastest is as each baseline's, measured."""
    best = min((one for one in ran if one.system == OURS), key=lambda one: one.predicted_s)
    return {one.name: one.seconds / best.seconds for one in ran if one.system != OURS}


def _words(judged: Mapping[str, Any], plans: int) -> list[str]:
    errors = (
        f"Predicted beside measured: {judged['median_error']:.1%} in the median of {plans} plans, "
        f"{judged['largest_error']:.1%} at most."
    )
    order = (
        f"Of {judged['pairs_apart']} pairs of plans whose times differ by more than "
        f"{APART - 1:.0%}, {judged['pairs_right']} are predicted in the right order."
    )
    faster = [
        f"The plan that is predicted fastest is {ratio:.2f} times as fast as {name}'s best."
        for name, ratio in judged["speedups"].items()
    ]
    return [f"{errors} {order}", *faster]
