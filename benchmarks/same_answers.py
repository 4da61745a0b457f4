"""Compares the answers of two revisions of this package, to the last digit.

    python -m benchmarks.same_answers draw FOLDER          # draw plan files, once, by one revision
    python -m benchmarks.same_answers record FOLDER FILE   # write the answers of a checkout
    python -m benchmarks.same_answers compare FILE FILE    # exit status 1 if any answer differs

Answers come from command lines alone, so that a revision whose modules lie elsewhere answers too:
predictions of all plans by the closed form and of some by the event simulator, the plans and proofs
of searches, the texts of exports, and what imports of these texts say.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Plans in plain order and in today's, and how many of each kind are played or exported.
PLANS, PLAYED, EXPORTED = 1000, 75, 30
FEW = {"plans": 60, "played": 10, "exported": 6, "searches": 8}
TARGETS = ("megatron", "deepspeed", "torchtitan", "torchtitan-toml", "accelerate")
# Differ from run to run.
OF_THE_CLOCK = ("timing", "out", "seconds")

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
    *(f"{EXPERTS} --space {name}" for name in ("moe", "fsdp", "everything")),
    *(f"{UNLIKE} --space {name}" for name in ("mist", "3d")),
    f"{HYBRID} --space megatron-core",
    f"{SMALL} --space everything:orders --budget-evaluations 300",
)


def main(arguments: Sequence[str]) -> int:
    """Draw, record or compare."""
    parser = argparse.ArgumentParser(prog="benchmarks.same_answers", description=__doc__)
    parser.add_argument("action", choices=("draw", "record", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--of", type=Path, default=ROOT, help="the checkout that answers")
    parser.add_argument("--quick", action="store_true", help="some of the plans and searches")
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
    differences = [*differing(*map(recorded, options.paths))]
    told = [*differences[:20], f"{len(differences)} figures differ"]
    sys.stdout.write("\n".join(told) + "\n")
    return 1 if differences else 0


def draw(folder: Path) -> None:
    """Write files of random plans, some of each engine, order and kind of model."""
    # Only the revision that draws needs these modules where they are.
    from experiments.bench.random_plans import random_plans  # noqa: PLC0415
    from experiments.bench.wide_plans import wide_plans  # noqa: PLC0415
    from mistlab import dump_job  # noqa: PLC0415

    for name, plans in (("plain", random_plans(PLANS, 0)), ("wide", wide_plans(PLANS, 0))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate(plans):
            dump_job(plan.job, folder / name / f"{number:04}.yaml")


def answers(checkout: Path, folder: Path, *, is_quick: bool) -> Iterator[tuple[str, Any]]:
    """The answers of a checkout to all questions, each with its key."""
    few = FEW if is_quick else {}
    for kind in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        files = sorted((folder / kind).glob("*.yaml"))
        step = max(1, len(files) // few.get("plans", len(files)))
        yield from _lines(f"{kind} predicted", checkout, files[::step], "predict", "--json")
        step = max(1, len(files) // few.get("played", PLAYED))
        played, by_events = files[::step], ("--json", "--simulator", "events")
        yield from _lines(f"{kind} played", checkout, played, "predict", *by_events)
        step = max(1, len(files) // few.get("exported", EXPORTED))
        for file in files[::step]:
            for target in TARGETS:
                yield from _exported(f"{kind}/{file.stem} to {target}", checkout, file, target)
    searches = SEARCHES[:: len(SEARCHES) // few.get("searches", len(SEARCHES))]
    for search in searches:
        done = _run(checkout, "tune", *search.split(), "--json", "--out", os.devnull)
        yield f"search {search}", [done.returncode, _objects(done.stdout), _errors(done.stderr)]


def _exported(key: str, checkout: Path, file: Path, target: str) -> Iterator[tuple[str, Any]]:
    done = _run(checkout, "export", str(file), "--to", target)
    digest = hashlib.sha256(done.stdout.encode()).hexdigest()
    yield f"export {key}", [done.returncode, digest, done.stderr]


def _lines(
    kind: str, checkout: Path, files: Sequence[Path], *command: str
) -> Iterator[tuple[str, Any]]:
    """A command's line of JSON for each plan file."""
    paths = iter(files)
    while some := [*islice(paths, 200)]:
        done = _run(checkout, command[0], *map(str, some), *command[1:])
        lines = _objects(done.stdout)
        if len(lines) != len(some):
            yield f"{kind} {some[0].stem}", [done.returncode, done.stderr]
        for file, line in zip(some, lines, strict=False):
            yield f"{kind} {file.stem}", line


def _run(checkout: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    # An installed package must not answer in the checkout's place.
    where = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        command, cwd=checkout, env=where, capture_output=True, text=True, check=False
    )


def _objects(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error")]


def without_clock(answer: Any) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(answer, Mapping):
        return {
            key: without_clock(value) for key, value in answer.items() if key not in OF_THE_CLOCK
        }
    return [without_clock(entry) for entry in answer] if isinstance(answer, list) else answer


def recorded(file: Path) -> dict[str, Any]:
    """The answers of a file, by key."""
    return dict(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure of the second answers that is not that of the first."""
    for key in second:
        if key not in first:
            yield f"{key}: only in the second"
        else:
            yield from _unequal(key, first[key], second[key])


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
