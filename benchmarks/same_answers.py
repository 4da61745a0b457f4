"""Compares the answers of two revisions of this package, to the last digit.

    python -m benchmarks.same_answers draw FOLDER          # draw plan files, once, by one revision
    python -m benchmarks.same_answers record FOLDER FILE   # write the answers of a checkout
    python -m benchmarks.same_answers compare FILE FILE    # exit status 1 if any answer differs

Answers come from command lines only, so that revisions with other modules can be compared:
predictions of all plans by the closed form and of some by the event simulator, the plans and proofs
of searches, exported texts, and the output of importing them. The first record of a folder stores
the exported texts there, so that later records import the same texts. Compare a quick record with
quick ones only: plans that are predicted together may round the last digit differently.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

ROOT = Path(__file__).parents[1]
# The numbers of random plans that are predicted, simulated and exported, of each kind of plan.
PLANS, PLAYED, EXPORTED = 1000, 75, 30
# How many consecutive plans of a problem a quick record takes: plans of one problem share compiled
# expressions, and each further problem takes seconds to compile.
FEW_OF_A_BLOCK = 12
TARGETS = ("megatron", "deepspeed", "torchtitan", "torchtitan-toml", "accelerate")
# The folder of exported texts, beside the folders of plans.
TEXTS = "texts"
# Keys of values that differ from run to run.
OF_THE_CLOCK = ("timing", "out", "seconds", "wall_s")

SMALL = "--model gpt3-1.3b --hardware l4-24gb --gpus-per-node 4 --global-batch 16"
LLAMA = "--model llama3-8b --hardware h100-80gb --gpus-per-node 8 --global-batch 64"
EXPERTS = "--model qwen3-30b-a3b --hardware h100-80gb --nodes 2 --gpus-per-node 8 --precision bf16"
UNLIKE = "--model gpt3-2.7b --hardware l4-24gb:1,a100-40gb:1 --gpus-per-node 4 --global-batch 16"
HYBRID = "--model nemotron-h-8b --hardware h100-80gb --gpus-per-node 8 --precision bf16"
SEARCHES = (
    *(f"{SMALL} --searcher mist --space {name}" for name in ("3d", "+zero", "+offload", "mist")),
    *(f"{SMALL} --searcher exact --space {name}" for name in ("mist", "aceso", "alpa", "wide")),
    *(
        f"{SMALL} --searcher {name} --space mist --budget-evaluations 150"
        for name in ("optuna", "optuna:random", "optuna:cmaes", "random", "rl", "mist:published")
    ),
    *(f"{SMALL} --searcher aceso --space {name}" for name in ("aceso", "mist")),
    f"{SMALL} --searcher alpa --space alpa",
    *(f"{SMALL} --searcher {name} --space {name}" for name in ("megatron", "deepspeed")),
    *(
        f"{SMALL} --searcher {name} --space {name}"
        for name in ("megatron:published", "deepspeed:published")
    ),
    f"{SMALL} --searcher exhaustive --space megatron",
    *(
        f"{LLAMA} --precision bf16 --space {name}"
        for name in ("mist", "fsdp", "megatron", "megatron-core", "zero-bubble", "deepspeed")
    ),
    f"{LLAMA} --precision fp8 --space megatron-core",
    f"{LLAMA} --precision bf16 --space megatron-today --searcher mist",
    f"{LLAMA} --precision bf16 --space mist --engine mistlab,megatron",
    f"{LLAMA} --precision bf16 --sequence-length 32768 --space everything",
    *(f"{EXPERTS} --space {name}" for name in ("moe", "fsdp")),
    # Without this budget the search would end by the clock, and its plan would differ between runs.
    f"{EXPERTS} --space everything --budget-evaluations 5000",
    *(f"{UNLIKE} --space {name}" for name in ("mist", "3d")),
    f"{HYBRID} --space megatron-core",
    f"{SMALL} --space everything:orders --budget-evaluations 300",
)
QUICK_SEARCHES = (SEARCHES[0], SEARCHES[6], SEARCHES[8], SEARCHES[16], SEARCHES[19])
# Runs commands in one process: each line of standard input is a list of a name and its arguments.
_SERVE = """
import contextlib, io, json, os, runpy, sys, traceback
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    name, *arguments = json.loads(line)
    sys.argv = [name, *arguments]
    texts = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    code = 0
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    said = [text.buffer.getvalue().decode() for text in texts]
    print(json.dumps([code, *said]), file=answers, flush=True)
