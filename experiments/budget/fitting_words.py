"""Whether a plan fits, in words and pictures, with the changes that were tried in its place."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.bench.problem import room_words
from experiments.budget.changes import Changed
from experiments.pages.charts import Drawn
from experiments.pages.study import Report, Study
from experiments.pages.tables import gib, table, table_of, yes_no
from experiments.tuning import search_plots
from mistlab.core.units import GIB_BYTES
from mistlab.cost.memory import allocator_of
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.plan.plan_words import plan_words

# A changed plan, tried in place of one that does not fit, and what it would cost.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A changed plan with its prediction: which kind of try it was, and what was changed, in
    words."""

    changed: Changed
    kind: str
    words: str
    prediction: Prediction

    @property
    def job(self) -> Job:
        """The plan with what it is for."""
        return self.changed.job

    @property
    def group(self) -> str:
        """The kinds of its changes."""
        return " and ".join(change.kind for change in self.changed.changes)


# Whether a plan fits, in words and as pictures of what fills its memory.


Row = Mapping[str, Any]

# Peaks of memory are predicted to within about this share.
UNSURE = 0.1
NARROW = "Peaks are predicted wrongly by up to a tenth or so, so try it before you rely on it."


def report_of(study: Study, asked: Tried, cheapest: Tried | None) -> Report:
    """The report of the study."""
    row = study.rows[0]
    work, cluster = asked.job.workload, asked.job.cluster
    title = f"Will it fit: {work.model.name} on {cluster.num_gpus} {cluster.hardware.name}"
    others = [one for one in study.rows if one["kind"] not in ("asked", "cheapest")]
    words = [
        " ".join([_verdict(row), f"Plans may take {room_words(cluster)}."]),
        "; ".join(plan_words(asked.job.plan)[:2]) + ".",
        _memory(row),
    ]
    if not row["fits"]:
        words += [_changes(others), *_cheapest(study, cheapest)]
    return Report(
        title=title,
        words=words,
        summary={"fits": row["fits"], "cheapest": None if cheapest is None else cheapest.words},
        pictures=[*_pictures(asked, cheapest)],
    )


def _verdict(row: Row) -> str:
    needs, room = row["reserved_bytes"] / GIB_BYTES, row["room_bytes"] / GIB_BYTES
    host, host_room = row["host_bytes"] / GIB_BYTES, row["host_room_bytes"] / GIB_BYTES
    where = f"the fullest GPU, of stage {row['stage']}, needs {needs:.1f} of {room:.1f} GiB"
    if row["fits"]:
        left = f"Yes: {where}, {room - needs:.1f} GiB are left."
        return f"{left} {NARROW}" if room - needs < UNSURE * room else left
    if needs > room:
        return f"No: {where}, {needs - room:.1f} GiB too much."
    return f"No: {where}, but a node's host memory needs {host:,.1f} of {host_room:,.1f} GiB."


def _memory(row: Row) -> str:
    """What fills the fullest GPU, the most first."""
    held = sorted(row["memory"].items(), key=lambda item: -item[1])
    kept = row["reserved_bytes"] - sum(row["memory"].values())
    lines = [(name, size) for name, size in held if size]
    return table(
        ["held by", "GiB"], [(name, gib(size)) for name, size in (*lines, ("allocator", kept))]
    )


def _changes(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("change", "{change}"),
        ("fits", lambda row: yes_no(row["fits"])),
        ("fullest GPU (GiB)", lambda row: gib(row["reserved_bytes"], ".1f")),
        ("host (GiB)", lambda row: gib(row["host_bytes"], ",.0f")),
        ("iteration (s)", "{iteration_s:.3f}"),
        ("slower by", "{slower_by:+.1%}"),
    )


def _cheapest(study: Study, cheapest: Tried | None) -> Iterator[str]:
    if cheapest is None:
        most = "two" if study.options.quick else "four"
        yield (
            f"Nothing that was tried makes it fit: up to {most} changes at once, and two on up to "
            "32 times the GPUs and on other hardware of the catalogue. Search for another plan: "
            "python -m experiments.tune."
        )
        return
    row = study.rows[-1]
    yield (
        f"The cheapest change that makes it fit: {cheapest.words}. An iteration takes "
        f"{row['iteration_s']:.3f} s, {row['slower_by']:+.1%} against the plan if it did fit, and "
        f"the fullest GPU {row['reserved_bytes'] / GIB_BYTES:.1f} of "
        f"{row['room_bytes'] / GIB_BYTES:.1f} GiB. The plan is plan.yaml, beside this run's rows."
    )


def _pictures(asked: Tried, cheapest: Tried | None) -> Iterator[Drawn]:
    found = {
        "will_it_fit": ("as asked", asked),
        "will_it_fit-changed": ("with the cheapest change", cheapest),
    }
    for name, (words, one) in found.items():
        if one is not None:
            cluster = one.job.cluster
            outside_bytes = allocator_of(cluster).outside_bytes
            draw = partial(search_plots.memory, one.prediction, outside_bytes, cluster.memory_bytes)
            caption = f"A GPU of each stage at its fullest moment, {words}."
            yield Drawn(name=name, caption=caption, draw=draw)
