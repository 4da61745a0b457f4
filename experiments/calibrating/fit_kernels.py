"""Steps that fit a GPU's rates, and the collectives of its node, to tables of single kernels."""

from dataclasses import replace
from pathlib import Path

from experiments.calibrating.fits import Fitted, Residual, Step, calibrated
from mistlab.calibration import kernel_tables as tables
from mistlab.calibration.best_products import Best, read_best_products
from mistlab.calibration.collective_tests import read_collective_tests
from mistlab.core.values import InputError
from mistlab.machine.hardware import (
    Compute,
    GroupTransfers,
    Hardware,
    OperatorClass,
    Rate,
    Transfers,
)

ATTENTION: tuple[OperatorClass, ...] = ("attention_forward", "attention_backward")


def kernel_rates(
    path: Path, table_hardware: str | None, *, launch_us: float, sustained: float
) -> Step:
    """The rates of products, of experts' products, of fused attention and of memory."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = tables.read_kernel_table(path, table_hardware)
        kernels = {
            **table.products,
            **{name: tables.attention_rows(table, name) for name in ATTENTION},
        }
        rates: dict[OperatorClass, Rate] = {
            name: tables.rate_of(rows, name) for name, rows in kernels.items()
        }
        # Products of written-out attention were not measured: as others.
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
            table=path,
            sha256=table.origin.sha256,
            note=f"{table_hardware or 'unnamed'}, {sustained:.0%} of it sustained as given",
            residuals=tuple(residuals),
            duplicates=table.origin.duplicates,
        )
        value = Compute(
            rates=tuple(rates.values()),
            sustained=sustained,
            launch_us=launch_us,
        )
        return calibrated(hardware, "compute", value, fitted, more=False), fitted

    return step


def collective_tests(path: Path, table_hardware: str | None) -> Step:
    """Collectives inside a node and across nodes, from their bus bandwidth by size."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        tests = read_collective_tests(path, table_hardware or hardware.name)
        before = hardware.transfers
        if before is None:
            message = f"{path}: {hardware.name} has no copies to its host yet: give --borrow too"
            raise InputError(message)
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
            table=path,
            sha256=tests.origin.sha256,
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
        return calibrated(hardware, "transfers", value, fitted, more=True), fitted

    return step


def best_products(path: Path, table_hardware: str | None) -> Step:
    """The rates of 8-bit products: 16-bit ones, times the ratio of the best measured products."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        best = read_best_products(path, table_hardware or hardware.name)
        if hardware.compute is None:
            message = f"{path}: {hardware.name} has no rates of products yet: fit them first"
            raise InputError(message)
        compute = hardware.compute
        rates = {rate.operators: rate for rate in compute.rates}
        for eight, sixteen in (
            ("matmul_8bit", "matmul"),
            ("grouped_matmul_8bit", "grouped_matmul"),
        ):
            rates[eight] = _faster(compute.rate(sixteen), eight, best)  # type: ignore[index, arg-type]
        fitted = Fitted(
            group="compute",
            table=path,
            sha256=best.origin.sha256,
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
        return calibrated(hardware, "compute", value, fitted, more=True), fitted

    return step


def _faster(rate: Rate, operators: OperatorClass, best: Best) -> Rate:
    assert rate.tflops is not None
    return replace(rate, operators=operators, tflops=round(rate.tflops * best.ratio, 1))
