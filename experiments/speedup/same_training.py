"""Checks that all training systems compute the same: their losses are compared with this package's,
and their configurations shown side by side.

All systems begin with the same weights, see the same tokens and step with the same settings, so
their losses agree up to rounding. A run whose losses do not is not a measurement of the same work.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pages.tables import TIMING, Row, table

# For each precision, by what share a loss may differ from this package's in the same step. The
# first three losses of systems on CPUs differ by at most 1.3e-6 in 32 bits and 3e-5 in bf16.
ROUNDING: Mapping[str, float] = {"fp32": 1e-5, "tf32": 5e-4, "bf16": 5e-4, "fp16": 5e-4}
CONFIGURATION = "configuration"


def held_against(
    trial: dict[str, Any], losses: Sequence[float] | None, precision: str
) -> dict[str, Any]:
    """The result of a run after comparing its losses with ``losses``; if they differ, the outcome
    says so, and the time is removed. Without ``losses`` nothing is compared.
    """
    if losses is None or "losses" not in trial:
        return trial
    for step, (theirs, ours) in enumerate(zip(trial["losses"], losses, strict=False), start=1):
        # Written so that a loss that is NaN also counts as different.
        if not abs(theirs - ours) <= ROUNDING[precision] * abs(ours):
            kept = {name: value for name, value in trial.items() if name != TIMING}
            outcome = f"trains something else: loss {theirs:.6g} in step {step}, ours is {ours:.6g}"
            return {**kept, "outcome": outcome}
    return trial


def configurations(rows: Sequence[Row]) -> list[str]:
    """The configuration of each system's best plan side by side, as the system's own objects report
    it.
    """
    by_system = {row["system"]: row for row in rows if CONFIGURATION in row}
    if not by_system:
        return []
    parts = [row[CONFIGURATION] for row in by_system.values()]
    names = [name for name in parts[0] if name != "system"]
    lines = [[name.replace("_", " "), *(part[name] for part in parts)] for name in names]
    lines.append(["plan", *(row["plan_line"] for row in by_system.values())])
    return [
        "How each system trained, as its own objects say it, and the plan of its last run:",
        table(["", *(part["system"] for part in parts)], lines),
    ]
