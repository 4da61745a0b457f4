"""Megatron-Bridge's published configurations, and what we would run on the same GPUs."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from time import process_time
from typing import Any

from experiments.cli.commandline import DONE
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, table, table_of
from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.runs_table import TableRow
from experiments.studies.other_configurations import TriedConfiguration, played_s, search, tried
from mistlab.core.files import parse_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, dimension_words

FILE = "published_configurations.yaml"
# For a first look: models of one node.
QUICK_GPUS = 8


def published_configurations(options: argparse.Namespace) -> int:
    """Published configurations beside what we would run: Llama 3 8B and 70B, DeepSeek V3.

    Megatron-Bridge publishes a configuration and a step's seconds for each release. Each is
    predicted and played; then other configurations of the same engine, GPUs, batch and
    arithmetic are predicted, and the best few are played. The fastest as played is what we
    would run.
    """
    study = Study.begin("published_configurations", options)
    cases = [*cases_of_file()]
    if options.quick:
        cases = [cells for cells in cases if int(cells["gpus"]) <= QUICK_GPUS]
    for cells in study.counted(cases, "configurations"):
        study.add(_row(cells))
    return study.end(_report(study.rows), DONE)


def cases_of_file() -> Iterator[Mapping[str, str]]:
    """The published configurations, as cells of a table of runs."""
    text = files("experiments.studies").joinpath(FILE).read_text(encoding="utf-8")
    content = parse_yaml(text, FILE)
    assert isinstance(content, Mapping)
    for row in content["rows"]:
        yield {name: str(value) for name, value in row.items()}


def _row(cells: Mapping[str, str]) -> dict[str, Any]:
    began_s = process_time()
    run = configuration_of(TableRow(file=FILE, number=1, line=1, cells=cells))
    (theirs,) = tried([run])
    theirs_s, found = played_s(theirs.job), search(run)
    ours, ours_s = _fastest([*found.played, (theirs, theirs_s)])
    roomy, roomy_s = _fastest(found.roomy) if found.roomy else (None, None)
    measured_s = float(cells["step_s"])
    return {
        "model": cells["model"],
        "gpus": f"{cells['gpus']} {cells['hardware']}",
        "release": cells["engine"].rpartition(" ")[2],
        "engine": run.engine,
        "measured_s": measured_s,
        "published": {**_figures(theirs, theirs_s), "error": theirs_s / measured_s - 1},
        "ours": _figures(ours, ours_s),
        "gain": theirs_s / ours_s,
        "roomy": None if roomy is None or roomy_s is None else _figures(roomy, roomy_s),
        "predicted": found.predicted,
        "tokens": run.global_batch * run.sequence_length // run.num_gpus,
        TIMING: {"process_s": process_time() - began_s},
    }


def _fastest(
    played: Sequence[tuple[TriedConfiguration, float]],
) -> tuple[TriedConfiguration, float]:
    """The fastest as played; of two that are as fast the last, which is the published one."""
    return min(reversed(played), key=lambda one: one[1])


def _figures(one: TriedConfiguration, seconds: float) -> dict[str, Any]:
    return {
        "words": words_of(one.run, one),
        "predicted_s": one.prediction.iteration_s,
        "played_s": seconds,
        "fits": one.prediction.fits,
        "memory_gib": one.prediction.peak_reserved_bytes / GIB_BYTES,
        "full": one.full,
    }


def words_of(run: Configuration, one: TriedConfiguration) -> str:
    """A configuration in a few words."""
    stage, plan = one.job.plan.stages[0], one.job.plan
    words = [f"tp {stage.tensor_parallel}, pp {plan.num_stages}, dp {stage.data_parallel}"]
    if plan.order != "1f1b":
        words.append(plan.order)
    changed = {
        name: row
        for name, row in DIMENSIONS.items()
        if row.default is not None and not row.is_told and stage.value(name) != row.default
    }
    degrees = [name for name, row in changed.items() if row.axes and not row.shared_by]
    words += [f"{changed[name].symbol} {stage.degree(name)}" for name in degrees]
    words.append(f"micro-batch {stage.micro_batch}")
    words.append(f"ZeRO-{stage.zero}" if run.zero else "ZeRO-0")
    counts = [name for name in counts_of_blocks() if stage.value(name)]
    words += [
        dimension_words(name, stage.value(name), stage.layers)
        for name in dict.fromkeys([*changed, *counts])
        if name not in degrees
    ]
    return ", ".join(words)


def _report(rows: Sequence[Row]) -> Report:
    better = [row for row in rows if row["gain"] > 1]
    beyond = [row for row in better if row["gain"] - 1 > abs(row["published"]["error"])]
    said = (
        f"Of {len(rows)} published configurations, another one is faster as played in "
        f"{len(better)}, by {max((row['gain'] - 1 for row in better), default=0):.1%} at most; in "
        f"{len(beyond)} the gain is larger than the error with which the published one is played."
    )
    return Report(
        title="Published configurations, and what we would run",
        words=[
            said,
            table_of(
                rows,
                ("model", "{model}"),
                ("on", "{gpus}"),
                ("release", "{release}"),
                ("measured s", "{measured_s:.2f}"),
                ("played s", "{published[played_s]:.2f}"),
                ("error", "{published[error]:+.1%}"),
                ("ours s", "{ours[played_s]:.2f}"),
                ("gain", lambda row: f"{row['gain'] - 1:.1%}"),
                ("full", "{ours[full]:.0%}"),
                ("roomy s", lambda row: _roomy(row)[0]),
                ("gain ", lambda row: _roomy(row)[1]),
            ),
            ROOM,
            "Configurations, with the GiB that the fullest GPU reserves by prediction:",
            table(
                ("model", "on", "published", "GiB", "ours", "GiB ", "roomy", "GiB  "),
                [*_configurations(rows)],
            ),
        ],
        summary={
            "faster": len(better),
            "beyond_the_error": len(beyond),
            "gains": [row["gain"] for row in rows],
        },
        pictures=[_picture(rows)],
        beside=[BESIDE],
    )


def _roomy(row: Row) -> tuple[str, str]:
    """The seconds of the configuration that leaves a tenth of the memory, and its gain."""
    if row["roomy"] is None:
        return "-", "-"
    seconds = row["roomy"]["played_s"]
    return f"{seconds:.2f}", f"{row['published']['played_s'] / seconds - 1:.1%}"


def _configurations(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    for row in rows:
        theirs, ours, roomy = row["published"], row["ours"], row["roomy"]
        full = "" if theirs["fits"] else ", does not fit by prediction"
        is_same = ours["words"] == theirs["words"]
        yield (
            row["model"],
            row["gpus"],
            f"{theirs['words']}{full}",
            f"{theirs['memory_gib']:.0f}",
            "the same" if is_same else ours["words"],
            f"{ours['memory_gib']:.0f}",
            *(("-", "-") if roomy is None else _as_last(roomy, theirs, ours)),
        )


def _as_last(roomy: Row, theirs: Row, ours: Row) -> tuple[str, str]:
    """The roomy configuration in words, and its GiB."""
    same = {theirs["words"]: "the published one", ours["words"]: "ours"}
    return str(same.get(roomy["words"], roomy["words"])), f"{roomy['memory_gib']:.0f}"


def _picture(rows: Sequence[Row]) -> Bars:
    def rates(seconds: Sequence[float]) -> list[float | None]:
        return [row["tokens"] / taken for row, taken in zip(rows, seconds, strict=True)]

    return Bars(
        name="published_configurations",
        caption="Tokens a second and GPU: as measured, and both configurations as played.",
        groups=[f"{row['model']} {row['gpus']}" for row in rows],
        series={
            "published, measured": rates([row["measured_s"] for row in rows]),
            "published, played": rates([row["published"]["played_s"] for row in rows]),
            "ours, played": rates([row["ours"]["played_s"] for row in rows]),
        },
        y="tokens a second and GPU",
        log_y=True,
    )


ROOM = """`full` is the share of its memory that ours takes on the fullest GPU by prediction.
`roomy` is the fastest configuration that leaves a tenth of it, as much as peaks are predicted
wrongly by: take it where nobody can try whether ours runs. A loss says what that room costs."""

BESIDE = """## Published, and why this differs

Megatron-Bridge publishes, for each release, a configuration for a model and a GPU and the seconds
of a step measured with it (docs/performance-summary of NVIDIA-NeMo/Megatron-Bridge, Apache-2.0;
recipes of the same tags). Here are the newest pre-training runs of Llama 3 8B and 70B and of
DeepSeek V3 on each GPU for which there are hardware files.

Ours has the same engine, GPUs, batch, sequences and arithmetic. It has other degrees of tensor,
pipeline and expert parallelism, micro-batches, orders of chunks, recomputed blocks, and, where
there is no pipeline, weights sharded over all ranks or inside nodes. What fits by prediction and is
predicted fastest is played, and the fastest as played is ours; where that is no gain, ours is the
published one.

The published configurations were tuned on the machine; ours only here. A gain smaller than the
error of the published one's time may be none. A published one that does not fit by prediction ran,
so memory is predicted too high there: recipes recompute parts of latent attention, and Megatron
recomputes norms, which no plan says. Its time then counts as if it fitted, and ours has to fit."""
