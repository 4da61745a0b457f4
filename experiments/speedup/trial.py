"""Runs a plan once in a training system, in separate processes; returns the seconds of its steps,
or how it failed.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.speedup.contenders import OURS
from experiments.speedup.nodes import Nodes
from experiments.speedup.same_training import CONFIGURATION
from experiments.training.plan_runs import ended_within, last_words
from mistlab.job.job import Job, dump_job, job_from_mapping, job_to_mapping

# The first steps are not timed, since kernels are loaded and memory is allocated during them; this
# is their number.
WARM_UPS = 2
# The time limit in seconds for starting the processes of a run and training a few steps.
LONGEST_S = 480.0
OVERDUE = f"took longer than {LONGEST_S:.0f} s"
ENDED_ELSEWHERE = "ended on another node"
SHORT = "out of memory"
# Environment variables that torchrun sets for its processes, besides those that begin with
# TORCHELASTIC_.
OF_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}
# Training systems that compile something when it is used first.
COMPILING = ("deepspeed", "deepcompile")


def run_trial(
    system: str,
    job: Job,
    *,
    steps: int,
    device: str,
    seed: int,
    longest_s: float = LONGEST_S,
    nodes: Nodes | None = None,
) -> dict[str, Any] | None:
    """Run a plan in a training system; returns the ``median_s``, ``seconds``, ``losses`` and
    ``configuration`` of the run or, if it failed, its ``outcome``.

    The result is None if the run did not end within ``longest_s`` and this is less than the usual
    limit. If several nodes take part, the run is announced to their leaders.
    """
    nodes = nodes or Nodes()
    if system in COMPILING and device == "cuda":
        from runtime.baselines.builds import check_builds  # noqa: PLC0415

        check_builds()
    seconds = min(longest_s, LONGEST_S)
    run = {"system": system, "job": job_to_mapping(job), "seconds": seconds}
    run |= {"steps": steps, "device": device, "seed": seed}
    port = nodes.announce(run)
    outcome = _own_part({**run, "port": port}, job, nodes)
    nodes.over(outcome["outcome"])
    if outcome["outcome"] == OVERDUE and longest_s < LONGEST_S:
        return None
    if outcome["outcome"] != "ran" and SHORT in nodes.outcomes():
        return {"outcome": SHORT}
    return outcome


def take_part(nodes: Nodes) -> None:
    """Start this node's part of each run that the first node announces, until there are no more."""
    for run in nodes.announced():
        job = job_from_mapping(run["job"])
        nodes.over(_own_part(run, job, nodes)["outcome"])


def _own_part(run: Mapping[str, Any], job: Job, nodes: Nodes) -> dict[str, Any]:
    """The result of the processes on this node; only the first node's processes report losses."""
    with TemporaryDirectory() as folder:
        plan, out = Path(folder) / "plan.yaml", Path(folder) / "out.json"
        dump_job(job, plan)
        done = ended_within(
            _command_of_run(run, job, plan, out, nodes),
            run["seconds"],
            env=without_launcher(os.environ),
            hangs=nodes.others_are_over,
        )
        if done is None:
            return {"outcome": ENDED_ELSEWHERE if nodes.outcomes() else OVERDUE}
        if run["system"] == OURS:
            printed = _json_line(done.stdout)
            result = printed and _of_ours(printed, job)
        else:
            result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    if nodes.own > 0 and done.returncode == 0:
        return {"outcome": "ran"}
    return _outcome_of(result, done.stderr)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without torchrun's variables, since every run has a launcher of its own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_LAUNCHER and not name.startswith("TORCHELASTIC_")
    }


def _command_of_run(
    run: Mapping[str, Any], job: Job, plan: Path, out: Path, nodes: Nodes
) -> list[str]:
    ranks, system = job.plan.num_gpus, run["system"]
    launcher = nodes.launcher(ranks, run["port"])
    if system == OURS:
        worker = ["experiments.run_plan", str(plan), "--json", "--steps", str(run["steps"])]
        worker += ["--device", run["device"], "--seed", str(run["seed"])]
        return [sys.executable, *(launcher if ranks > 1 else []), "-m", *worker]
    settings = {name: run[name] for name in ("system", "steps", "device", "seed")}
    settings |= {"plan": str(plan), "cap_gib": job.cluster.memory_gib, "out": str(out)}
    worker = ["-m", "experiments.training.baseline_worker", json.dumps(settings)]
    return [sys.executable, *launcher, *worker]


def _of_ours(printed: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The result of a run of this package's runtime, in the form of other systems' results."""
    from runtime.baselines.baseline import Configuration  # noqa: PLC0415 (needs torch)

    configuration = asdict(Configuration.of_ours(job))
    return {
        "losses": printed["losses"],
        "seconds": printed["iteration_s"],
        CONFIGURATION: configuration,
    }


def _json_line(text: str) -> Mapping[str, Any] | None:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    printed: Mapping[str, Any] | None = json.loads(lines[-1]) if lines else None
    return printed


def _outcome_of(result: Mapping[str, Any] | None, errors: str) -> dict[str, Any]:
    if result is None:
        is_short = SHORT in errors or "does not fit" in errors
        return {"outcome": SHORT if is_short else last_words(errors, "no answer")}
    if "error" in result:
        return {"outcome": str(result["error"])}
    seconds = result["seconds"][WARM_UPS:] or result["seconds"]
    return {
        "outcome": "ran",
        "losses": result["losses"],
        CONFIGURATION: result[CONFIGURATION],
        "timing": {"seconds": seconds, "median_s": median(seconds)},
    }
