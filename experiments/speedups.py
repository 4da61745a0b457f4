"""Predicted speedups over the grids of Megatron-LM and DeepSpeed, beside published measured ones.

Each workload of the published evaluation on L4 is searched by mist in its own space, and all plans
of the two baselines' spaces are predicted in their own engines. Nothing is adjusted.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiments.bench import Bench, Entry
from experiments.commandline import DONE, parser_of, print_json, progress, run
from experiments.live import Live
from experiments.rundir import RunDirectory
from experiments.search_words import plan_words
from mistlab import catalog
from mistlab.cluster import Cluster
from mistlab.datafile import parse_yaml
from mistlab.search import Budget, Problem
from mistlab.space import space_of
from mistlab.workload import Workload

FAMILIES = ("gpt3", "llama", "falcon")
SEARCHERS = {"mist": "mist", "megatron": "megatron", "deepspeed": "deepspeed"}
BUDGET = Budget(seconds=120)
SEQUENCE_LENGTH = 2048
# Where written-out attention was published: GPT alone.
MATH = ("gpt3",)

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Search the grid, print and write the table."""
    parser = parser_of(
        "speedups", __doc__, seed=0, out=Path("runs/speedups"), json=False, quick=False
    )
    options = parser.parse_args(arguments)
    directory = RunDirectory.make(options.out, "speedups", vars(options))
    content = parse_yaml(
        files("experiments").joinpath("speedups.yaml").read_text(encoding="utf-8"), "speedups.yaml"
    )
    assert isinstance(content, Mapping)
    rows = []
    for place in content["grid"][: 2 if options.quick else None]:
        for name, attention in _workloads(place["size"]):
            rows.append(_row(name, attention, place, content["measured"], options.seed))
            progress(_line(rows[-1]))
    directory.write_rows(rows)
    if options.json:
        print_json({"rows": rows})
    else:
        print("\n".join(_table(rows)))
    return DONE


def _workloads(size: str) -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        yield f"{family}-{size}", "flash"
        if family in MATH:
            yield f"{family}-{size}", "math"


def _row(
    name: str, attention: Any, place: Mapping[str, Any], measured: Sequence[Row], seed: int
) -> Row:
    problem = Problem(
        workload=Workload(
            model=catalog.model(name),
            sequence_length=SEQUENCE_LENGTH,
            global_batch=place["global_batch"],
            attention=attention,
            precision="fp16",
        ),
        cluster=Cluster(
            hardware=catalog.hardware("l4-24gb"),
            nodes=place["nodes"],
            gpus_per_node=place["gpus_per_node"],
        ),
    )
    bench = Bench.of(problem)
    entries = {
        searcher: bench.search(searcher, space_of(space), BUDGET, seed, Live(searcher=searcher))
        for searcher, space in SEARCHERS.items()
    }
    best = entries["mist"].answer
    found = [row for row in measured if (row["model"], row["attention"]) == (name, attention)]
    return {
        "model": name,
        "attention": attention,
        "gpus": problem.cluster.num_gpus,
        **{f"{searcher}_s": _seconds(entry) for searcher, entry in entries.items()},
        "over_megatron": _over(entries["megatron"], entries["mist"]),
        "over_deepspeed": _over(entries["deepspeed"], entries["mist"]),
        "measured_over_megatron": found[0]["over_megatron"] if found else None,
        "measured_over_deepspeed": found[0]["over_deepspeed"] if found else None,
        "plans": {
            searcher: "; ".join(plan_words(entry.answer[0]))
            for searcher, entry in entries.items()
            if entry.answer is not None
        },
        "fits": best is not None,
    }


def _seconds(entry: Entry) -> float | None:
    return None if entry.answer is None else entry.answer[1].iteration_s


def _over(baseline: Entry, best: Entry) -> float | None:
    slower, faster = _seconds(baseline), _seconds(best)
    return None if slower is None or faster is None else slower / faster


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"{'workload':22} {'GPUs':>4} {'mist s':>8} {'over Megatron':>14} {'measured':>9} "
        f"{'over DeepSpeed':>15} {'measured':>9}"
    )
    for row in rows:
        yield _line(row)
    ratios = [row["over_megatron"] for row in rows if row["over_megatron"]]
    if ratios:
        mean = sum(ratios) / len(ratios)
        yield f"over Megatron-LM: {mean:.2f}x on average, {max(ratios):.2f}x at most"


def _line(row: Row) -> str:
    def ratio(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.2f}x"

    seconds = "-" if row["mist_s"] is None else f"{row['mist_s']:.2f}"
    return (
        f"{row['model'] + ', ' + row['attention']:22} {row['gpus']:>4} {seconds:>8} "
        f"{ratio('over_megatron'):>14} {ratio('measured_over_megatron'):>9} "
        f"{ratio('over_deepspeed'):>15} {ratio('measured_over_deepspeed'):>9}"
    )


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