"""


def main(arguments: Sequence[str]) -> int:
    """Draw plans, record answers or compare two records; returns 1 if any answer differs."""
    parser = argparse.ArgumentParser(prog="benchmarks.same_answers", description=__doc__)
    parser.add_argument("action", choices=("draw", "record", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--of", type=Path, default=ROOT, help="the checkout that answers")
    parser.add_argument("--quick", action="store_true", help="some of the plans and searches only")
    options = parser.parse_args(arguments)
    first, *others = options.paths
    if options.action == "draw":
        draw(first)
        return 0
    if options.action == "record":
        with others[0].open("w", encoding="utf-8") as file:
            for key, answer in answers(options.of, first.resolve(), is_quick=options.quick):
                file.write(json.dumps([key, without_clock(answer)], sort_keys=True) + "\n")
        return 0
    records = [*map(recorded, options.paths)]
    differences = [*differing(*records)]
    count = f"{len(differences)} figures differ in {len(records[1])} answers"
    sys.stdout.write("\n".join([*differences[:20], count]) + "\n")
    return 1 if differences else 0


def draw(folder: Path) -> None:
    """Write files of random plans: some for each engine, order of passes and kind of model."""
    # Imported here, since only the revision that draws plans must have modules of these names.
    from experiments.bench.random_plans import random_plans  # noqa: PLC0415
    from experiments.bench.wide_plans import wide_plans  # noqa: PLC0415
    from mistlab import dump_job  # noqa: PLC0415

    for name, plans in (("plain", random_plans(PLANS, 0)), ("wide", wide_plans(PLANS, 0))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate(plans):
            dump_job(plan.job, folder / name / f"{number:04}.yaml")


def answers(checkout: Path, folder: Path, *, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """The answers of a checkout to all questions, each with its key."""
    with Commands(checkout) as commands:
        for kind in sorted(path.name for path in folder.iterdir() if path.is_dir()):
            if kind == TEXTS:
                continue
            files = sorted((folder / kind).glob("*.yaml"))
            played, exported = (files[:: max(1, len(files) // n)] for n in (PLAYED, EXPORTED))
            if is_quick:
                blocks = (
                    files[start : start + FEW_OF_A_BLOCK] for start in range(0, len(files), 208)
                )
                files = [file for block in blocks for file in block]
                played, exported = played[::16], exported[::10]
            yield from _lines(f"{kind} predicted", commands, files, "--json")
            yield from _lines(f"{kind} played", commands, played, "--json", "--simulator", "events")
            for file in exported:
                for target in TARGETS:
                    yield from _exported(commands, folder, file, target)
        for search in QUICK_SEARCHES if is_quick else SEARCHES:
            code, output, errors = commands.run(
                "tune", *search.split(), "--json", "--out", os.devnull
            )
            yield f"search {search}", [code, _objects(output), _errors(errors)]


class Commands:
    """The commands of a checkout, which run one after another in one process."""

    def __init__(self, checkout: Path) -> None:
        # An installed package must not answer in the checkout's place.
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-c", _SERVE],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, name: str, *arguments: str) -> tuple[int, str, str]:
        """The exit status, standard output and standard error of a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        code, output, errors = json.loads(self._process.stdout.readline())
        return code, output, errors


def _exported(
    commands: Commands, folder: Path, file: Path, target: str
) -> Iterator[tuple[str, Any]]:
    """The export of a plan, and the import of the text that the first record exported."""
    key = f"{file.parent.name}/{file.stem} to {target}"
    code, text, errors = commands.run("export", str(file), "--to", target)
    yield f"export {key}", [code, hashlib.sha256(text.encode()).hexdigest(), errors]
    kept = folder / TEXTS / target / f"{file.parent.name}-{file.stem}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    if not kept.stat().st_size:
        return
    workload, cluster = (
        yaml.safe_load(file.read_text(encoding="utf-8"))[part] for part in ("workload", "cluster")
    )
    given = {name: workload[name] for name in ("model", "sequence_length", "global_batch")}
    given |= {name: cluster[name] for name in ("hardware", "nodes", "gpus_per_node")}
    options = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    # If the exported text contradicts these options, the refusal of the import is recorded.
    yield f"import {key}", [*commands.run("import_plan", str(kept), *options)]


def _lines(
    kind: str, commands: Commands, files: Sequence[Path], *options: str
) -> Iterator[tuple[str, Any]]:
    """For each plan file its prediction, as the line of JSON that ``predict`` prints."""
    for start in range(0, len(files), 200):
        few = files[start : start + 200]
        code, output, errors = commands.run("predict", *map(str, few), *options)
        lines = _objects(output)
        if len(lines) != len(few):
            yield f"{kind} {few[0].stem}", [code, errors]
        for file, line in zip(few, lines, strict=False):
            yield f"{kind} {file.stem}", line


def _objects(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error")]


def without_clock(answer: Any) -> Any:
    """An answer without the values that differ from run to run."""
    if isinstance(answer, Mapping):
        return {
            key: without_clock(value) for key, value in answer.items() if key not in OF_THE_CLOCK
        }
    return [without_clock(entry) for entry in answer] if isinstance(answer, list) else answer


def recorded(file: Path) -> dict[str, Any]:
    """The answers that a record holds, by the keys of their questions."""
    return dict(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure in which two records differ."""
    for key in {**first, **second}:
        if key in first and key in second:
            yield from _unequal(key, first[key], second[key])
        else:
            yield f"{key}: only in the {'first' if key in first else 'second'}"


def _unequal(where: str, first: Any, second: Any) -> Iterator[str]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {**first, **second}:
            yield from _unequal(f"{where}.{key}", first.get(key), second.get(key))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second, strict=True)):
            yield from _unequal(f"{where}[{number}]", *pair)
    elif first != second:
        yield f"{where}: {first!r} became {second!r}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
