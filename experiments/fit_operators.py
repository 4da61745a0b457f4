"""The step that fits the rates of operators."""

from collections.abc import Sequence
from pathlib import Path

from experiments.fits import (
    DIGEST_CHARACTERS,
    Fitted,
    Residual,
    Step,
    calibrated,
    report_dropped,
)
from mistlab.calibration import operators
from mistlab.compute import OPERATOR_CLASSES, Compute, OperatorClass, Rate
from mistlab.errors import InputError
from mistlab.hardware import Hardware

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
            path, hardware=table_hardware, without_weight_gradients=without_weight_gradients
        )
        report_dropped(table.origin.duplicates, "repeat another byte for byte")
        report_dropped(table.failed, "failed")
        rates = {name: operators.fit(rows, name) for name, rows in table.classes.items()}
        before = hardware.compute
        if before is not None:
            rates |= {name: before.rate(name) for name in FUSED_ATTENTION}
        notes = [table_hardware or "unnamed"]
        if attention is not None:
            origin, kernels = operators.read_attention_table(attention[0], campaign=attention[1])
            rates |= {rate.operators: rate for rate in kernels}
            digest = origin.sha256[:DIGEST_CHARACTERS]
            notes.append(f"attention's kernels from {attention[0].name} (sha256 {digest})")
        elif attention_tflops is not None:
            given = zip(FUSED_ATTENTION, attention_tflops, strict=True)
            rates |= {name: Rate(operators=name, tflops=tflops) for name, tflops in given}
            notes.append("fused attention as given")
        elif before is None:
            message = (
                f"{path}: says nothing of fused attention: give --attention TABLE.csv, "
                "--attention-tflops FORWARD BACKWARD, or --borrow a hardware that has them"
            )
            raise InputError(message)
        fitted = Fitted(
            group="compute",
            table=path,
            sha256=table.origin.sha256,
            note=", ".join(notes),
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
            rates=tuple(rates[name] for name in OPERATOR_CLASSES),
            launch_us=before.launch_us if before is not None else 0.0,
        )
        return calibrated(hardware, "compute", value, fitted, more=False), fitted

    return step
