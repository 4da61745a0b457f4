"""The command ``sanitize``: checks without a GPU that plans would run correctly on GPUs, and counts
the findings.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from experiments.cli.commandline import DONE, NO_ANSWER, as_options, print_json, progress
from mistlab.core.files import about
from mistlab.core.values import to_mapping
from mistlab.job.job import Job, load_job

if TYPE_CHECKING:
    from runtime.checks.fake.watch import WaitFinding
    from runtime.checks.races.judge import RaceFinding
    from runtime.checks.sanitizer import Sanitizer
    from runtime.engine.training import Training


# How many findings are printed at most.
MOST_TOLD = 20


def sanitize(options: argparse.Namespace) -> int:
    """Check without a GPU that a plan would run correctly on GPUs.

    There are three checks. Collectives: all ranks of a group must call the same collectives in the
    same order, and no ranks may wait for each other in a circle. Hidden waits: the code of run_plan
    --device cuda runs on a device without memory, which notices copies that block, values that the
    host reads, and tensors in the wrong place. Races: the code runs on CPU tensors and records
    streams and events in a graph; two streams may use the same memory only in a fixed order, and
    memory may not be reused while a stream uses it. One rank of each kind runs, with small sizes
    and the plan's structure. Exit status 0 means no findings, 1 means findings.
    """
    from runtime.checks.sanitizer import Sanitizer  # noqa: PLC0415 (needs torch)

    # All plans are loaded first, so that a plan that cannot run is reported before any plan runs.
    jobs = [(path, load_job(path)) for path in options.plan]
    sanitizers = []
    for path, job in jobs:
        with about(path):
            training = _training(options, job)
            sanitizer = Sanitizer.of(job, training, serialises=options.serialise)
        sanitizers.append((path, job.plan.num_gpus, sanitizer))
    counts = [_checked(path, gpus, one, options) for path, gpus, one in sanitizers]
    return NO_ANSWER if sum(counts) else DONE


def _training(options: argparse.Namespace, job: Job) -> "Training":
    from runtime.engine.training import FP16_LOSS_SCALE, Training  # noqa: PLC0415 (needs torch)

    scale = FP16_LOSS_SCALE if job.workload.precision == "fp16" else None
    with as_options():
        return Training(
            clip_norm=options.clip_norm,
            loss_scale=scale if options.loss_scale is None else options.loss_scale,
            steps_on_host=options.step_on_cpu,
        )


def _gpus(gpus: int, unlike: int) -> str:
    if gpus == 1:
        return "1 GPU"
    unlike_words = f"{unlike} that differ in what they do" if unlike > 1 else "all doing the same"
    return f"{gpus} GPUs, {unlike_words}"


def _checked(path: Path, gpus: int, sanitizer: "Sanitizer", options: argparse.Namespace) -> int:
    """Check one plan and report what is found; returns the number of findings."""
    ranks = sanitizer.ranks
    left_out = "".join(f"; {words}" for words in sanitizer.small.left_out)
    progress(f"{path}: {_gpus(gpus, len(ranks))}{left_out}; about {sanitizer.expected_s:.0f} s")
    start = perf_counter()
    collectives = sanitizer.collectives()
    progress(f"{path}: collectives: {_count(len(collectives))}, {perf_counter() - start:.0f} s")
    findings, checked = [*map(str, collectives)], []
    for number, rank in enumerate(ranks, 1):
        # Fake GPUs must be registered with torch before its first backward pass.
        waits, races = sanitizer.waits(rank.rank), sanitizer.races(rank.rank)
        checked.append({**to_mapping(rank), **_as_mappings(waits, races)})
        findings += [f"{rank}: {finding}" for finding in (*waits, *races)]
        progress(
            f"{path}: {number} of {len(ranks)}: {rank}: {_count(len(waits) + len(races))}, "
            f"{perf_counter() - start:.0f} s"
        )
    if options.json:
        print_json(
            {
                "plan": str(path),
                "gpus": gpus,
                "left_out": list(sanitizer.small.left_out),
                "collectives": [to_mapping(one) for one in collectives],
                "ranks": checked,
                "findings": len(findings),
                "timing": {"seconds": perf_counter() - start},
            }
        )
    else:
        _tell(path, findings)
        verdict = _count(len(findings)) if findings else "clean"
        print(f"{path}: {verdict} ({len(ranks)} of {gpus} ranks, which do all that any does)")
    return len(findings)


def _as_mappings(
    waits: "Sequence[WaitFinding]", races: "Sequence[RaceFinding]"
) -> Mapping[str, Any]:
    return {
        "waits": [to_mapping(one) for one in waits],
        "races": [_race(one) for one in races],
    }


def _race(race: "RaceFinding") -> dict[str, Any]:
    first, second = (one._asdict() for one in (race.first, race.second))
    return {
        "kind": race.kind,
        "memory": race.memory,
        "first": first,
        "second": second,
        "missing": race.missing,
    }


def _tell(path: Path, findings: Sequence[str]) -> None:
    for finding in findings[:MOST_TOLD]:
        print(f"{path}: {finding}")
    if len(findings) > MOST_TOLD:
        print(f"{path}: and {len(findings) - MOST_TOLD} more (--json has them all)")


def _count(number: int) -> str:
    return f"{number} finding{'' if number == 1 else 's'}"
