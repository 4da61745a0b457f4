"""Checks the options of ``run_plan`` before a plan runs."""

import argparse
import math
from pathlib import Path

from experiments.cli.commandline import check_torch, progress, writable
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.job.job import Job

# The value of ``--resume`` that means the newest checkpoint of the run itself.
LATEST = "latest"
MOST_SEED = 2**31
MOST_TIMEOUT_S = 1e6


def check_options(options: argparse.Namespace) -> None:
    """Refuse numbers that are out of range, and options that need a results folder if no folder is
    given.
    """
    bounds = {
        "steps": (1, math.inf),
        "save-every": (0, math.inf),
        "restarts": (0, math.inf),
        "seed": (0, MOST_SEED - 1),
        "timeout": (1, MOST_TIMEOUT_S),
    }
    for name, (least, most) in bounds.items():
        given = getattr(options, name.replace("-", "_"))
        if not least <= given <= most:
            if most == math.inf:
                reject(f"--{name} {given}: is too small: give a number of at least {least}")
            reject(f"--{name} {given}: is out of range: give a number from {least} to {most:.0f}")
    if options.export_weights is not None and options.weights is None:
        reject(
            f"--export-weights {options.export_weights}: names tensors as the checkpoint of "
            "--weights does: give --weights DIR too, or --export FILE instead"
        )
    needing = [("--save-every", options.save_every), (f"--resume {LATEST}", goes_on(options))]
    for option, is_given in needing:
        if is_given and options.out is None:
            reject(f"{option} needs a folder: give --out DIR too")


def check_places(options: argparse.Namespace) -> None:
    """Check before training that checkpoints and results can be written at the paths in the
    options.
    """
    if options.out is not None:
        writable(options.out / "measurement.yaml", "folder")
    if options.export is not None:
        writable(options.export, "file", "--export")
    if options.export_weights is not None:
        writable(options.export_weights / "config.json", "folder", "--export-weights")


def check_stage(options: argparse.Namespace) -> None:
    """Refuse options that need the whole model, if only one stage runs."""
    for name in ("--save-every", "--resume", "--export", "--export-weights"):
        given = getattr(options, name[2:].replace("-", "_"))
        if options.stage is not None and given:
            reject(
                f"{name} needs the whole model, and --stage {options.stage} trains a part of it: "
                f"leave out {name}, or leave out --stage"
            )


def check_exported(options: argparse.Namespace, job: Job) -> None:
    """Refuse to export frozen weights as if they had been trained."""
    if options.export_weights is not None and job.workload.train != "all":
        reject(
            f"--export-weights {options.export_weights}: would write weights that workload.train: "
            "adapters leaves as they are: give --export FILE instead, which has the adapters"
        )


def check_every(job: Job, steps: int) -> None:
    """Refuse an interval between averages of replicas that is longer than the run, since replicas
    would never average.
    """
    every = job.workload.reduction.every
    if every > steps:
        reject(
            f"--steps {steps}: the plan averages weights only every {every} steps "
            f"(workload.reduction.every), so they would never be averaged: give at least --steps "
            f"{every}, or workload.reduction.every up to {steps}"
        )


def check_node(device: str, gpus: int | None, precision: Precision, option: str) -> None:
    """Refuse GPUs of this node that cannot train in a precision (by default all GPUs are checked);
    warn of those that will be slow or short of memory.
    """
    if device == "cpu":
        return
    check_torch()
    from runtime.profiling.environment import devices_of  # noqa: PLC0415 (needs torch)
    from runtime.profiling.node_checks import check_devices  # noqa: PLC0415 (needs torch)

    for warning in check_devices(devices_of(device, gpus), precision=precision, option=option):
        progress(f"warning: {warning}")


def goes_on(options: argparse.Namespace) -> bool:
    """Whether ``--resume`` asks to continue the run in the results folder from its newest
    checkpoint.
    """
    return bool(options.resume == LATEST)


def checkpoints_of(options: argparse.Namespace) -> Path:
    """The folder with the checkpoints of this run."""
    folder: Path = options.out / "checkpoints"
    return folder
