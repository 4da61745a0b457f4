"""Steps that fit how fast a GPU computes: the rates of operators, and the time of a launch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.calibrating.fits import (
    DIGEST_CHARACTERS,
    Fitted,
    Residual,
    Step,
    calibrated,
    report_dropped,
)
from mistlab.calibration import launches, operators
from mistlab.calibration.operators import read_attention_table
from mistlab.core.files import MICROSECONDS
from mistlab.core.values import InputError
from mistlab.machine.hardware import OPERATOR_CLASSES, Compute, Hardware, OperatorClass, Rate

FUSED_ATTENTION: tuple[OperatorClass, ...] = ("attention_forward", "attention_backward")


def operator_rates(
    path: Path,
    table_hardware: str | None,
    *,
    without_weight_gradients: bool,
    attention: tuple[Path, str | None] | None,
    attention_tflops: Sequence[float] | None,
) -> Step:
    """The rates of operators; attention's own kernels from their own table, as given, or as they
    were."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = operators.read_operator_table(
            path,
            hardware.gpu.peak_tflops,
            hardware=table_hardware,
            without_weight_gradients=without_weight_gradients,
        )
        report_dropped(table.origin.duplicates, "repeat another byte for byte")
        report_dropped(table.failed, "failed")
        rates = {name: operators.fit(rows, name) for name, rows in table.classes.items()}
        rates |= {} if table.step is None else {"step": table.step}
        before = hardware.compute
        if before is not None:
            rates |= {name: before.rate(name) for name in FUSED_ATTENTION}
        own, note = _of_attention(hardware, attention, attention_tflops)
        if not own and before is None:
            message = (
                f"{path}: says nothing of fused attention: give --attention TABLE.csv, "
                "--attention-tflops FORWARD BACKWARD, or --borrow a hardware that has them"
            )
            raise InputError(message)
        rates |= {rate.operators: rate for rate in own}
        fitted = Fitted(
            group="compute",
            table=path,
            sha256=table.origin.sha256,
            note=f"{table_hardware or 'unnamed'}{note}",
            residuals=tuple(
                Residual(
                    what=f"{name}, widths left out",
                    rows=len(rows),
                    held_out=operators.error_of_left_out_widths(rows, name),
                )
                for name, rows in table.classes.items()
            ),
            duplicates=table.origin.duplicates,
            spread=table.spread,
        )
        value = Compute(
            rates=tuple(rates[name] for name in (*OPERATOR_CLASSES, "step") if name in rates),
            launch_us=before.launch_us if before is not None else 0.0,
        )
        return calibrated(hardware, "compute", value, fitted, more=False), fitted

    return step


def _of_attention(
    hardware: Hardware, table: tuple[Path, str | None] | None, tflops: Sequence[float] | None
) -> tuple[Sequence[Rate], str]:
    """The rates of attention's kernels, by their table or as given, and how a source ends that says
    so; none if neither is there."""
    if table is not None:
        path, campaign = table
        origin, kernels = read_attention_table(path, hardware.gpu.peak_tflops, campaign=campaign)
        digest = origin.sha256[:DIGEST_CHARACTERS]
        return kernels, f", attention's kernels from {path.name} (sha256 {digest})"
    if tflops is not None:
        given = zip(FUSED_ATTENTION, tflops, strict=True)
        return [Rate(operators=one, tflops=of) for one, of in given], ", fused attention as given"
    return (), ""


def launch_time(path: Path, table_hardware: str | None) -> Step:
    """The host's time to launch one kernel."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        rows = launches.read_launch_table(path, hardware=table_hardware)
        report_dropped(rows.origin.duplicates, "repeat another byte for byte")
        if hardware.compute is None:
            message = f"{path}: {hardware.name} has no rates of operators yet: give --operators too"
            raise InputError(message)
        residual = Residual(
            what="launches, row left out", rows=len(rows), held_out=launches.mean_error(rows)
        )
        fitted = Fitted(
            group="compute",
            table=path,
            sha256=rows.origin.sha256,
            note=table_hardware or "launches",
            residuals=(residual,),
            duplicates=rows.origin.duplicates,
        )
        launch_us = round(launches.launch_s(rows) / MICROSECONDS, 2)
        host_computes = hardware.gpu.cores is not None
        value = replace(hardware.compute, launch_us=launch_us, host_computes=host_computes)
        return calibrated(hardware, "compute", value, fitted, more=True), fitted

    return step
