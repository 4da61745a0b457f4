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
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from experiments.calibrating.noted_machine import Machine, noted_machine
from experiments.cli.commandline import DONE, parser_of, print_json, run, writable
from mistlab.values.datafile import write_yaml
from mistlab.values.references import hardware_from
from mistlab.values.value import to_mapping


def main(arguments: Sequence[str]) -> int:
    """Measure, fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    out = writable(options.out, "file")
    tables = options.tables or out.with_name(f"{out.stem}-tables")
    machine = noted_machine(tables) if options.only == "fit" else _measured(tables, options)
    if options.only == "measure":
        if options.json:
            print_json({"measured": str(tables)})
        else:
            print(f"measured: {tables} (--only fit makes the file from it)")
        return DONE
    profiled, fits = (
        import_module(f"experiments.calibrating.{name}") for name in ("profiled", "fits")
    )
    request = profiled.Request(
        name=out.stem,
        tables=tables,
        datasheet=options.datasheet and hardware_from(options.datasheet, Path()),
        seed=options.seed,
    )
    hardware, fitted = profiled.profiled(request, machine)
    write_yaml(to_mapping(hardware, omit_defaults=True), out)
    if options.json:
        print_json({"hardware": hardware.name, **fits.by_group(fitted), "out": str(out)})
    else:
        print("\n".join(map(fits.text_of, fitted)))
        print(f"written: {out} (name it as `hardware:` in a plan file)")
    return DONE


def _measured(tables: Path, options: argparse.Namespace) -> Machine:
    """Fill the tables; the machine that they are of."""
    device = import_module("runtime.profiling.device")
    sizes = import_module("experiments.calibrating.profile_sizes").SIZES
    devices = device.devices_of(options.device, options.gpus_per_node)
    found: Machine = import_module("experiments.calibrating.profiling").measured(
        tables,
        devices,
        sizes[devices.kind, options.quick],
        date=datetime.now(UTC).date().isoformat(),
        kernel=options.attention_kernel,
    )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "profile_hardware", __doc__, gpus_per_node=None, seed=0, quick=False, json=False
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="HARDWARE.yaml", help="the file to write"
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
        help="who computes fused attention (default: flash), as of run_plan",
    )
    parser.add_argument(
        "--only", choices=("measure", "fit"), help="fill the tables alone, or fit to those alone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
