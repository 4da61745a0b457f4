"""Checks random plans for races, hidden waits and hanging collectives, and writes a page.

python -m benchmarks.sanitized_plans [PLANS] [--reductions] [--page PAGE] checks each plan by the
three checks of ``sanitize``: all ranks' collectives, races on its first and its last kind of rank,
and waits of the host on one of the two. With ``--reductions``, every plan has a gradient reduction
that is not a plain all-reduce. After an interruption the same call continues, unless the source has
changed.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from experiments.cli.rundir import revision
from experiments.pages.page_tables import write_page
from mistlab.reduction.reduction_costs import Reduction
from runtime.checks.fake.fake_device import register
from tests.runtime.drawn_runs import drawn_run, reducing_run

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs/sanitized_plans"
# The number of findings that the page quotes in full.
MOST_TOLD = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of the checks of one plan."""

    seed: int
    order: str
    gpus: int
    splits_tokens: bool
    splits_sequences: bool
    has_experts: bool
    drops: bool
    ranks: int
    races: Sequence[str]
    waits: Sequence[str]
    collectives: dict[str, int]
    seconds: float
    reduction: str = ""


def rows_of(seeds: Iterable[int], *, reduces: bool = False) -> Iterator[Row]:
    """The results of the checks of each seed's random plan. With ``reduces``, the plan's gradient
    reduction is not a plain all-reduce.
    """
    register()
    for seed in seeds:
        begun = perf_counter()
        run = reducing_run(seed) if reduces else drawn_run(seed)
        ranks = sorted({run.ranks[0], run.ranks[-1]})
        yield Row(
            seed=seed,
            order=run.plan.order,
            gpus=run.plan.num_gpus,
            splits_tokens=run.splits_tokens,
            splits_sequences=run.splits_sequences,
            has_experts=run.has_experts,
            drops=run.work.model.dropout > 0,
            ranks=len(ranks),
            races=tuple(one for rank in ranks for one in run.races(rank)),
            waits=tuple(run.waits(ranks[seed % len(ranks)])),
            collectives=dict(run.collectives()),
            seconds=perf_counter() - begun,
            reduction=_words_of(run.work.reduction) if reduces else "",
        )


def _words_of(how: Reduction) -> str:
    """The kind of a gradient reduction, with the options that change which collectives it calls."""
    parts = {
        how.kind: True,
        "compressed": how.compressor.kind != "none",
        "trimmed": how.trimmed,
        "asynchronous": how.asynchronous,
    }
    return " ".join(word for word, has in reversed(parts.items()) if has)


def page(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    troubles = sum((Counter(row.collectives) for row in rows), Counter[str]())
    orders = Counter(row.order for row in rows)
    kinds = {
        "with parts of sequences on tensor-parallel ranks": "splits_tokens",
        "with parts of sequences on context-parallel ranks": "splits_sequences",
        "with experts": "has_experts",
        "with dropout": "drops",
    }
    reductions = Counter(row.reduction for row in rows if row.reduction)
    option = " --reductions" if reductions else ""
    less = ["All data-parallel ranks communicate less than by all-reduces of whole gradients."]
    yield from (
        *(f"# Random plans{' with reductions' if reductions else ''}, checked without a GPU", ""),
        "Plans drawn from what the runtime trains, shrunk to widths that a CPU computes at once.",
        "The checks of [sanitize](../reference/sanitize.md) look for collectives that hang or mix",
        "tensors up, over all ranks; for races, on the first and the last kind of rank; and for",
        "waits of the host, on one of these.",
        *(less if reductions else ()),
        *("", f"    python -m benchmarks.sanitized_plans {len(rows)}{option} --page PAGE", ""),
        *("| | number |", "|---|---|"),
        f"| random plans | {len(rows)} |",
        *(
            f"| {words} | {sum(getattr(row, kind) for row in rows)} |"
            for words, kind in kinds.items()
        ),
        f"| ranks whose streams were traced | {sum(row.ranks for row in rows)} |",
        f"| races | {sum(len(row.races) for row in rows)} |",
        f"| waits of the host | {sum(len(row.waits) for row in rows)} |",
        f"| groups of other ranks than those with the same part | {troubles['groups']} |",
        f"| ranks missing in a first call | {troubles['first call']} |",
        f"| collectives in another order or of another size | {troubles['order']} |",
        f"| messages that nobody expects | {troubles['messages']} |",
        f"| ranks that wait in a circle | {troubles['deadlock']} |",
        *("", f"Orders: {_counted(orders)}."),
        *(("", f"Reductions: {_counted(reductions)}.") if reductions else ()),
    )
    told = [f"seed {row.seed}: {one}" for row in rows for one in (*row.races, *row.waits)]
    if told:
        yield from ("", "```", *told[:MOST_TOLD], "```")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def main(arguments: Sequence[str]) -> int:
    """Check the plans that have no result row yet, and write the page; returns 1 if there are
    findings.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sanitized_plans", description=__doc__
    )
    parser.add_argument(
        "plans", nargs="?", type=int, default=300, help="the number of plans to check"
    )
    parser.add_argument(
        "--reductions",
        action="store_true",
        help="check plans with gradient reductions that communicate less",
    )
    parser.add_argument("--page", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    folder = KEPT / (revision() or "no-revision")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("reductions.jsonl" if options.reductions else "rows.jsonl")
    told = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [Row(**json.loads(line)) for line in told][: options.plans]
    with file.open("a", encoding="utf-8") as kept:
        for row in rows_of(range(len(rows), options.plans), reduces=options.reductions):
            rows.append(row)
            kept.write(json.dumps(asdict(row)) + "\n")
            kept.flush()
            sys.stderr.write(f"plan {row.seed}: {row.seconds:.1f} s\n")
    text = "\n".join(page(rows)) + "\n"
    sys.stdout.write(text)
    if options.page:
        write_page(options.page, text)
    return int(any(row.races or row.waits or row.collectives for row in rows))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # A usual exit could abort the process in autograd's thread for the simulated device.
    os._exit(code)
