"""One run of a plan in a system, in processes of its own: seconds of its steps, or what failed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.measuring.contenders import OURS
from experiments.running.last_words import last_words
from mistlab.values.job import Job, dump_job

# Steps at the beginning that are not timed: kernels are loaded and memory is taken.
WARM_UPS = 2
# Of a call that starts processes and trains a few steps.
LONGEST_S = 480.0
# What torchrun says to its processes, beside what begins with TORCHELASTIC_.
OF_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}
# Systems that compile parts of theirs when these are first used.
COMPILING = ("deepspeed", "deepcompile")


def run_trial(
    system: str, job: Job, *, steps: int, device: str, seed: int, longest_s: float = LONGEST_S
) -> dict[str, Any] | None:
    """``median_s``, ``seconds`` and ``losses`` of a run, or its ``outcome``.

    None where a run had less time than the longest may take, and did not end in it.
    """
    if system in COMPILING and device == "cuda":
        from runtime.baselines.builds import check_builds  # noqa: PLC0415

        check_builds()
    with TemporaryDirectory() as folder:
        plan, out = Path(folder) / "plan.yaml", Path(folder) / "out.json"
        dump_job(job, plan)
        words = _words(system, job, plan, out, steps=steps, device=device, seed=seed)
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=min(longest_s, LONGEST_S),
                env=without_launcher(os.environ),
                check=False,
            )
        except subprocess.TimeoutExpired:
            if longest_s < LONGEST_S:
                return None
            return {"outcome": f"took longer than {LONGEST_S:.0f} s"}
        if system == OURS:
            said = _json_line(done.stdout)
            found = (
                None if said is None else {"losses": said["losses"], "seconds": said["iteration_s"]}
            )
        else:
            found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return _told(found, done.stderr)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what torchrun says to its processes: a run has a launcher of its
    own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_LAUNCHER and not name.startswith("TORCHELASTIC_")
    }


def _words(
    system: str, job: Job, plan: Path, out: Path, *, steps: int, device: str, seed: int
) -> list[str]:
    ranks = job.plan.num_gpus
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if system == OURS:
        worker = ["experiments.run_plan", str(plan), "--json", "--steps", str(steps)]
        worker += ["--device", device, "--seed", str(seed)]
        return [sys.executable, *(launcher if ranks > 1 else []), "-m", *worker]
    said = {
        "plan": str(plan),
        "system": system,
        "steps": steps,
        "device": device,
        "seed": seed,
        "cap_gib": job.cluster.memory_gib,
        "out": str(out),
    }
    worker = ["-m", "experiments.running.baseline_worker", json.dumps(said)]
    return [sys.executable, *launcher, *worker]


def _json_line(text: str) -> Mapping[str, Any] | None:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    found: Mapping[str, Any] | None = json.loads(lines[-1]) if lines else None
    return found


def _told(found: Mapping[str, Any] | None, errors: str) -> dict[str, Any]:
    if found is None:
        is_short = "out of memory" in errors or "does not fit" in errors
        return {"outcome": "out of memory" if is_short else last_words(errors, "no answer")}
    if "error" in found:
        return {"outcome": str(found["error"])}
    seconds = found["seconds"][WARM_UPS:] or found["seconds"]
    return {
        "outcome": "ran",
        "losses": found["losses"],
        "timing": {"seconds": seconds, "median_s": median(seconds)},
    }
