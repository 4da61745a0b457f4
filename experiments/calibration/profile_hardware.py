"""Measures this machine, and fits a hardware file to the measurements."""

import argparse
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from experiments.calibration.noted_machine import Machine, noted_machine
from experiments.cli.commandline import DONE, print_json, progress, writable
from mistlab.job.job import stated_hardware


def profile(options: argparse.Namespace) -> int:
    """Measure this machine, and calibrate a hardware file that a plan may name.

    Measured are the operators of GPT blocks, collectives and sends between this machine's devices,
    copies to and from the host, and how four streams slow one another down. The measurements go to
    tables in the folder --tables (docs/reference/measurement-tables.md); rows that are there
    already are not measured again. Each device is driven by a process of its own. On a machine
    without GPUs, processes on its CPU stand in for GPUs, and the hardware file says so. Measuring
    needs torch, and fitting needs SciPy; --only does one of the two, on a machine that has only one
    of them.

    With --between-nodes, under a torchrun on each of two or more nodes, collectives and sends
    between the nodes are added to the tables of the first node, which must have been measured
    before. The hardware file then describes the network too.
    """
    out = writable(options.out, "file")
    tables = options.tables or out.with_name(f"{out.stem}-tables")
    if options.between_nodes:
        between = import_module("experiments.calibration.between_nodes")
        if not between.measured(tables, options.device, quick=options.quick):
            return DONE
        machine = noted_machine(tables)
    else:
        machine = noted_machine(tables) if options.only == "fit" else _measured(tables, options)
    if options.only == "measure":
        if options.json:
            print_json({"measured": str(tables)})
        else:
            print(f"measured: {tables} (--only fit makes the file from it)")
        return DONE
    profiled = import_module("experiments.calibration.profiled")
    fits = import_module("experiments.calibration.fits")
    request = profiled.Request(
        name=out.stem,
        tables=tables,
        datasheet=options.datasheet and stated_hardware(options.datasheet, Path()),
        seed=options.seed,
    )
    hardware, fitted = profiled.profiled(request, machine)
    fits.write_fitted(hardware, fitted, out, hardware.name, as_json=options.json)
    return DONE


def _measured(tables: Path, options: argparse.Namespace) -> Machine:
    """Measure all rows that are still missing in the tables of a folder; returns the machine that
    was measured.
    """
    device = import_module("runtime.profiling.environment")
    sizes = import_module("experiments.calibration.profiling").SIZES
    devices = device.devices_of(options.device, options.gpus_per_node)
    node_checks = import_module("runtime.profiling.node_checks")
    warnings = node_checks.check_devices(devices, precision=devices.precision, option="precision")
    for warning in warnings:
        progress(f"warning: {warning}")
    machine: Machine = import_module("experiments.calibration.profiling").measured(
        tables,
        devices,
        sizes[devices.kind, options.quick],
        date=datetime.now(UTC).date().isoformat(),
        kernel=options.attention_kernel,
    )
    return machine
