"""Tables and sentences about scaling."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from experiments.pages.tables import TIMING, Row, gib, number, table, table_of, yes_no

# Published: a trained model's rate on 16K GPUs.
LLAMA3_405B_TFLOP_PER_S = 400
MICROSECONDS_A_SECOND = 1e6

Curves = Mapping[int, Sequence[tuple[int, float]]]


def words(
    chapters: Mapping[str, Sequence[Row]], weak: Curves, strong: Curves, options: argparse.Namespace
) -> list[str]:
    """All chapters, one after another."""
    return [
        *_published(chapters["published"]),
        *_searched(chapters, weak, strong, options),
        *_largest(chapters["largest search"][0]),
        *_trained(chapters["trained"]),
        *_latency(chapters["latency"], options.hardware),
    ]


def _published(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Weak scaling as published"
    yield table_of(
        rows,
        ("billion", "{billion_parameters:g}"),
        ("heads", "{heads}"),
        ("hidden", "{hidden}"),
        ("layers", "{layers}"),
        ("tp", "{tensor_parallel}"),
        ("pp", "{pipeline_parallel}"),
        ("GPUs", "{gpus}"),
        ("batch", "{global_batch}"),
        ("TFLOP/s", "{published_tflop_per_s_per_gpu:.0f}"),
        ("predicted", "{tflop_per_s_per_gpu:.0f}"),
        ("of peak", "{published_share_of_peak:.0%}"),
        ("predicted", "{share_of_peak:.0%}"),
        ("PFLOP/s, by its TFLOP/s", "{published_pflop_per_s:.1f}"),
        ("predicted", "{pflop_per_s:.1f}"),
        ("micro-batch", "{micro_batch}"),
        ("error", "{error:+.1%}"),
    )
    errors = [abs(row["error"]) for row in rows]
    yield (
        f"Predicted times are off by {mean(errors):.2%} on average and {max(errors):.1%} at most. "
        "TFLOP/s are a GPU's, with recomputed arithmetic counted, as published; PFLOP/s of all "
        "GPUs are these times the GPUs. The micro-batch was not published: it is the fastest of "
        "1, 2, 4 and 8 that fits."
    )


def _searched(
    chapters: Mapping[str, Sequence[Row]], weak: Curves, strong: Curves, options: argparse.Namespace
) -> Iterator[str]:
    rows = [*chapters["weak"], *(r for r in chapters["strong"] if r["slower_network"] == 1)]
    yield f"## Searched plans of {options.model} on {options.hardware}"
    yield table_of(
        rows,
        ("scaling", "{chapter}"),
        ("GPUs", "{gpus:,}"),
        ("batch", "{global_batch}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("TFLOP/s", lambda row: number(row.get("tflop_per_s_per_gpu"), ".0f")),
        ("90 % within", _within),
        ("of peak", lambda row: number(row.get("share_of_peak"), ".0%")),
        ("search CPU s", "{timing[search_cpu_s]:.1f}"),
        ("plan", lambda row: row.get("plan", "nothing fits")),
    )
    notes = dict.fromkeys(note for row in rows for note in row.get("notes", ()))
    yield (
        "Rates are predicted, and nobody has run these plans: the share of the peak is as sure as "
        f"the bounds say. {' '.join(f'{note[0].upper()}{note[1:]}.' for note in notes)}".rstrip()
    )
    yield "What a GPU does, over what it does in one node:"
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    curves = {"weak": weak.get(1, ())} | {
        curve_name(factor): points for factor, points in strong.items()
    }
    yield table(
        ("scaling", *(f"{count:,}" for count in gpus)),
        [
            (name, *(number(dict(points).get(count), ".2f") for count in gpus))
            for name, points in curves.items()
        ],
    )


def _within(row: Row) -> str:
    """The bounds of a searched plan's rate."""
    if row["iteration_s"] is None:
        return ""
    return f"{row['tflop_per_s_low']:.0f} to {row['tflop_per_s_high']:.0f}"


def curve_name(factor: int) -> str:
    """The name of a curve of strong scaling, by how much slower the network is."""
    return "strong" if factor == 1 else f"strong, network {factor} times slower"


def _largest(row: Row) -> Iterator[str]:
    yield "## The largest search"
    yield (
        f"GPT-3 175B on {row['gpus']:,} GPUs, batch {row['global_batch']}, in space "
        f"{row['space']}: {row[TIMING]['search_s']:.0f} s of the clock and "
        f"{row[TIMING]['search_cpu_s']:.0f} s of one core, compilation included, to a plan of "
        f"{row['iteration_s']:.2f} s ({row.get('plan')})."
    )


def _trained(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Llama 3 405B"
    yield (
        f"On {rows[0]['gpus']:,} H100: tensor parallel 8 with sequence parallelism, 16 stages, "
        f"data parallel 128, ZeRO-1, sequence 8192, batch {rows[0]['global_batch']}, nothing "
        "recomputed. "
        "With several chunks a stage, 1F1B is interleaved."
    )
    yield table_of(
        [{**row, **_spent(row)} for row in rows],
        ("chunks", "{chunks}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("bounds", "{low_s:.2f} to {high_s:.2f}"),
        ("TFLOP/s a GPU", "{tflop_per_s_per_gpu:.0f}"),
        ("of peak", "{share_of_peak:.0%}"),
        *((name, f"{{{name}:.0%}}") for name in ("computing", "communicating", "waiting")),
        ("fullest GiB", lambda row: gib(row["peak_reserved_bytes"], ".1f")),
        ("fits", lambda row: yes_no(row["fits"])),
    )
    yield (
        "*Computing* and *communicating* are the slowest stage's shares of the iteration; "
        "*waiting* is the rest: passages through other stages, first and last micro-batches, and "
        "the step."
    )
    best = max((row for row in rows if row["fits"]), key=lambda row: row["share_of_peak"])
    low, high = (
        best["tflop_per_s_per_gpu"] * best["iteration_s"] / best[key] for key in ("high_s", "low_s")
    )
    yield (
        f"Published: over {LLAMA3_405B_TFLOP_PER_S} TFLOP/s a GPU. Predicted at best: "
        f"{best['tflop_per_s_per_gpu']:.0f}, with bounds from {low:.0f} to {high:.0f}."
    )


def _spent(row: Row) -> dict[str, float]:
    """Of an iteration, the shares in which the slowest stage computes, communicates and waits."""
    computing, communicating = (
        row["terms_s"][name] / row["iteration_s"]
        for name in ("computation_s", "exposed_communication_s")
    )
    waiting = 1 - sum([computing, communicating])
    return {"computing": computing, "communicating": communicating, "waiting": waiting}


def _latency(rows: Sequence[Row], hardware: str) -> Iterator[str]:
    yield "## Latency of a ring"
    yield (
        f"An all-reduce of a kilobyte on {hardware}, in microseconds. A ring of n ranks has "
        "2 (n - 1) hops; a tree has two for each level of nodes. The library takes the faster."
    )
    yield table_of(
        rows,
        ("GPUs", "{gpus:,}"),
        ("hops of a ring", lambda row: f"{2 * (row['gpus'] - 1):,}"),
        ("ring us", lambda row: _microseconds(row["ring_s"])),
        ("tree us", lambda row: _microseconds(row["tree_s"])),
        ("fastest us", lambda row: _microseconds(row["fastest_s"])),
    )


def _microseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * MICROSECONDS_A_SECOND, ",.0f")
