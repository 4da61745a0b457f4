"""Measure this machine, and calibrate a hardware file that a plan may name.

Operators of GPT blocks, collectives and sends between its devices, copies to and from the host, and
the four streams side by side go to tables (docs/reference/measurement-tables.md) in --tables; what
is there already is not measured again. Each device is driven by a process of its own. On a CPU
processes stand in for GPUs, and the file says so. Measuring needs torch, fitting SciPy: --only does
either half on the machine that can.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Measure, fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    from experiments.calibrating.this_machine import profile  # noqa: PLC0415 (not for --help)

    return profile(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "profile_hardware", __doc__, gpus_per_node=None, seed=0, quick=False, json=False
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/profile_hardware/this-machine.yaml"),
        metavar="HARDWARE.yaml",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="what to measure (default: GPUs if there are any)"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="DIR",
        help="where measurements go, and are found again (default: HARDWARE-tables beside --out)",
    )
    parser.add_argument(
        "--datasheet",
        metavar="HARDWARE",
        help="take peaks, memory bandwidth and network of its datasheet instead of measured peaks",
    )
    parser.add_argument(
        "--attention-kernel",
        choices=("flash", "cudnn", "flash-attn"),
        default="flash",
        help="the kernel of fused attention (default: flash), as for run_plan",
    )
    parser.add_argument(
        "--only", choices=("measure", "fit"), help="fill the tables alone, or fit to those alone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
