"""Fits the compute rates of a GPU (GEMMs, attention, memory-bound kernels) and its kernel launch
time to measured operators.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.calibration.fits import (
    DIGEST_CHARACTERS,
    Fitted,
    Residual,
    Step,
    calibrated,
    report_dropped,
)
from mistlab.calibration import kernel_tables as tables
from mistlab.calibration import launches, operators
from mistlab.calibration.kernel_tables import Best, read_best_products, read_collective_tests
from mistlab.calibration.operators import read_attention_table
from mistlab.core.units import MICROSECONDS
from mistlab.core.values import reject
from mistlab.machine.hardware import (
    OPERATOR_CLASSES,
    Compute,
    GroupTransfers,
    Hardware,
    OperatorClass,
    Rate,
    Transfers,
)

# Fits the rates of a GPU to tables of measured operators: GEMMs, attention, memory-bound kernels,
# and the time to launch a kernel.


FUSED_ATTENTION: tuple[OperatorClass, ...] = ("attention_forward", "attention_backward")


def operator_rates(
    path: Path,
    table_hardware: str | None,
    *,
    without_weight_gradients: bool,
    attention: tuple[Path, str | None] | None,
    attention_tflops: Sequence[float] | None,
) -> Step:
    """Fit the rates of operators. The rates of attention kernels come from a separate table or from
    options; if neither is given, they stay unchanged.
    """

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
        fused, note = _of_attention(hardware, attention, attention_tflops)
        if not fused and before is None:
            reject(
                f"{path}: has no rows of fused attention: give --attention TABLE.csv, "
                "--attention-tflops FORWARD BACKWARD, or --borrow a hardware that has them"
            )
        rates |= {rate.operators: rate for rate in fused}
        fitted = Fitted(
            group="compute",
            origin=table.origin,
            note=f"{table_hardware or 'unnamed'}{note}",
            residuals=tuple(
                Residual(
                    what=f"{name}, widths left out",
                    rows=len(rows),
                    held_out=operators.error_of_left_out_widths(rows, name),
                )
                for name, rows in table.classes.items()
            ),
            spread=table.spread,
        )
        value = Compute(
            rates=tuple(rates[name] for name in (*OPERATOR_CLASSES, "step") if name in rates),
            launch_us=before.launch_us if before is not None else 0.0,
        )
        return calibrated(hardware, value, fitted)

    return step


def _of_attention(
    hardware: Hardware, table: tuple[Path, str | None] | None, tflops: Sequence[float] | None
) -> tuple[Sequence[Rate], str]:
    """The rates of attention kernels from their table or from options, and a text that states the
    source; both are empty if neither table nor options are given.
    """
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
    """Fit the host's time to launch one kernel."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        rows = launches.read_launch_table(path, hardware=table_hardware)
        report_dropped(rows.origin.duplicates, "repeat another byte for byte")
        if hardware.compute is None:
            reject(
                f"{path}: {hardware.name} has no rates of operators yet: give --operators TABLE.csv"
            )
        residual = Residual(
            what="launches, row left out", rows=len(rows), held_out=launches.mean_error(rows)
        )
        fitted = Fitted(
            group="compute",
            origin=rows.origin,
            note=table_hardware or "launches",
            residuals=(residual,),
        )
        launch_us = round(launches.launch_s(rows) / MICROSECONDS, 2)
        host_computes = hardware.gpu.cores is not None
        value = replace(hardware.compute, launch_us=launch_us, host_computes=host_computes)
        return calibrated(hardware, value, fitted, more=True)

    return step


# Fits the rates of a GPU, and the collectives of its node, to tables of single kernels.


