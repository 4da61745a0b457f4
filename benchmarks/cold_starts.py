"""Measures what a command costs from start to end: the CPU seconds of a separate process."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from experiments.commands import COMMANDS

ROOT = Path(__file__).parents[1]
# The number of runs whose median counts, after one run that fills the cache of compiled
# expressions.
RUNS = 5
QUESTIONS: Mapping[str, Sequence[str]] = {
    "`predict` of one plan": ("-m", "experiments.predict"),
    "`analyse` of one plan": ("-m", "experiments.analyse"),
    "`tune`, the default problem": ("-m", "experiments.tune"),
}


def cold_starts() -> Iterator[Mapping[str, object]]:
    """The CPU seconds of an empty process, and of each command: its first run, and later runs."""
    with tempfile.TemporaryDirectory() as folder:
        empty_s = median(_cpu_s(["-c", "pass"], folder) for _ in range(RUNS))
        yield {"what": "an empty Python process", "first_s": None, "warm_s": empty_s, "times": 1.0}
        for number, (what, words) in enumerate(QUESTIONS.items()):
            cache = f"{folder}/{number}"
            out = ["--out", f"{folder}/plan.yaml"] if "tune" in words[1] else []
            first_s = _cpu_s([*words, *out], cache)
            warm_s = median(_cpu_s([*words, *out], cache) for _ in range(RUNS))
            yield {
                "what": what,
                "first_s": first_s,
                "warm_s": warm_s,
                "times": warm_s / empty_s,
            }
        for name in COMMANDS:
            words = ["-m", f"experiments.{name}", "--help"]
            help_s = median(_cpu_s(words, folder) for _ in range(RUNS))
            yield {
                "what": f"`{name} --help`",
                "first_s": None,
                "warm_s": help_s,
                "times": help_s / empty_s,
            }


def _cpu_s(words: Sequence[str], cache: str) -> float:
    """The CPU seconds of one process, in user and in system mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "MISTLAB_CACHE": cache, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
