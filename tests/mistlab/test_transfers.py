"""Lines of transfers: what they say, and that a fit finds the line that made its rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mistlab import catalog
from mistlab.calibration.fitted_transfers import TransferRows, fit, mean_error
from mistlab.calibration.tables import read_transfer_table
from mistlab.core.values import FieldError, InputError
from mistlab.cost.links import transfer_s
from mistlab.machine.hardware import GroupTransfers, Line, Transfers

LINE = Line(latency_us=200.0, gbytes_per_s=5.0, smallest_mib=1.0, largest_mib=256.0)
HEADER = "generation,intra_group,inter_group,kind,bytes,latency_ms\n"


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    sizes = np.array([0.0, 1.0, 5e9])
    assert transfer_s(sizes, LINE).tolist() == pytest.approx([0.0, 2e-4, 1.0002])


def test_more_bandwidth_is_never_slower() -> None:
    sizes = np.geomspace(1, 1e10, 50)
    faster = replace(LINE, gbytes_per_s=6.0)
    assert (transfer_s(sizes, faster) <= transfer_s(sizes, LINE)).all()


def rows(line: Line, noise: float, seed: int) -> TransferRows:
    draw = np.random.default_rng(seed)
    sizes = np.geomspace(2**20, 2**28, 40)
    seconds = transfer_s(sizes, line) * draw.uniform(1 - noise, 1 + noise, len(sizes))
    return TransferRows(size_bytes=sizes, seconds=seconds)


def test_a_fit_finds_its_line() -> None:
    assert fit(rows(LINE, 0.0, 0)) == replace(LINE)
    noisy = fit(rows(LINE, 0.02, 0))
    assert noisy.gbytes_per_s == pytest.approx(5.0, rel=0.01)
    assert mean_error(rows(LINE, 0.02, 1), noisy) < 0.012


def test_latency_is_never_negative() -> None:
    sizes = np.array([1e6, 1e7, 1e8])
    concave = TransferRows(size_bytes=sizes, seconds=sizes**1.1 / 1e10)
    assert fit(concave).latency_us == 0


def test_every_row_is_in_one_half() -> None:
    whole = rows(LINE, 0.0, 0)
    halves = [whole.every_second(start) for start in (0, 1)]
    sizes = np.sort(np.concatenate([half.size_bytes for half in halves]))
    assert sizes.tolist() == np.sort(whole.size_bytes).tolist()


def test_a_machine_keeps_its_shapes() -> None:
    shapes = [(2, 1), (8, 1), (8, 2)]
    machine = Transfers(groups=tuple(GroupTransfers(gpus_in_node=g, nodes=n) for g, n in shapes))
    assert [(group.gpus_in_node, group.nodes) for group in machine.groups] == shapes


def test_a_range_of_sizes_has_an_order() -> None:
    with pytest.raises(FieldError, match="1 is below smallest_mib 2: give at least as much"):
        Line(latency_us=1, gbytes_per_s=1, smallest_mib=2, largest_mib=1)


@pytest.mark.parametrize("name", ["l4-24gb", "a100-40gb"])
def test_calibrated_hardware_is_no_faster_than_its_datasheet(name: str) -> None:
    hardware = catalog.hardware(name)
    assert hardware.transfers is not None
    assert hardware.provenance.transfers is not None
    for group in hardware.transfers.groups:
        copies = (group.host_to_device, group.device_to_host)
        for copy in filter(None, copies):
            assert copy.gbytes_per_s <= hardware.node.host_link_gbytes_per_s


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,2,1,all_gather,0,3", "line 2: column bytes: 0 is not positive"),
        ("a,2,1,all_gather,8,-1", "line 2: column latency_ms: -1 is negative"),
        ("a,2,1,all_gather,8,nan", "line 2: column latency_ms: nan is negative or not finite"),
        (
            "a,2,1,gather,8,1",
            "line 2: column kind: 'gather' is unknown: give all_gather, pinned_h2d",
        ),
        ("a,,1,all_gather,8,1", "line 2: column intra_group: is empty"),
    ],
)
def test_bad_rows_are_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{HEADER}{row}\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_transfer_table(path)