def kernel_rates(
    path: Path, table_hardware: str | None, *, launch_us: float, sustained: float
) -> Step:
    """Fit the rates of GEMMs, of the GEMMs of experts, of fused attention and of memory-bound
    kernels.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = tables.read_kernel_table(path, table_hardware)
        kernels = {
            **table.products,
            **{name: tables.attention_rows(table, name) for name in FUSED_ATTENTION},
        }
        rates: dict[OperatorClass, Rate] = {
            name: tables.rate_of(rows, name) for name, rows in kernels.items()
        }
        # The GEMMs of unfused attention were not measured, so they get the rate of all other GEMMs.
        rates["batched_matmul"] = replace(rates["matmul"], operators="batched_matmul")
        residuals = [
            Residual(
                what=f"{name}, every second shape",
                rows=len(rows),
                held_out=tables.held_out_error(rows, name),
            )
            for name, rows in kernels.items()
        ]
        rates["memory"] = tables.memory_rate(table)
        fitted = Fitted(
            group="compute",
            origin=table.origin,
            note=f"{table_hardware or 'unnamed'}, {sustained:.0%} of it sustained as given",
            residuals=tuple(residuals),
        )
        value = Compute(
            rates=tuple(rates.values()),
            sustained=sustained,
            launch_us=launch_us,
        )
        return calibrated(hardware, value, fitted)

    return step


def collective_tests(path: Path, table_hardware: str | None) -> Step:
    """Fit the times of collectives inside a node and across nodes to their measured bus bandwidths
    at several message sizes.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        tests = read_collective_tests(path, table_hardware or hardware.name)
        before = hardware.transfers
        if before is None:
            reject(f"{path}: {hardware.name} has no rates of host copies: give --borrow HARDWARE")
        copies = max(before.groups, key=lambda group: group.host_to_device is not None)
        groups = tuple(
            GroupTransfers(
                gpus_in_node=group.gpus_in_node,
                nodes=group.nodes,
                all_reduce=group.all_reduce,
                all_gather=group.half,
                reduce_scatter=group.half,
                host_to_device=copies.host_to_device if group.nodes == 1 else None,
                device_to_host=copies.device_to_host if group.nodes == 1 else None,
            )
            for group in tests.groups
        )
        fitted = Fitted(
            group="transfers",
            origin=tests.origin,
            note=f"{table_hardware}, copies to the host as before",
            residuals=tuple(
                Residual(
                    what=f"all_reduce over {group.nodes} x {group.gpus_in_node}, every second size",
                    rows=group.rows,
                    held_out=group.held_out,
                )
                for group in tests.groups
            ),
        )
        value = Transfers(groups=groups, in_node=groups[0].all_gather)
        return calibrated(hardware, value, fitted, more=True)

    return step


def best_products(path: Path, table_hardware: str | None) -> Step:
    """Fit the rates of 8-bit GEMMs: the rates of 16-bit GEMMs, times the ratio between the best
    measured 8-bit rate and the best measured 16-bit rate.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        best = read_best_products(path, table_hardware or hardware.name)
        if hardware.compute is None:
            reject(
                f"{path}: rates of 8-bit GEMMs are fitted as ratios to 16-bit ones, which "
                f"{hardware.name} lacks: give --operators TABLE.csv too"
            )
        compute = hardware.compute
        rates = {rate.operators: rate for rate in compute.rates}
        for eight, sixteen in (
            ("matmul_8bit", "matmul"),
            ("grouped_matmul_8bit", "grouped_matmul"),
        ):
            rates[eight] = _faster(compute.rate(sixteen), eight, best)  # type: ignore[index, arg-type]
        fitted = Fitted(
            group="compute",
            origin=best.origin,
            note=f"8-bit products {best.ratio:.3f} times as fast as 16-bit ones, their best shapes",
            residuals=(
                Residual(
                    what="8-bit products, other machines' ratios",
                    rows=best.machines,
                    held_out=best.held_out,
                ),
            ),
        )
        value = replace(compute, rates=tuple(rates.values()))
        return calibrated(hardware, value, fitted, more=True)

    return step


def _faster(rate: Rate, operators: OperatorClass, best: Best) -> Rate:
    assert rate.tflops is not None
    return replace(rate, operators=operators, tflops=round(rate.tflops * best.ratio, 1))
