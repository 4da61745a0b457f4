"""One run of a plan in a system, in processes of its own: seconds of its steps, or what failed."""

import json
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


def run_trial(system: str, job: Job, *, steps: int, device: str, seed: int) -> dict[str, Any]:
    """``median_s``, ``seconds`` and ``losses`` of a run, or its ``outcome``."""
    with TemporaryDirectory() as folder:
        plan, out = Path(folder) / "plan.yaml", Path(folder) / "out.json"
        dump_job(job, plan)
        words = _words(system, job, plan, out, steps=steps, device=device, seed=seed)
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": f"took longer than {LONGEST_S:.0f} s"}
        if system == OURS:
            said = _json_line(done.stdout)
            found = (
                None if said is None else {"losses": said["losses"], "seconds": said["iteration_s"]}
            )
        else:
            found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return _told(found, done.stderr)


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
